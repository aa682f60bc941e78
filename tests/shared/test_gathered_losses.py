"""Losses over rows of all workers: as ddp where the workers' models are equal, near and named where they differ."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_decentral import CompressedStrategy, GossipStrategy
from lightning_decentral.gossip import Complete, Plain
from tests.tiny import QUIET, Net, SizedBatches, in_processes

EXACT = partial(GossipStrategy, topology=Complete(), delay=0)
ALIKE: dict[str, Callable[..., Any]] = {
    "gossip, exact": EXACT,
    "compressed": partial(CompressedStrategy, codec=Plain()),
}
SAID = "all_gather(sync_grads=True) is called while the workers' models differ"


class Contrastive(Net):
    """Each row's nearest other view among the rows of all workers is its own."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.norm: Any = nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        views = [nn.functional.normalize(self(x), dim=1) for x in (batch[0], batch[0] + 0.1)]
        every = self.all_gather(views[1], sync_grads=True).flatten(0, 1)
        places = torch.arange(len(views[0])) + self.global_rank * len(views[0])
        return nn.functional.cross_entropy(views[0] @ every.T * 5, places)


def fit(strategy: Callable[..., Any]) -> dict[str, Tensor]:
    trainer = Trainer(**QUIET, max_epochs=1, devices=2, strategy=strategy(start_method="fork"))
    module = Contrastive()
    trainer.fit(module, SizedBatches(4))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def by_ddp() -> dict[str, Tensor]:
    found: dict[str, Tensor] = in_processes(fit, partial(DDPStrategy, find_unused_parameters=True))
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["gossip, exact", "compressed"])
def test_equal_workers_have_the_loss_of_ddp(
    strategy: str, by_ddp: dict[str, Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    found = in_processes(fit, ALIKE[strategy])
    for name, value in by_ddp.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    assert SAID not in capfd.readouterr().err


def test_workers_that_differ_are_told_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    in_processes(fit, GossipStrategy)
    assert " ".join(capfd.readouterr().err.split()).count(SAID) == 1
