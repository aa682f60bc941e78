"""A host that was suspended finds out that it was away."""

import time

import pytest

from lightning_decentral.elastic.plan.messages import LobbyUpdate
from lightning_decentral.elastic.plan.view import Times, View
from lightning_decentral.elastic.wire.lobby_client import LobbyClient
from lightning_decentral.elastic.wire.sockets import clock


@pytest.mark.skipif("CLOCK_BOOTTIME" not in vars(time), reason="the monotonic clock goes on")
def test_it_is_the_one_that_goes_on() -> None:
    assert clock.NAME == time.CLOCK_BOOTTIME
    first = clock.now()
    assert 0 <= clock.now() - first < 60


def test_a_suspended_member_doubts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monotonic clock stood still: for it no time has passed since the lobby's last word."""
    member = LobbyClient("a", "a:1", "127.0.0.1:1", lambda donor, place: None, lambda to, beat: None, Times(10.0))
    view = View(1, ("a", "b"), 0, ("a", "b"), "a", 2)
    update = LobbyUpdate(1, view, 1, (), {}, 0, None, False, False, False, "", 2, 10.0)
    member.step(lambda state, now: state.ticked(now))
    member.step(lambda state, now: state.notified(update, now))
    member.sure(0.0)
    before = clock.now
    monkeypatch.setattr(clock, "now", lambda: before() + 3600)
    with pytest.raises(TimeoutError, match="neither the lobby nor enough members are reached"):
        member.sure(0.0)
