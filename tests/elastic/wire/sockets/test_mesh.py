"""Messages among members: told apart by view, round and slot; what doesn't come any more is given up."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from lightning_decentral.elastic.wire.sockets import dialing
from lightning_decentral.elastic.wire.sockets import mesh as module
from lightning_decentral.elastic.wire.sockets.dialing import Dialer
from lightning_decentral.elastic.wire.sockets.mesh import KEPT_ROUNDS, Mesh, Slot
from tests.elastic.wire import keyed

pytestmark = pytest.mark.threads


@pytest.fixture(params=["plain", "secret"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Mesh, Mesh]]:
    own = keyed.key() if request.param == "secret" else None
    made = [Mesh("127.0.0.1", name, {}, threading.Condition(), Dialer(own)) for name in "ab"]
    yield made[0], made[1]
    for mesh in made:
        mesh.close()


def sent(source: Mesh, target: Mesh, round: int, slot: int = 0, key: int = 1, text: bytes = b"text") -> None:
    source.send(target.name, target.place, key, round, slot, memoryview(text)).wait()


def always() -> bool:
    return True


def test_messages_are_told_apart_whatever_their_order(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    places = [(1, 5, 0), (1, 5, 1), (1, 6, 0), (2, 6, 0)]
    for key, round, slot in places:
        sent(a, b, round, slot, key, f"{key} {round} {slot}".encode())
    for key, round, slot in reversed(places):
        assert b.take(Slot("a", key, round, slot), always) == f"{key} {round} {slot}".encode()


def test_a_member_that_ended_is_not_waited_for_but_what_it_sent_is_there(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    sent(a, b, 5)
    sent(a, b, 6)
    assert b.take(Slot("a", 1, 5, 0), always)
    a.close()
    assert b.take(Slot("a", 1, 7, 0), always) is None
    assert b.take(Slot("a", 1, 6, 0), always)


def test_a_round_before_a_new_connection_is_given_up(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    sent(a, b, 5)
    assert b.take(Slot("a", 1, 5, 0), always)
    again = Mesh("127.0.0.1", "a", {}, threading.Condition(), a.dial)
    sent(again, b, 9)
    assert b.take(Slot("a", 1, 9, 0), always)
    assert b.take(Slot("a", 1, 8, 0), always) is None
    again.close()


def cut(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """So many connections aren't made, as through a network that is cut for a while."""
    left, connected = [times], dialing.connected

    def connects(*args: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise TimeoutError("timed out")
        return connected(*args)

    monkeypatch.setattr(dialing, "connected", connects)


def for_so_long() -> Callable[[], bool]:
    """Fails where it ends a wait."""
    end = time.monotonic() + 20

    def holds() -> bool:
        assert time.monotonic() < end, "it is still waited for"
        return True

    return holds


@pytest.mark.parametrize("lost", [1, 2])
def test_the_rest_of_a_round_whose_beginning_was_lost_is_not_waited_for(
    pair: tuple[Mesh, Mesh], monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    a, b = pair
    cut(monkeypatch, lost)
    leaving = [a.send("b", b.place, 1, 5, slot, memoryview(b"text")) for slot in range(3)]
    for one in leaving:
        one.wait()
    assert b.take(Slot("a", 1, 5, 2), for_so_long())
    assert b.take(Slot("a", 1, 5, 0), for_so_long()) is None


@pytest.mark.parametrize("times", [1, 3])
def test_what_was_lost_is_not_waited_for_though_nothing_follows(
    pair: tuple[Mesh, Mesh], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The two might wait for each other for ever."""
    a, b = pair
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.01)
    cut(monkeypatch, times)
    sent(a, b, 5)
    assert b.take(Slot("a", 1, 5, 0), for_so_long()) is None
    sent(a, b, 6)
    assert b.take(Slot("a", 1, 6, 0), for_so_long())


def test_a_message_of_another_view_is_not_awaited(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    sent(a, b, 5, key=2)
    assert b.take(Slot("a", 1, 5, 0), lambda: False) is None
    assert b.take(Slot("a", 2, 5, 0), always)


def test_what_nobody_took_is_dropped(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    sent(a, b, 5)
    sent(a, b, 6, slot=1)
    assert b.take(Slot("a", 1, 6, 1), always)
    b.begins(5 + KEPT_ROUNDS)
    assert Slot("a", 1, 5, 0) in b._inbox
    b.begins(6 + KEPT_ROUNDS)
    assert not b._inbox


def test_who_has_ended_before_anything_was_sent_is_lost(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    a.close()
    sent(b, a, 5)
    assert b.take(Slot("a", 1, 5, 0), always) is None


def test_where_nobody_waits_the_newest_whole_round_counts_once(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    b.awaited = False
    for round in (3, 4, 5):
        for slot in range(2):
            sent(a, b, round, slot, text=f"{round} {slot}".encode())
    sent(a, b, 6, 0)  # the rest is on its way
    eventually(lambda: b.begun == {"a": 6})
    assert {slot.round for slot in b._inbox} == {5, 6}
    assert b.newest("a", 2, 2) is None
    assert b.newest("a", 1, 2) == (5, [b"5 0", b"5 1"])
    assert b.newest("a", 1, 2) is None
    sent(a, b, 6, 1)
    eventually(lambda: len(b._inbox) == 2)
    assert b.newest("a", 1, 2) == (6, [b"text", b"text"])
    assert not b._inbox


def test_where_nobody_waits_nothing_is_kept_of_who_is_lost(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    b.awaited = False
    sent(a, b, 5)
    eventually(lambda: bool(b._inbox))
    b.lose("a")
    assert not b._inbox
    assert not b.begun


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors as Linux shows them")
@pytest.mark.parametrize("both", [True, False])
def test_nothing_stays_of_members_that_ended(pair: tuple[Mesh, Mesh], both: bool) -> None:
    """They sent, or were only sent something."""
    a, _ = pair
    before = threading.active_count(), descriptors()
    for nth in range(8):
        other = Mesh("127.0.0.1", f"c{nth}", {}, threading.Condition(), a.dial)
        if both:
            sent(other, a, 1)
            assert a.take(Slot(other.name, 1, 1, 0), always)
        sent(a, other, 1)
        assert other.take(Slot("a", 1, 1, 0), always)
        other.close()
        if not both:  # its end is seen when something is sent
            eventually(partial(_sends, a, other.name, other.place))
    eventually(lambda: threading.active_count() <= before[0] and descriptors() <= before[1])
    a.forget([f"c{nth}" for nth in range(8)])
    kept = a.lost, a._lines, a._newest, a._floor, a.begun, a._inbox
    assert not any(kept)


def _sends(a: Mesh, name: str, place: str) -> bool:
    a.send(name, place, 1, 2, 0, memoryview(b"x")).wait()
    return name in a.lost


def test_who_is_forgotten_is_heard_again_when_it_connects(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    sent(a, b, 5)
    assert b.take(Slot("a", 1, 5, 0), always)
    b.forget(["a"])
    eventually(lambda: _sent_and_taken(a, b))


def _sent_and_taken(a: Mesh, b: Mesh) -> bool:
    sent(a, b, 6)
    return b.take(Slot("a", 1, 6, 0), lambda: False) is not None


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)
