"""Who connects to whom is found out: directly, by a call, or through the lobby; under a key, and without one."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations

import pytest

from lightning_decentral.elastic.plan.view import Times, place_of
from lightning_decentral.elastic.wire.joining import Endpoint
from lightning_decentral.elastic.wire.sockets import clock, dialing
from lightning_decentral.elastic.wire.sockets.frames import connected, frame, receive
from lightning_decentral.elastic.wire.sockets.keys import Key
from lightning_decentral.elastic.wire.sockets.mesh import Slot
from tests.elastic.wire import keyed
from tests.elastic.wire.hidden import REFUSES, behind, silent
from tests.elastic.wire.lobbies import DEAD, LobbyProcess

pytestmark = pytest.mark.threads
SECONDS = 20.0


@pytest.fixture(params=["plain", "secret"])
def key(request: pytest.FixtureRequest) -> Key | None:
    return keyed.key() if request.param == "secret" else None


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialing, "DIRECT_SECONDS", 0.3)


@pytest.fixture
def lobby(key: Key | None) -> Iterator[LobbyProcess]:
    with LobbyProcess(3, 3, key) as found:
        yield found


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def members(lobby: LobbyProcess, hidden: str, count: int) -> list[Endpoint]:
    """Three at the lobby, of which so many, the last ones, aren't reached."""
    found = []
    for nth in range(3):
        if nth < 3 - count:
            found.append(Endpoint(lobby.place, "127.0.0.1", Times(DEAD), key=lobby.key))
            continue
        with behind(hidden):
            found.append(Endpoint(lobby.place, "127.0.0.1", Times(DEAD), key=lobby.key))
    for member in found:
        eventually(lambda member=member: member.lobby_client.state.acknowledged_at > 0)  # type: ignore[misc]
    return found


def sent(source: Endpoint, target: Endpoint, round: int, text: bytes) -> bytes | None:
    source.mesh.send(target.name, place_of(target.name), 1, round, 0, memoryview(text)).wait()
    end = time.monotonic() + SECONDS
    return target.mesh.take(Slot(source.name, 1, round, 0), lambda: time.monotonic() < end)


@pytest.mark.parametrize("hidden", ["refuses", "silent"])
@pytest.mark.parametrize("count", [1, 2])
def test_all_reach_all_where_some_are_not_reached(lobby: LobbyProcess, hidden: str, count: int) -> None:
    with silent() as place:
        all = members(lobby, place if hidden == "silent" else REFUSES, count)
        for round in (1, 2):
            for source, target in permutations(all, 2):
                text = os.urandom(300_000)
                assert sent(source, target, round, text) == text
        assert not any(member.mesh.lost for member in all)
        for member in all:
            member.leave()


def test_only_two_who_are_both_hidden_need_the_lobby_afterwards(lobby: LobbyProcess) -> None:
    a, b, c = members(lobby, REFUSES, 2)
    for source, target in permutations((a, b, c), 2):
        assert sent(source, target, 1, b"text")
    lobby.kill()
    for source, target in ((a, b), (b, a), (a, c), (c, a)):
        assert sent(source, target, 2, b"more")
    b.mesh.send(c.name, place_of(c.name), 1, 2, 0, memoryview(b"lost")).wait()
    assert c.mesh.take(Slot(b.name, 1, 2, 0), lambda: True) is None  # and nobody waits for ever
    lobby.start()
    eventually(lambda: all(not member.lobby_client.trouble for member in (b, c)))
    eventually(lambda: sent(b, c, 3, b"again") == b"again" and sent(c, b, 3, b"again") == b"again")
    for member in (a, b, c):
        member.leave()


def test_a_hidden_member_that_ends_is_lost_at_once(lobby: LobbyProcess) -> None:
    a, b, c = members(lobby, REFUSES, 2)
    for source, target in permutations((a, b, c), 2):
        assert sent(source, target, 1, b"text")
    began = time.monotonic()
    c.lobby_client.close()
    c.mesh.close()
    for other in (a, b):
        assert other.mesh.take(Slot(c.name, 1, 2, 0), lambda: True) is None
    assert time.monotonic() - began < 5
    before = threading.active_count()
    for other in (a, b):
        for round in range(3):
            other.mesh.send(c.name, place_of(c.name), 1, 2 + round, 0, memoryview(b"text"))
        other.mesh.forget([c.name])
    eventually(lambda: threading.active_count() <= before)
    for member in (a, b):
        member.leave()


def test_a_hidden_member_asks_the_others_without_a_lobby(lobby: LobbyProcess) -> None:
    """Its beat is answered on its own connection, even by one that doesn't reach the lobby either."""
    a, *others, hidden = members(lobby, REFUSES, 1)
    lobby.kill()
    beat = replace(hidden.lobby_client.state.mine, asks=True)
    eventually(lambda: a.lobby_client.state.lonely(clock.now()))
    hidden._ask(a.name, beat)
    eventually(lambda: a.name in hidden.lobby_client.state.met_at and hidden.name in a.lobby_client.state.met_at)
    for member in (a, *others, hidden):
        member.lobby_client.close()
        member.mesh.close()


def test_a_hidden_member_gives_its_state_to_another_one(lobby: LobbyProcess) -> None:
    a, b, c = members(lobby, REFUSES, 2)
    value = {"some": 3}
    stop = threading.Event()

    def trains() -> None:
        while not stop.is_set():
            b._donor.between_steps(lambda: value)
            time.sleep(0.01)

    b._donor._serves = lambda: ("origin", 5)
    training = threading.Thread(target=trains)
    training.start()
    with c._dial(b.name, place_of(b.name), "heal", 5.0) as connection:
        while (found := receive(connection)) == {"prepares": True}:
            pass
        assert (found["origin"], found["round"]) == ("origin", 5)
    stop.set()
    training.join()
    for member in (a, b, c):
        member.leave()


def test_an_answer_without_a_call_is_refused(lobby: LobbyProcess) -> None:
    a, *others = members(lobby, REFUSES, 0)
    for place in (lobby.place, a.mesh.place):
        with connected(place, "called", SECONDS, lobby.key) as connection:
            connection.sendall(frame("a ticket"))
            with pytest.raises((ValueError, OSError)):
                receive(connection)
    with connected(lobby.place, "call", SECONDS, lobby.key) as connection:
        connection.sendall(frame({"to": "nobody", "place": "", "ticket": ""}))
        with pytest.raises(OSError, match="ended"):
            receive(connection)
    for member in (a, *others):
        member.leave()
