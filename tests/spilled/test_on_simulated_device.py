"""LAW: a chain of layers spilled to the host trains as it does without a device, in any order in which streams may run.

Copies to the device and back go on streams of their own, forward and backward are autograd's. The update is the host's
or, a few parameters at a time, the device's.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor

from lightning_decentral import SpilledStrategy
from lightning_decentral.spilled import OnDevice, OnHost, Update
from lightning_decentral.spilled.compute.transfer import Copies, Cuda
from tests import simulated
from tests.simulated import CUDA
from tests.simulated.streams import Event, Stream
from tests.spilled.spilling import LAYERS, Chain, fit, rows

STEPS = 3
UPDATES: list[Update] = [OnHost(), OnDevice()]


class Accelerator(CPUAccelerator):
    """Of the device that is simulated."""

    def setup_device(self, device: torch.device) -> None: ...


class OnSimulated(SpilledStrategy):
    """Computes on it."""

    root_device = property(lambda self: CUDA, lambda self, device: None)  # type: ignore[assignment]


def parameters(trainer: Trainer) -> list[Tensor]:
    return [p.detach() for p in trainer.lightning_module.parameters()]


def expected() -> list[Tensor]:
    return parameters(fit(Chain(), rows(), max_steps=STEPS, limit_val_batches=0))


def run(
    seed: int, steps: int, update: Update, module: type[LightningModule] = Chain
) -> tuple[list[Tensor], Counter[str]]:
    """(parameters after so many steps, what made the host wait, how often)."""
    settings = {"max_steps": steps, "limit_val_batches": 0, "accelerator": Accelerator()}
    with simulated.device(seed) as engine:
        strategy = OnSimulated(memory_bytes=10**9, update=update)
        return parameters(fit(module(), rows(), strategy, **settings)), Counter(engine.waits)


def wrong(update: Update, seeds: range = range(4)) -> int:
    """Schedules that lead elsewhere."""
    count, right = 0, expected()
    for seed in seeds:
        try:
            found, _ = run(seed, STEPS, update)
            count += not all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
        except ValueError:  # the first step sees that a block doesn't give the same twice
            count += 1
    return count


@pytest.mark.parametrize("update", UPDATES, ids=["host", "device"])
def test_training_is_that_of_the_host_in_any_schedule(update: Update) -> None:
    assert wrong(update) == 0


def test_a_step_waits_once_a_visit_of_a_block() -> None:
    """Before what the visit before used is given back: forward and backward, and where a step begins and ends. So much
    is by design: what comes next begins where nothing is queued, and the memory is bounded by what is counted."""
    (_, before), (_, after) = run(0, STEPS, OnHost()), run(0, STEPS + 1, OnHost())
    more = after - before
    assert more.total() == 2 * LAYERS + 2
    assert all("synchronize spilled/compute/transfer.py" in wait for wait in more)


class Reading(Chain):
    """Its step reads its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        float(loss.detach())
        return loss


def test_a_step_that_reads_its_loss_is_seen() -> None:
    (_, before), (_, after) = (run(0, steps, OnHost(), Reading) for steps in (STEPS, STEPS + 1))
    more = after - before
    assert sum(n for wait, n in more.items() if wait.startswith("_local_scalar_dense")) == 1
    assert more.total() == 2 * LAYERS + 3


@pytest.mark.parametrize("update", UPDATES, ids=["host", "device"])
def test_memory_that_goes_back_before_it_was_copied_is_seen(update: Update) -> None:
    """To the host, of what a block was given."""
    send = Cuda.send

    def early(self: Cuda, tensors: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> Copies:
        leaving = send(self, tensors, like)
        leaving._held = []
        return leaving

    with mock.patch.object(Cuda, "send", early):
        assert wrong(update) >= 2


@pytest.mark.sampled
@pytest.mark.parametrize("update", UPDATES, ids=["host", "device"])
@pytest.mark.parametrize(
    ("owner", "call"),
    [(Stream, "wait_stream"), (Event, "wait"), (Event, "synchronize")],
    ids=["to be copied", "copied there", "copied back"],
)
def test_a_missing_wait_is_seen(owner: type, call: str, update: Update) -> None:
    """For what is to be copied; by the computing stream for copies; by the host for what came back."""
    with mock.patch.object(owner, call):
        assert wrong(update) >= 2
