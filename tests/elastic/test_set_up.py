"""What is wrong with a worker by itself it finds without the others, in its own words; a lobby is for one run."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_decentral.elastic.checks import refuse_overlap
from lightning_decentral.gossip import Asynchronous, Elastic, GossipStrategy
from tests.crew import by_itself, crew
from tests.elastic.wire.lobbies import DEAD, LobbyProcess
from tests.tiny import QUIET

TIMEOUT = timedelta(seconds=90)
SOON = 45.0
"""Seconds, of a busy machine: none of them has waited for the timeout."""
NOWHERE = "127.0.0.1:9"


class Small(LightningModule):
    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(3))
        for name, value in changes.items():
            setattr(self, name, value)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.x.square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Broken(Small):
    def configure_optimizers(self) -> Any:
        raise ZeroDivisionError("in the user's own code")


def fit(
    lobby: str, module: LightningModule, times: int = 1, least: int = 2, order: Asynchronous | None = None, **given: Any
) -> None:
    elastic = Elastic(lobby=lobby, workers=(least, 2), dead_after=DEAD, host="127.0.0.1", asynchronous=order)
    strategy: Any = GossipStrategy(elastic=elastic, timeout=TIMEOUT)
    trainer = Trainer(**QUIET, strategy=strategy, devices=1, max_steps=3, max_epochs=1, limit_val_batches=0)
    for fits in range(times):
        trainer.fit_loop.epoch_loop.max_steps = 3 * (fits + 1)
        trainer.fit(module, [torch.zeros(1)] * 4, **given)


ASYNCHRONOUS = Asynchronous()
REFUSED: list[tuple[Callable[[], LightningModule], Asynchronous | None, str]] = [
    (lambda: Small(automatic_optimization=False), ASYNCHRONOUS, "asynchronous rounds, need automatic optimization"),
    (lambda: Small(norm=nn.SyncBatchNorm(3)), None, "SyncBatchNorm makes all workers wait"),
]


@pytest.mark.parametrize(("make", "order", "said"), REFUSED, ids=["manual optimization", "layer"])
def test_what_no_elastic_run_trains_is_refused_before_a_lobby_is_asked(
    make: Callable[[], LightningModule], order: Asynchronous | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        fit(NOWHERE, make(), order=order)


def test_optimizers_that_share_a_parameter_are_refused() -> None:
    x, y = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    refuse_overlap([torch.optim.SGD([x]), torch.optim.SGD([y])])
    with pytest.raises(ValueError, match="give every parameter to one optimizer alone"):
        refuse_overlap([torch.optim.SGD([x, y]), torch.optim.SGD([y])])


def member(lobby: str, module: type[LightningModule], file: str) -> None:
    by_itself()
    fit(lobby, module(), **({"ckpt_path": file} if file else {}))


@pytest.mark.parametrize(
    ("module", "file", "said"),
    [(Broken, "", "ZeroDivisionError: in the user's own code"), (Small, "no.ckpt", "FileNotFoundError: Checkpoint")],
    ids=["own code", "no such file"],
)
def test_each_worker_ends_with_its_own_error(
    tmp_path: Path, module: type[LightningModule], file: str, said: str
) -> None:
    """Found in set-up, where the first one was known, and has ended."""
    with LobbyProcess(least=2, most=2) as lobby:
        outcomes = crew(2, member, lobby.place, module, file and str(tmp_path / file))
    assert [outcome.error[: len(said)] for outcome in outcomes] == [said, said]
    assert all(outcome.seconds < SOON for outcome in outcomes)


def test_a_second_fit_at_a_lobby_is_refused_at_once() -> None:
    with (
        LobbyProcess(least=1, most=2) as lobby,
        pytest.raises(ValueError, match=r"all members of the run at this lobby have ended, .* start another lobby for"),
    ):
        fit(lobby.place, Small(), times=2, least=1)
