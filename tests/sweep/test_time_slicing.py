"""The gate in a real Trainer, with a seat that only writes down what it is asked."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_decentral.sweep import time_slicing as gate
from lightning_decentral.sweep.plan.arbiter import TurnReport
from lightning_decentral.sweep.wire.client import Admission
from tests.tiny import QUIET, Net, SizedBatches


class Seat:
    """Grants everything, and never ends a grant by itself."""

    def __init__(self) -> None:
        self.held, self.vacated, self.turns = False, 0, list[TurnReport]()
        self.worked_seconds = 0.0
        self.baggage: Any = None

    @property
    def fresh(self) -> bool:
        return self.held

    def take(self, turn: TurnReport) -> None:
        self.held = True

    def give(self, turn: TurnReport) -> None:
        if self.held:
            self.turns.append(turn)
        self.held = False

    def vacate(self) -> None:
        self.vacated += 1


class Clock:
    """Stands still but for what moves it, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(SizedBatches):
    """Each batch takes its time."""

    def __init__(self, count: int, clock: Clock) -> None:
        super().__init__(count)
        self.clock = clock

    def __iter__(self) -> Iterator[list[Tensor]]:
        for batch in super().__iter__():
            self.clock.now += 0.02
            yield batch


class Watched(Net):
    """Computes only while the device is its own."""

    def __init__(self, seat: Seat) -> None:
        super().__init__()
        self.seat = [seat]

    def forward(self, x: Tensor) -> Tensor:
        assert self.seat[0].held
        self.seat[0].worked_seconds += 1.0
        return super().forward(x)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        assert not self.seat[0].held


@pytest.fixture
def seat(monkeypatch: pytest.MonkeyPatch) -> Seat:
    seat = Seat()
    monkeypatch.setitem(gate._SEATS, os.getpid(), seat)
    return seat


def trainer(memory_bytes: int | None = None, clock: Clock | None = None, **options: Any) -> Trainer:
    made = gate.Gate(Admission("", "0", memory_bytes=memory_bytes), clock or Clock())
    return Trainer(**QUIET, **options, callbacks=[made])


def test_every_batch_of_every_loop_has_the_device_and_nothing_else_does(seat: Seat) -> None:
    module, one = Watched(seat), trainer(max_epochs=2)
    one.fit(module, SizedBatches(6), SizedBatches(2))
    assert not seat.held
    assert seat.vacated == 1
    # Given back behind each epoch's validation, which is its end.
    assert [turn.progress for turn in seat.turns] == [0.5, 1.0]
    one.validate(module, SizedBatches(2), verbose=False)
    one.test(module, SizedBatches(2), verbose=False)
    one.predict(module, SizedBatches(2))
    assert not seat.held
    assert seat.turns[-1].remaining_seconds == 0.0


def test_the_remaining_time_is_steps_to_go_at_the_pace_so_far(seat: Seat) -> None:
    trainer(max_epochs=4).fit(Watched(seat), SizedBatches(6))
    # A second for each of the six steps of an epoch.
    assert [turn.remaining_seconds for turn in seat.turns] == [18.0, 12.0, 6.0, 0.0]
    assert [turn.progress for turn in seat.turns] == [0.25, 0.5, 0.75, 1.0]


def test_slow_data_are_awaited_without_the_device(seat: Seat) -> None:
    clock = Clock()
    trainer(max_epochs=1, clock=clock).fit(Watched(seat), Slow(6, clock))
    # The mean wait is over IDLE_SECONDS from the third batch on: 0.2 * 0.02, then 0.36 * 0.02.
    assert [turn.progress for turn in seat.turns] == pytest.approx([3 / 6, 4 / 6, 5 / 6, 1.0])


def test_what_a_training_needs_is_measured_after_its_first_update(seat: Seat) -> None:
    module = Watched(seat)
    trainer(memory_bytes=10**6, max_epochs=1).fit(module, SizedBatches(6), SizedBatches(1))
    # Tied weights once; float32; SGD with momentum keeps one tensor for each that is trained.
    tensors = [*{p.data_ptr(): p for p in module.parameters()}.values(), *module.buffers()]
    trained = [p for p in module.parameters() if p.requires_grad]
    held = sum(t.numel() * t.element_size() for t in tensors) + 2 * sum(4 * p.numel() for p in trained)
    assert seat.turns[-1].peak_bytes == held
    # Lightning lets the gradients go before a validation.
    assert seat.turns[-1].kept_bytes == held - sum(4 * p.numel() for p in trained)


def test_more_than_the_device_has_is_said_before_the_first_batch(seat: Seat) -> None:
    with pytest.raises(
        ValueError, match=r"needs at least [\d,]+ bytes .*memory_bytes=100\): train with strategy=spilled"
    ):
        trainer(memory_bytes=100, max_epochs=1).fit(Watched(seat), SizedBatches(6))
    assert seat.worked_seconds == 0.0


def test_running_out_of_memory_says_the_same(seat: Seat) -> None:
    class Full(Watched):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(ValueError, match="strategy=spilled"):
        trainer(memory_bytes=10**6, max_epochs=1).fit(Full(seat), SizedBatches(6))
