"""Who greets in time is served; who doesn't costs nothing, whatever it sends, and whatever runs out."""

import errno
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from lightning_decentral.elastic.wire.sockets import door as module
from lightning_decentral.elastic.wire.sockets.door import MOST_WAITING, Door, Once
from lightning_decentral.elastic.wire.sockets.frames import (
    Refused,
    address,
    connected,
    frame,
    message,
    receive,
    receive_bytes,
)
from lightning_decentral.shared.wire.meeting.rendezvous import TOKEN

pytestmark = pytest.mark.threads
SECONDS = 20.0


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def echo(connection: socket.socket) -> None:
    connection.sendall(frame(receive(connection)))


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def door(lines: list[str]) -> Iterator[Door]:
    made = Door("127.0.0.1", {"echo": echo}, lines.append)
    yield made
    made.close()


def answers(door: Door) -> bool:
    with connected(door.place, "echo", SECONDS) as connection:
        connection.sendall(frame([1, "a"]))
        return bool(receive(connection) == [1, "a"])


def guest(door: Door) -> socket.socket:
    return socket.create_connection(address(door.place), SECONDS)


def test_silent_guests_have_no_threads_and_are_shut_out(
    door: Door, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GREETING_SECONDS", 0.2)
    before = threading.active_count()
    silent = [guest(door) for _ in range(20)]
    assert answers(door)
    assert threading.active_count() <= before + 1  # of the one that was answered, perhaps
    for connection in silent:
        with pytest.raises(Refused, match="doesn't greet"):
            receive(connection)
        connection.close()
    assert lines == ["refused 127.0.0.1: a guest that doesn't greet"]  # once


def test_too_many_silent_guests_make_room_for_others(door: Door) -> None:
    silent = [guest(door) for _ in range(MOST_WAITING + 10)]
    assert answers(door)
    for connection in silent:
        connection.close()


def test_it_goes_on_when_descriptors_have_run_out(
    door: Door, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, left = socket.socket.accept, [3]

    def accepts(self: socket.socket) -> tuple[socket.socket, object]:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", accepts)
    assert answers(door)
    assert [line for line in lines if "Too many open files" in line] == lines
    assert len(lines) == 1


def greeting_of(size: int) -> bytes:
    return size.to_bytes(4, "big") + b"[" * size


@pytest.mark.parametrize("sent", [greeting_of(500_000), greeting_of(1000), b"GET / HTTP/1.1\r\n", frame({"job": 3})])
def test_what_is_no_greeting_is_refused_in_one_line(door: Door, lines: list[str], sent: bytes) -> None:
    for _ in range(2):
        with guest(door) as connection:
            connection.sendall(sent)
            eventually(lambda: bool(lines))
    assert answers(door)
    assert len(lines) == 1
    assert lines[0].startswith("refused 127.0.0.1: ")


def test_another_token_is_told(door: Door, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(door.place, "tea", SECONDS) as connection, pytest.raises(Refused, match="lobby's address"):
        receive(connection)
    greeted = module.wanted

    def other(found: object, *known: str) -> str:
        monkeypatch.setenv(TOKEN, "another")
        return greeted(found, *known)

    monkeypatch.setattr(module, "wanted", other)
    with connected(door.place, "echo", SECONDS) as connection, pytest.raises(Refused, match="another job"):
        receive(connection)


def test_what_a_guest_says_wrongly_is_said_once_and_told(door: Door, lines: list[str]) -> None:
    for _ in range(2):
        with connected(door.place, "echo", SECONDS) as connection:
            connection.sendall((5).to_bytes(4, "big") + b"[1, 2")
            with pytest.raises(Refused, match="Expecting"):
                receive(connection)
    assert len(lines) == 1


def test_room_is_made_for_what_comes_not_for_what_is_announced() -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"x" * 100)
        far.shutdown(socket.SHUT_WR)
        tracemalloc.start()
        with pytest.raises(ConnectionResetError):
            receive_bytes(near, 3 * 10**9)
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
        tracemalloc.stop()
        for size in (-1, 2**62):
            with pytest.raises(ValueError, match=f"{size} bytes are announced"):
                receive_bytes(near, size)


def test_bytes_come_whole_beyond_what_there_was_room_for() -> None:
    near, far = socket.socketpair()
    sent = bytes(range(256)) * 50
    with near, far:
        threading.Thread(target=far.sendall, args=(sent,), daemon=True).start()
        assert receive_bytes(near, len(sent), at_once=7) == sent


def test_nested_text_is_no_message() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        message(b"[" * 500_000)
    assert message(json.dumps({"a": [[[]]]}).encode()) == {"a": [[[]]]}


def test_causes_that_are_remembered_are_few() -> None:
    said: list[str] = []
    once = Once(said.append)
    for number in [*range(1000), *range(999, 989, -1)]:
        once(str(number), str(number))
    assert len(said) == 1000
    assert len(once._said) <= module.LINES
