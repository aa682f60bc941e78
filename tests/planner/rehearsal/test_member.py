"""Calls that a rehearsal's workers do themselves, where strategies have threads for them."""

import weakref
from functools import partial

import pytest
import torch

from lightning_decentral.planner.rehearsal.member import CallersQueue


class Part:
    """As a part in flight: it has the result of its own call."""

    def __init__(self, queue: CallersQueue) -> None:
        self.calls = 0
        self.left = queue.send(self.leave)

    def leave(self) -> bool:
        self.calls += 1
        return torch.is_grad_enabled()


def fail(calls: list[int]) -> None:
    calls.append(1)
    raise RuntimeError("no mean")


@pytest.mark.parametrize("at_once", [True, False])
def test_a_call_is_done_once_and_keeps_nothing(at_once: bool) -> None:
    part = Part(CallersQueue(at_once))
    assert part.calls == at_once
    assert [part.left.result(), part.left.result(), part.calls] == [False, False, 1]
    memory = weakref.ref(part)
    del part
    assert memory() is None, "without a collector, which would find a circle"


def test_a_call_that_fails_is_done_once_and_fails_for_all_who_ask() -> None:
    calls: list[int] = []
    failed = CallersQueue(at_once=False).send(partial(fail, calls))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no mean"):
            failed.result()
    with pytest.raises(RuntimeError, match="no mean"):
        CallersQueue(at_once=True).send(partial(fail, calls))
    assert len(calls) == 2
