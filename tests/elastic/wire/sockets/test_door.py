"""Who greets in time is served; who doesn't costs nothing, whatever it sends, and whatever runs out."""

import errno
import json
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest

from lightning_decentral.elastic.wire.sockets import door as module
from lightning_decentral.elastic.wire.sockets.door import MOST_WAITING, Door, Once, hang_up
from lightning_decentral.elastic.wire.sockets.frames import (
    Refused,
    _job,
    address,
    connected,
    frame,
    message,
    receive,
    receive_bytes,
)
from lightning_decentral.elastic.wire.sockets.keys import WrongKey
from lightning_decentral.shared.wire.meeting.rendezvous import TOKEN
from tests.elastic.wire.keyed import key

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


@pytest.fixture(params=["plain", "secret"])
def door(request: pytest.FixtureRequest, lines: list[str]) -> Iterator[Door]:
    """The whole suite holds under a key, too."""
    made = Door("127.0.0.1", {"echo": echo}, lines.append, key() if request.param == "secret" else None)
    yield made
    made.close()


def answers(door: Door) -> bool:
    with connected(door.place, "echo", SECONDS, door._key) as connection:
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


@pytest.mark.parametrize(
    "sent", [greeting_of(500_000), greeting_of(1000), b"GET / HTTP/1.1\r\n", frame({"job": 3}), b"\x16" * 700]
)
def test_what_is_no_greeting_is_refused_in_one_line(door: Door, lines: list[str], sent: bytes) -> None:
    for _ in range(2):
        with guest(door) as connection:
            connection.sendall(sent)
            eventually(lambda: bool(lines))
    assert answers(door)
    assert len(lines) == 1
    assert lines[0].startswith("refused 127.0.0.1: ")


def test_another_token_is_told(door: Door, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        connected(door.place, "tea", SECONDS, door._key) as connection,
        pytest.raises(Refused, match="lobby's address"),
    ):
        receive(connection)
    greeted = module.wanted

    def other(found: object, *known: str) -> str:
        monkeypatch.setenv(TOKEN, "another")
        return greeted(found, *known)

    monkeypatch.setattr(module, "wanted", other)
    with connected(door.place, "echo", SECONDS, door._key) as connection, pytest.raises(Refused, match="another job"):
        receive(connection)


def test_what_a_guest_says_wrongly_is_said_once_and_told(door: Door, lines: list[str]) -> None:
    for _ in range(2):
        with connected(door.place, "echo", SECONDS, door._key) as connection:
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


@pytest.fixture
def secret(lines: list[str]) -> Iterator[Door]:
    made = Door("127.0.0.1", {"echo": echo}, lines.append, key())
    yield made
    made.close()


def test_without_the_key_nobody_is_served_and_is_told_the_remedy(secret: Door, lines: list[str]) -> None:
    with connected(secret.place, "echo", SECONDS) as connection, pytest.raises(Refused, match=r"Elastic\(key=FILE\)"):
        receive(connection)
    with pytest.raises(WrongKey, match=r"another key than .*stranger.key: give all machines the same file"):
        connected(secret.place, "echo", SECONDS, key("stranger"))
    assert answers(secret)
    assert [line.partition(": ")[2][:24] for line in lines] == ["a guest without a key: t", "a guest without the run'"]


def test_a_key_where_the_run_has_none_is_told_the_remedy(lines: list[str]) -> None:
    door = Door("127.0.0.1", {"echo": echo}, lines.append)
    with pytest.raises(WrongKey, match="start the lobby with --key FILE"):
        connected(door.place, "echo", SECONDS, key())
    eventually(lambda: bool(lines))
    assert "a guest with a key: this run has no key" in lines[0]
    door.close()


def test_a_stranger_that_trusts_anybody_is_not_served(secret: Door) -> None:
    """It makes the handshake with its own key, or with none."""
    for own in (key("stranger").path, ""):
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        if own:
            trusting.load_cert_chain(own)
        with guest(secret) as raw, suppress(OSError), trusting.wrap_socket(raw) as connection:
            # A client ends its handshake before its certificate is looked at.
            connection.sendall(frame({"job": _job(), "wants": "echo"}) + frame([1]))
            assert not connection.recv(1000)
    assert answers(secret)


def test_what_was_recorded_on_its_way_serves_nobody(secret: Door, lines: list[str]) -> None:
    recorded = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as tap:

        def passes() -> None:
            near, far = tap.accept()[0], guest(secret)
            back = threading.Thread(target=lambda: [near.sendall(more) for more in iter(partial(far.recv, 4096), b"")])
            back.start()
            for more in iter(partial(near.recv, 4096), b""):
                recorded.extend(more)
                far.sendall(more)
            far.shutdown(socket.SHUT_WR)
            back.join()

        on_the_way = threading.Thread(target=passes)
        on_the_way.start()
        place = f"127.0.0.1:{tap.getsockname()[1]}"
        with connected(place, "echo", SECONDS, key()) as connection:
            connection.sendall(frame("a secret of the run"))
            assert receive(connection) == "a secret of the run"
        on_the_way.join(SECONDS)
    assert recorded
    assert b"secret" not in recorded
    assert b"job" not in recorded
    with guest(secret) as connection:
        connection.sendall(recorded)
        with suppress(ConnectionResetError):
            assert sum(map(len, iter(partial(connection.recv, 4096), b""))) < 4096
    assert answers(secret)
    assert any("without the run's key" in line for line in lines)


def test_half_a_handshake_holds_no_thread_and_keeps_nobody_out(
    secret: Door, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GREETING_SECONDS", 1.0)
    before, hello = threading.active_count(), bytes.fromhex("1603010200010001fc0303")
    many = b"a guest that doesn't greet, of too many"
    slow = [guest(secret) for _ in range(MOST_WAITING + 20)]
    for connection in slow:
        connection.sendall(hello)
    assert answers(secret)
    assert threading.active_count() <= before + 1
    assert len(secret._entrance._waiting) <= MOST_WAITING
    for connection in slow:
        connection.settimeout(SECONDS)
        with connection, suppress(ConnectionResetError):  # one that came first may not have been read yet
            assert b"".join(iter(partial(connection.recv, 1000), b""))[4:] in (b"", b'{"refused": "%s"}' % many)
    eventually(lambda: not secret._entrance._waiting)


def test_many_guests_of_one_host_keep_no_other_host_out(secret: Door) -> None:
    """A guest that is slow, but of another host, isn't the one that makes room."""
    port = address(secret.place)[1]
    slow = socket.create_connection(("127.0.0.1", port), SECONDS, source_address=("127.0.0.2", 0))
    eventually(lambda: "127.0.0.2" in secret._entrance._waiting.values())
    silent = [guest(secret) for _ in range(MOST_WAITING + 10)]
    assert answers(secret)
    assert "127.0.0.2" in secret._entrance._waiting.values()
    for connection in (slow, *silent):
        connection.close()


def test_a_large_message_goes_through_the_key_whole() -> None:
    """And its sender's connection may be ended by another thread."""
    got = list[bytes]()
    door = Door("127.0.0.1", {"take": lambda found: got.append(bytes(receive_bytes(found, 3_000_000)))}, key=key())
    sent = bytes(range(250)) * 12_000
    with connected(door.place, "take", SECONDS, key()) as connection:
        connection.sendall(sent)
        eventually(lambda: bool(got))
    assert got == [sent]
    blocked = connected(door.place, "take", SECONDS, key())
    ended = threading.Thread(target=lambda: blocked.recv(1), daemon=True)
    ended.start()
    hang_up(blocked)
    ended.join(SECONDS)
    assert not ended.is_alive()
    blocked.close()
    door.close()
