"""What worker 0 finds, or why it finds nothing, is told to all."""

from typing import Any

import pytest

from lightning_decentral.partial.agreed import agreed
from lightning_decentral.partial.compute.search import CutPlan

PLAN = CutPlan((), {}, (), ())


class Told:
    """A broadcast of two workers, one after the other."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def __call__(self, value: Any) -> Any:
        self.said.append(value)
        return self.said[0]


def nothing() -> CutPlan:
    raise AssertionError("worker 0 alone searches")


def failing(error: Exception) -> Any:
    def find() -> CutPlan:
        raise error

    return find


def test_all_have_the_cuts_of_worker_0() -> None:
    told = Told()
    assert agreed(0, told, lambda: PLAN) is agreed(1, told, nothing) is PLAN


@pytest.mark.parametrize(("error", "kind", "message"), [
    (ValueError("no chain"), ValueError, "^no chain$"),
    (RuntimeError("in place"), RuntimeError, "worker 0 found no cuts, it failed with RuntimeError: in place"),
    (KeyError("absent"), RuntimeError, "worker 0 found no cuts, it failed with KeyError: 'absent'"),
], ids=str)  # fmt: skip
def test_nobody_waits_for_a_worker_0_that_failed(error: Exception, kind: type[Exception], message: str) -> None:
    told = Told()
    with pytest.raises(type(error)):
        agreed(0, told, failing(error))
    assert len(told.said) == 1
    with pytest.raises(kind, match=message):
        agreed(1, told, nothing)
