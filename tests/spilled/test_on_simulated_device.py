"""LAW: a chain of layers spilled to the host trains as it does without a device, in any order in which streams may run.

Copies to the device and back go on streams of their own, forward and backward are autograd's. The update is the host's
or, a few parameters at a time, the device's.
"""

from collections import Counter
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor

from lightning_decentral import SpilledStrategy
from lightning_decentral.spilled import OnDevice, OnHost, Update
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


def run(seed: int, steps: int, update: Update) -> tuple[list[Tensor], Counter[str]]:
    """(parameters after so many steps, what made the host wait, how often)."""
    settings = {"max_steps": steps, "limit_val_batches": 0, "accelerator": Accelerator()}
    with simulated.device(seed) as engine:
        strategy = OnSimulated(memory_bytes=10**9, update=update)
        return parameters(fit(Chain(), rows(), strategy, **settings)), Counter(engine.waits)


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
