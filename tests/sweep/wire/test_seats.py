"""Garbage on a sweep's socket: it is ignored, counted and said once, and members are heard as before."""

import json
import logging
import random
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_decentral.sweep.plan.arbiter import TurnReport
from lightning_decentral.sweep.wire.client import LONGEST_BYTES, Lines, score_of, turn_of
from lightning_decentral.sweep.wire.seats import GUESTS, Seats


class Members:
    """Two members train; `heard` is what they said."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def expects(self, name: str) -> bool:
        return name in ("0", "1")

    def receive(self, name: str, message: dict[str, Any]) -> None:
        found = score_of(message) if message.get("say") == "score" else turn_of(message)
        self.heard.append((name, found))

    def leave_seat(self, name: str) -> None:
        self.heard.append((name, "gone"))


class Desk:
    """A listener with its seats, that works until nothing more has come."""

    def __init__(self, folder: Path) -> None:
        self.members = of = Members()
        self._selector = selectors.DefaultSelector()
        self.seats = Seats(self._selector, of.expects, of.receive, of.leave_seat)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "s"))
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ, self.seats.accept)
        self._folder, self._ends = folder, [self._listener]

    def connect(self, said: bytes = b"") -> socket.socket:
        end = socket.socket(socket.AF_UNIX)
        end.connect(str(self._folder / "s"))
        self._ends.append(end)
        self.work()
        for start in range(0, len(said), 1 << 16):
            try:
                end.sendall(said[start : start + (1 << 16)])
            except OSError:
                break  # refused in the middle
            self.work()
        return end

    def work(self) -> None:
        while events := self._selector.select(0):
            for key, _ in events:
                if self._selector.get_map().get(key.fd) is key:
                    key.data(key.fileobj)

    def close(self) -> None:
        for end in self._ends:
            end.close()
        self._selector.close()


@pytest.fixture
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    made = Desk(tmp_path_factory.mktemp("d"))
    yield made
    made.close()


def hello(name: str) -> bytes:
    return json.dumps({"say": "hello", "member": name}).encode() + b"\n"


def closed(end: socket.socket) -> bool:
    end.setblocking(False)
    try:
        return end.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


GARBAGE = {
    "random bytes": random.Random(0).randbytes(3000) + b"\n",
    "no JSON": b"GET / HTTP/1.1\r\n\r\n",
    "bytes that are no text": b"\xff\xfe\n",
    "a number": b"7\n",
    "a list": b"[]\n",
    "deep": b"[" * 50_000 + b"\n",
    "an empty line": b"\n",
    "nothing said": b"{}\n",
    "a huge line": b"x" * (3 * LONGEST_BYTES),
    "before hello": b'{"say": "request"}\n',
    "a hello of nobody": hello("coffee"),
    "a hello without a name": b'{"say": "hello"}\n',
    "a hello of a list": b'{"say": "hello", "member": ["0"]}\n',
    "a second hello": hello("0"),
    "a second seat": hello("1") + hello("0"),
    "a second hello of its own": hello("1") + hello("1"),
    "a report that is none": hello("1") + b'{"say": "release", "progress": "half"}\n',
    "a score without a name": hello("1") + b'{"say": "score", "mode": "min", "step": 1, "value": 1.0}\n',
    "a score of no direction": hello("1") + b'{"say": "score", "metric": "a", "mode": [], "step": 1, "value": 1.0}\n',
    "a score that is none": hello("1") + b'{"say": "score", "metric": "a", "mode": "min", "step": 1, "value": "1"}\n',
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused_and_the_others_are_heard(name: str, desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    member = desk.connect(hello("0"))
    stranger = desk.connect(GARBAGE[name])
    again = desk.connect(GARBAGE[name])
    assert closed(stranger)
    assert closed(again)
    assert desk.seats.refused == 2
    assert len([record for record in caplog.records if "no member sends" in record.message]) == 1
    member.sendall(b'{"say": "release", "progress": 0.5}\n')
    desk.work()
    assert desk.members.heard[-1] == ("0", TurnReport(progress=0.5))
    desk.seats.write("0", {"order": "run"})
    assert list(Lines(member).arrived()) == [{"order": "run"}]


def test_half_a_line_waits_and_too_many_who_say_nothing_are_sent_away(desk: Desk) -> None:
    half = desk.connect(hello("1")[:9])
    silent = [desk.connect() for _ in range(GUESTS)]
    assert closed(half)
    assert not any(map(closed, silent))
    assert desk.seats.refused == 1


def test_a_message_in_pieces_is_one(desk: Desk) -> None:
    member = desk.connect(hello("1")[:9])
    for piece in (hello("1")[9:], b'{"say":', b' "left"}\n'):
        member.sendall(piece)
        desk.work()
    assert desk.members.heard == [("1", TurnReport())]


def test_the_seat_of_a_process_that_is_gone_is_taken_by_the_next(desk: Desk) -> None:
    """Even where its last word and its end are read after the newcomer's hello."""
    former, newcomer = desk.connect(hello("0")), desk.connect()
    former.sendall(b'{"say": "release"}\n')
    former.close()
    newcomer.sendall(hello("0"))
    desk.work()
    assert desk.members.heard == [("0", TurnReport()), ("0", "gone")]
    assert not closed(newcomer)
    assert desk.seats.refused == 0
