"""LAW: a step through stages on devices gives the model's gradients, in any order in which streams may run.

Each link and direction is a communicator of two stages with NCCL's order, as the strategy makes them.
"""

from collections.abc import Callable, Sequence
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
from lightning_decentral.pipeline.plan.posting import in_step
from lightning_decentral.pipeline.plan.schedule import Schedule
from lightning_decentral.pipeline.stage_layout import StageGroups, StageLayout
from lightning_decentral.shared.wire.transport import Message
from tests.pipeline.causal import apart, batch, sliced, whole
from tests.pipeline.nccl_order import ahead
from tests.simulated import CUDA, Engine, here
from tests.simulated.streams import Event
from tests.simulated.wire import Make, QueuedTransport, device_world

pytestmark = pytest.mark.threads


INPUTS = batch(padded=False)
every_schedule = pytest.mark.parametrize("schedule", [OneForwardOneBackward(), ZeroBubble()], ids=str)


def on_devices(seed: int, waits: list[str], number: int, worker: Callable[..., Any]) -> list[Any]:
    def stage(make: Make, engine: Engine) -> Any:
        wire: Any = SimpleNamespace(group=make.group)
        edges = StageGroups(wire, StageLayout(number, number, number), CUDA).edges
        shares, gradients = worker(make.hosts.rank, edges, CUDA)
        waits.extend(engine.waits)
        return shares, {name: gradient.cpu() for name, gradient in gradients.items()}

    return device_world(number, stage, seed)


def error(name: str, schedule: Schedule, seed: int, waits: list[str], **options: Any) -> float:
    """Of the gradients, relative; what hosts waited for."""
    _, wanted = whole(name, torch.float64, *INPUTS)
    _, gradients = sliced(
        name, torch.float64, *INPUTS, num_stages=2, slices=[5, 1, 4, 3], microbatches=2, schedule=schedule,
        stages=partial(on_devices, seed, waits), **{"posting": in_step, **options},
    )  # fmt: skip
    return apart(gradients, wanted)


@every_schedule
@pytest.mark.parametrize("name", ["gpt2, tied", "llama"])
def test_gradients_are_those_of_the_whole_model(name: str, schedule: Schedule) -> None:
    """Slices, keys and values, messages: hosts wait for nothing but the loss, which this test's last stage reads."""
    waits = list[str]()
    assert error(name, schedule, 0, waits) < 1e-9
    ours = {wait.rpartition(" ")[2].partition(":")[0] for wait in waits if " /" not in wait}
    assert ours == {"pipeline/compute/loss.py", "pipeline/wire/executor.py"}
    assert sum(" /" not in wait for wait in waits) == 4, "targets and loss of two microbatches"


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
    exchange = QueuedTransport.exchange

    def early(self: QueuedTransport, sends: Sequence[Message], receives: Sequence[Message]) -> Any:
        pending = exchange(self, sends, receives)
        for message in sends:
            message.tensor.detach().zero_()
        return pending

    with mock.patch.object(QueuedTransport, "exchange", early):
        assert not error("gpt2, tied", OneForwardOneBackward(), 0, []) < 1e-9


def test_a_stage_whose_host_reads_what_it_computes_is_seen() -> None:
    """Once a slice and microbatch: in each of them, beyond the targets and the loss."""
    forward, waits = Stage.forward, list[str]()

    def reading(self: Stage, microbatch: int, index: int, hidden: Tensor | None) -> Tensor:
        output = forward(self, microbatch, index, hidden)
        float(output.detach().sum())
        return output

    with mock.patch.object(Stage, "forward", reading):
        assert error("gpt2, tied", OneForwardOneBackward(), 0, waits) < 1e-9
    assert sum(" /" not in wait for wait in waits) == 4 + 2 * 2 * 4, "stages, microbatches, slices"
