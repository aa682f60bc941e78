"""What worker 0 finds, or why it finds nothing, is sent to all."""

from typing import Any

import pytest

from lightning_decentral.partial.agreed import decided, found_together
from lightning_decentral.partial.compute.search import CutPlan
from lightning_decentral.shared.wire.pending import PeerLost

PLAN = CutPlan((), {}, (), ())


class Broadcasts:
    """A broadcast of two workers, one after the other."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def __call__(self, value: Any) -> Any:
        self.sent.append(value)
        return self.sent[0]


def agreed(rank: int, broadcast: Broadcasts, find: Any) -> CutPlan:
    """Worker 0 alone searches, as in a rehearsal."""
    return found_together(lambda own: [broadcast(own)], lambda decide: decide(find if rank == 0 else lambda: None))


def failing(error: Exception) -> Any:
    def find() -> CutPlan:
        raise error

    return find


def test_all_have_the_cuts_of_worker_0() -> None:
    broadcast = Broadcasts()
    assert agreed(0, broadcast, lambda: PLAN) is agreed(1, broadcast, None) is PLAN


@pytest.mark.parametrize(("error", "kind", "message"), [
    (ValueError("no chain"), ValueError, "^no chain$"),
    (RuntimeError("in place"), RuntimeError, "worker 0 found no cuts: its step failed with RuntimeError: in place"),
    (KeyError("absent"), RuntimeError, "worker 0 found no cuts: its step failed with KeyError: 'absent'"),
], ids=str)  # fmt: skip
def test_nobody_waits_for_a_worker_0_that_failed(error: Exception, kind: type[Exception], message: str) -> None:
    broadcast = Broadcasts()
    with pytest.raises(type(error)):
        agreed(0, broadcast, failing(error))
    assert len(broadcast.sent) == 1
    with pytest.raises(kind, match=message):
        agreed(1, broadcast, None)


def test_what_worker_0_found_is_what_all_go_on_with() -> None:
    assert decided(lambda own: [("first", "", ""), own], lambda: "second") == "first"


@pytest.mark.parametrize(("others", "kind", "message"), [
    ((None, "no cut there", ""), ValueError, "^no cut there$"),
    ((None, "", "KeyError: 'absent'"), RuntimeError, "worker 1 found no cuts: its step failed with KeyError: 'absent'"),
], ids=str)  # fmt: skip
def test_all_end_where_one_refuses_or_fails(others: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        decided(lambda own: [own, others], lambda: "found")


def test_who_fails_says_so_and_raises_its_own_error() -> None:
    sent: list[Any] = []

    def gather(own: Any) -> list[Any]:
        sent.append(own)
        return [own]

    with pytest.raises(KeyError):
        decided(gather, failing(KeyError("absent")))
    assert sent == [(None, "", "KeyError: 'absent'")]


def test_a_lost_worker_gets_no_message() -> None:
    def gather(own: Any) -> list[Any]:
        raise AssertionError("nobody would come")

    with pytest.raises(PeerLost):
        decided(gather, failing(PeerLost("gone")))
