"""Memberships as threads, the lobby as a process that is killed: on a real clock and real connections."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import count

import pytest

from lightning_decentral.elastic.plan.messages import Heartbeat, LobbyUpdate, read_message
from lightning_decentral.elastic.plan.view import Bounds, Times, View
from lightning_decentral.elastic.wire.joining import Endpoint
from lightning_decentral.elastic.wire.lobby_client import LobbyClient
from lightning_decentral.elastic.wire.sockets.frames import Refused, connected, frame, receive
from lightning_decentral.elastic.wire.sockets.keys import Key
from lightning_decentral.elastic.wire.starter import own_lobby
from lightning_decentral.shared.wire.meeting.rendezvous import TOKEN
from tests.elastic.wire import keyed
from tests.elastic.wire.lobbies import DEAD, LobbyProcess

pytestmark = pytest.mark.threads
SECONDS = 30.0


class Crew:
    """Members that heal at once and ask each other by a call."""

    def __init__(self, lobby: LobbyProcess) -> None:
        self.lobby, self.all = lobby, dict[str, LobbyClient]()

    def start(self, name: str) -> LobbyClient:
        def fetch(donor: str, place: str) -> None:
            giver = self.all[donor].state
            assert giver.serves
            member.step(lambda state, now: state.fetched(donor, giver.mine.origin, giver.mine.round, now))

        def ask(to: str, beat: Heartbeat) -> None:
            self.all[to].step(lambda state, now: state.met(beat, now))

        member = self.all[name] = LobbyClient(
            name, f"{name}:1", self.lobby.place, fetch, ask, Times(DEAD), key=self.lobby.key
        )
        member.start()
        return member


@pytest.fixture(params=["plain", "secret"])
def lobby(request: pytest.FixtureRequest) -> Iterator[LobbyProcess]:
    """All of it holds under a key, too."""
    with LobbyProcess(2, 4, keyed.key() if request.param == "secret" else None) as found:
        yield found


def until(holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def together(members: list[LobbyClient]) -> Callable[[], bool]:
    names = {member.state.mine.sender for member in members}
    return lambda: all(m.state.mine.view is not None and set(m.state.mine.view.members) == names for m in members)


def test_members_come_and_go_while_the_lobby_dies(lobby: LobbyProcess) -> None:
    crew = Crew(lobby)
    a, b, c = map(crew.start, "abc")
    until(together([a, b, c]))
    first = a.state.mine.view
    assert first
    for member in (a, b, c):
        while (begun := member.begin(0.1, SECONDS))[1] < first.first_round:
            assert begun[0].number < first.number
        assert begun == (first, first.first_round)

    lobby.kill()
    end = time.monotonic() + 1.5 * DEAD
    while time.monotonic() < end:  # longer than a lease
        assert a.begin(0.1, SECONDS)[0] == first
        time.sleep(0.1)
    lobby.start()
    newcomer = crew.start("d")
    until(together([a, b, c, newcomer]))
    assert a.state.mine.view
    assert a.state.mine.view.number > first.number

    c.leave()
    until(together([a, b, newcomer]))
    for member in (a, b, newcomer):
        member.close()


def test_who_slept_is_sure_of_nothing_until_the_lobby_has_answered() -> None:
    """Its last update is older than a death: what it computed meanwhile, the others may have computed without it."""
    member = LobbyClient("a", "a:1", "127.0.0.1:1", lambda donor, place: None, lambda to, beat: None, Times(60.0))
    view = View(1, ("a", "b"), 0, ("a", "b"), "a", 2)
    update = LobbyUpdate(0, view, 1, (), {}, 0, None, False, False, False, "", 2, 60.0)
    member.step(
        lambda state, now: replace(state, mine=replace(state.mine, origin="a"), asked={0: now}).notified(update, now)
    )
    member.sure(0.0)
    member.step(lambda state, now: (replace(state, acknowledged_at=now - 61), []))
    with pytest.raises(TimeoutError, match="neither the lobby nor enough members are reached: 1 of 2"):
        member.sure(0.0)
    member.step(lambda state, now: state.notified(replace(update, out=True), now))
    with pytest.raises(TimeoutError, match="continued without this worker"):
        member.sure(SECONDS)


def test_garbage_and_silence_at_its_port_do_not_disturb_the_lobby(lobby: LobbyProcess) -> None:
    with (
        socket.create_connection(("127.0.0.1", lobby.port)) as garbage,
        socket.create_connection(("127.0.0.1", lobby.port)),
    ):
        garbage.sendall(b"GET / HTTP/1.1\r\n\r\n")
        garbage.settimeout(SECONDS)
        assert b"refused" in garbage.recv(1000)
        assert garbage.recv(1) == b""
        crew = Crew(lobby)
        members = [crew.start("a"), crew.start("b")]
        until(together(members))
        for member in members:
            member.close()


def test_without_a_lobby_a_round_says_why_it_does_not_begin() -> None:
    member = LobbyClient("a", "a:1", "127.0.0.1:1", lambda donor, place: None, lambda to, beat: None, Times(0.2))
    member.start()
    with pytest.raises(TimeoutError, match="waiting for the next view"):
        member.begin(0.0, 0.3)
    member.close()


def test_the_lobby_sees_a_connection_end_long_before_its_worker_counts_as_dead() -> None:
    lobby, _ = own_lobby(Bounds(1, 2), Times(600.0), lambda line: None)
    view = View(1, ("a", "b"), 0, ("a", "b"), "a", 2)

    def hears(connection: socket.socket, name: str, count: int, known: View | None) -> LobbyUpdate:
        connection.sendall(frame(asdict(Heartbeat(name, count, f"{name}:1", known, origin="a" if known else ""))))
        return read_message(LobbyUpdate, receive(connection))

    with connected(lobby, "lobby", SECONDS) as a, connected(lobby, "lobby", SECONDS) as x:
        with connected(lobby, "lobby", SECONDS) as b:
            hears(a, "a", 1, view)
            hears(b, "b", 1, view)
            assert hears(x, "x", 1, None).donor is None  # there is no room
        counts = count(2)
        until(lambda: hears(x, "x", next(counts), None).donor == ("a", "a:1"))


def test_who_is_refused_is_told_at_once(lobby: LobbyProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "another")
    worker = Endpoint(lobby.place, "127.0.0.1", Times(DEAD), key=lobby.key)
    with pytest.raises(ValueError, match=f"the lobby at {lobby.place} refuses this worker: a guest of another job"):
        worker.healed(SECONDS)
    worker.leave()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", frame({"refused": "nobody here wants that"})])
def test_what_is_no_lobby_is_said_at_once(answer: bytes) -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        member = LobbyClient(
            "a", "a:1", place, lambda donor, at: None, lambda to, beat: None, Times(DEAD), say=said.append
        )
        member.start()
        connection, _ = other.accept()
        with connection:
            connection.recv(1)
            connection.sendall(answer)
            until(lambda: bool(member.refused))
        member.close()
    assert place in member.refused
    assert len(said) == 1


def test_a_lobby_that_is_not_there_is_said_once() -> None:
    said: list[str] = []
    member = LobbyClient(
        "a", "a:1", "127.0.0.1:1", lambda donor, at: None, lambda to, beat: None, Times(0.2), say=said.append
    )
    member.start()
    until(lambda: member.state.mine.count > 3)
    member.close()
    assert said == [f"{member.trouble}; trying again"]
    assert "127.0.0.1:1 isn't reached: " in member.trouble


def test_what_the_first_decided_in_set_up_is_given_to_all(lobby: LobbyProcess) -> None:
    workers = [Endpoint(lobby.place, "127.0.0.1", Times(DEAD), key=lobby.key) for _ in range(2)]
    founds = [worker.founds(SECONDS) for worker in workers]
    assert sorted(founds) == [False, True]
    first, second = (workers[founds.index(of)] for of in (True, False))
    with ThreadPoolExecutor(1) as waiting:
        asked = waiting.submit(second.as_founded, "mine", SECONDS)
        time.sleep(0.2)
        assert not asked.done()
        assert first.as_founded("the run's", SECONDS) == "the run's"
        assert asked.result(SECONDS) == "the run's"
    unsent = object()  # every worker has its own
    assert first.as_founded(unsent, SECONDS) is unsent
    assert second.as_founded("mine", SECONDS) == "mine"
    assert first.healed(SECONDS) is None
    assert second.as_founded("more", SECONDS) == "more"  # the first one was set up without
    for worker in workers:
        worker.leave()


def test_a_refused_guest_is_said_once_by_the_lobby(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    lobby, _ = own_lobby(Bounds(1, 2), Times(600.0), lines.append)
    for _ in range(5):
        with connected(lobby, "tea", SECONDS) as guest, pytest.raises(Refused):
            receive(guest)
    assert [line for line in lines if line.startswith("refused")] == lines
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("theirs", "own", "told"),
    [
        (
            "run",
            None,
            r"refuses this worker: a guest without a key: this run has a key: give each worker the file, Elas",
        ),
        (
            "run",
            "stranger",
            r"the lobby refuses this worker: .* has another key than .*stranger.key: give all machines",
        ),
        (
            None,
            "run",
            r"the lobby refuses this worker: .* answers without a key .*: start the lobby with --key FILE, or",
        ),
    ],
)
def test_keys_that_differ_are_told_at_once_with_the_remedy(theirs: str | None, own: str | None, told: str) -> None:
    def named(name: str | None) -> Key | None:
        return name and keyed.key(name)  # type: ignore[return-value]

    with LobbyProcess(1, 2, named(theirs)) as lobby:
        worker = Endpoint(lobby.place, "127.0.0.1", Times(DEAD), key=named(own))
        with pytest.raises(ValueError, match=told):
            worker.healed(SECONDS)
        worker.leave()
