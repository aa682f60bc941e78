"""LAW: a step through stages on devices gives the model's gradients, in any order in which streams may run.

Each link and direction is a communicator of two stages with NCCL's order, as the strategy makes them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_decentral.pipeline import ExactActivations, OneForwardOneBackward, ZeroBubble
from lightning_decentral.pipeline.compute.stage import Stage
from lightning_decentral.pipeline.plan.schedule import Schedule, in_step
from lightning_decentral.pipeline.stage_layout import StageGroups, StageLayout
from tests.pipeline.causal import apart, batch, sliced, whole
from tests.pipeline.nccl_order import ahead
from tests.simulated import CUDA, Engine, here
from tests.simulated.streams import Event
from tests.simulated.wire import Make, device_world, sent_overwritten

pytestmark = pytest.mark.threads


INPUTS = batch(padded=False)
PADDED = batch()
every_schedule = pytest.mark.parametrize("schedule", [OneForwardOneBackward(), ZeroBubble()], ids=str)


def on_devices(seed: int, waits: list[str], number: int, worker: Callable[..., Any]) -> list[Any]:
    def stage(make: Make, engine: Engine) -> Any:
        wire: Any = SimpleNamespace(group=make.group, hosts=lambda groups: make.hosts)
        edges = StageGroups(wire, StageLayout(number, number, number), CUDA).edges
        shares, gradients = worker(make.hosts.rank, edges, CUDA)
        waits.extend(engine.waits)
        on_host = {name: gradient.cpu() for name, gradient in gradients.items()}
        return [(weight.cpu(), loss.cpu()) for weight, loss in shares], on_host

    return device_world(number, stage, seed)


def error(
    name: str, schedule: Schedule, seed: int, waits: list[str], inputs: tuple[Any, ...] = INPUTS, **options: Any
) -> float:
    """Of the gradients, relative; what hosts waited for."""
    _, wanted = whole(name, torch.float64, *inputs)
    _, gradients = sliced(
        name, torch.float64, *inputs, num_stages=2, slices=[5, 1, 4, 3], microbatches=2, schedule=schedule,
        stages=partial(on_devices, seed, waits), **{"posting": in_step, **options},
    )  # fmt: skip
    return apart(gradients, wanted)


def of_ours(waits: list[str]) -> list[str]:
    """Not of the test that gives the batch to the device."""
    return [wait for wait in waits if " /" not in wait]


@pytest.mark.sampled
@every_schedule
@pytest.mark.parametrize(
    ("name", "inputs"),
    [("gpt2, tied", INPUTS), ("llama", INPUTS), ("llama", PADDED), ("gpt2, eager", PADDED)],
    ids=["gpt2, tied", "llama", "llama, padded", "gpt2, eager, padded"],
)
def test_gradients_are_those_of_the_whole_model(name: str, inputs: tuple[Any, ...], schedule: Schedule) -> None:
    """Slices, keys and values, masks, messages, how many targets a micro-batch has: no host waits."""
    waits = list[str]()
    assert error(name, schedule, 0, waits, inputs) < 1e-9
    assert of_ours(waits) == []


@dataclass(frozen=True)
class ShortOfMemory(ExactActivations):
    """There is room for a message only when the device has done all that it was given, receives included."""

    seconds: float

    def buffer(self, *args: Any) -> Tensor:
        self._drain()
        return super().buffer(*args)

    def encode(self, tensor: Tensor) -> Tensor:
        self._drain()
        return super().encode(tensor)

    def _drain(self) -> None:
        engine = here()
        assert engine is not None
        engine.seconds = self.seconds
        engine.finish()


@pytest.mark.sampled
@every_schedule
def test_stages_whose_memory_is_short_go_on(schedule: Schedule) -> None:
    assert error("gpt2, tied", schedule, 0, [], boundary=ShortOfMemory(30.0)) < 1e-9


def test_two_ahead_they_wait_for_each_other() -> None:
    with pytest.raises(RuntimeError, match="the device waits for what nobody does"):
        error("gpt2, tied", OneForwardOneBackward(), 0, [], boundary=ShortOfMemory(1.0), posting=ahead)


def test_a_stage_that_doesnt_wait_for_its_messages_is_seen() -> None:
    with mock.patch.object(Event, "wait"):
        assert not error("gpt2, tied", OneForwardOneBackward(), 0, []) < 1e-9


def test_a_message_that_is_overwritten_before_it_was_sent_is_seen() -> None:
    with sent_overwritten():
        assert not error("gpt2, tied", OneForwardOneBackward(), 0, []) < 1e-9


def test_a_stage_whose_host_reads_what_it_computes_is_seen() -> None:
    """Once a stage, slice and micro-batch."""
    forward, waits = Stage.forward, list[str]()

    def reading(self: Stage, microbatch: int, index: int, hidden: Tensor | None) -> Tensor:
        output = forward(self, microbatch, index, hidden)
        float(output.detach().sum())
        return output

    with mock.patch.object(Stage, "forward", reading):
        assert error("gpt2, tied", OneForwardOneBackward(), 0, waits) < 1e-9
    assert len(of_ours(waits)) == 2 * 2 * 4, "stages, microbatches, slices"
