"""Clocks of a device that nobody reads stay small; what they say is the sum all the same."""

from collections.abc import Iterator
from itertools import count

import pytest

from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.device import OPEN, DeviceStopwatch

LATE = 10
"""Events of the device that are still to come when the host records another."""


class Event:
    """Of a device that passes one event a millisecond, some of them later than the host has recorded them."""

    numbers: Iterator[int]
    recorded = 0
    made = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        Event.made += 1

    def record(self) -> None:
        self.number = Event.recorded = next(Event.numbers)

    def query(self) -> bool:
        return self.number <= Event.recorded - LATE

    def elapsed_time(self, other: "Event") -> float:
        return float(other.number - self.number)


def test_a_stopwatch_that_nobody_reads_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "Event", Event)
    Event.numbers, Event.made = count(), 0
    watch = DeviceStopwatch()
    for _ in range(10000):
        watch.start()
        watch.stop()
    assert Event.made <= 2 * (OPEN + LATE)
    assert watch.seconds() == pytest.approx(1e-3 * (10000 - LATE // 2), abs=1e-3)
