"""What a callback writes to the parameters wins over a rule's anchors, wherever it does so, in memory and in files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import (
    Combine,
    Complete,
    Every,
    Gossip,
    GradientTracking,
    OnePeerExponential,
    Outer,
    OuterNesterov,
    PseudoGradient,
    PushSum,
    QuasiGlobalMomentum,
    RandomMatching,
    Ring,
    Topology,
)
from lightning_decentral.gossip.wire.optimizer_mixer import Written
from lightning_decentral.shared.compute.buckets import pack
from lightning_decentral.shared.wire.mean import Swap
from tests.gossip.test_anchors import Validated
from tests.tiny import QUIET, in_processes

SIZE, STEPS = 3, 6
HOOKS = ["on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_epoch_end", "on_train_end"]
RULES: list[tuple[Combine, Topology, int]] = [
    (OuterNesterov(), Every(4, Complete()), 0),
    (PseudoGradient(lr=0.5, momentum=0.3), Every(4, Complete()), 1),
    (Outer(), Every(2, RandomMatching()), 1),
    (PushSum(), OnePeerExponential(), 1),
    (QuasiGlobalMomentum(), Ring(), 1),
    (GradientTracking(), Ring(), 1),
    (Gossip(), Ring(), 1),
]


class Write(Callback):
    """Every worker's average, as it were: other numbers on each, in one of a trainer's hooks, after the last step."""

    def __init__(self, folder: Path, hook: str, by_data: bool) -> None:
        self._folder, self._by_data = folder, by_data
        setattr(self, hook, self._write)

    def _write(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step < STEPS or trainer.sanity_checking:
            return
        (parameter,) = pl_module.parameters()
        value = torch.full_like(parameter, 10.0 + trainer.global_rank)
        if self._by_data:
            parameter.data.copy_(value)
        else:
            pl_module.load_state_dict({"x": value})


class Save(Callback):
    """The last of the callbacks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self._folder / "end.ckpt")


def fit(folder: Path, hook: str, by_data: bool, options: dict[str, Any]) -> Tensor:
    settings: dict[str, Any] = {**QUIET, "max_steps": STEPS, "max_epochs": 1, "limit_train_batches": STEPS}
    watching = [Write(folder, hook, by_data), ModelCheckpoint(folder, filename="saved"), Save(folder)]
    strategy = GossipStrategy(start_method="fork", **options)
    module = Validated()
    trainer = Trainer(
        **{**settings, "enable_checkpointing": True}, limit_val_batches=1, devices=SIZE, strategy=strategy,
        callbacks=watching,
    )  # fmt: skip
    trainer.fit(module)
    return module.x.detach()


@pytest.mark.sampled
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize(("number", "plan"), [*enumerate(RULES)], ids=str)
def test_what_a_callback_writes_after_the_last_round_is_handed_back_and_saved(
    tmp_path: Path, number: int, plan: tuple[Combine, Topology, int], hook: str
) -> None:
    rule, topology, delay = plan
    options = {"combine": rule, "topology": topology, "delay": delay}
    by_data = bool((number + HOOKS.index(hook)) % 2)
    found = in_processes(fit, tmp_path, hook, by_data, options)
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]["x"]
    for x in (found, saved):
        # Push-sum's workers have weights in the mean: here 1 each, as the graph's columns sum to one.
        torch.testing.assert_close(x, torch.full_like(x, 11.0), rtol=1e-9, atol=1e-9)


# ---- what is found ---------------------------------------------------------------------------------------------------


def made() -> tuple[list[nn.Parameter], Written]:
    parameters = [nn.Parameter(torch.randn(300, 7)), nn.Parameter(torch.zeros(5)), nn.Parameter(torch.ones(()))]
    written = Written(pack(parameters))
    written.note()
    return parameters, written


def test_a_change_of_a_parameter_is_found_and_no_others() -> None:
    parameters, written = made()
    assert written.look() == set()
    with torch.no_grad():
        parameters[0][17, 3] += 1
    parameters[2].data.fill_(3)
    assert written.look() == {parameters[0].data_ptr(), parameters[2].data_ptr()}
    assert written.look() == {parameters[0].data_ptr(), parameters[2].data_ptr()}, "as long as no step is taken"
    parameters[1].data = torch.ones(5)  # another storage
    assert parameters[1].data_ptr() in written.look() or len(written.found) == 3
    written.stepped()
    assert written.look() == set()


def test_a_step_of_the_mixer_is_no_writing() -> None:
    parameters, written = made()
    torch.optim.SGD(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(parameters, lr=0.1).step()
    written.stepped()
    assert written.look() == set()


def test_what_was_merged_and_taken_out_again_is_put_back_to_the_bit() -> None:
    """With its rounding; what was written stays."""
    merged, restored = nn.Parameter(torch.randn(50)), nn.Parameter(torch.randn(50))
    own, low = merged.detach().clone(), torch.randn(50)
    swap = Swap([merged, restored], [torch.randn(50), torch.zeros(50)])
    with torch.no_grad():
        merged.add_(low).sub_(low)
        restored.fill_(2.0)
    assert [t is restored for t in swap.undo()] == [True]
    assert torch.equal(merged, own)
    assert bool((restored == 2).all())
