"""Connections among members: each sends on those it makes and receives on those it accepts.

    rounds   frames {view's key, round, slot} with a tensor's bytes, in order; the greeting has the first (round, slot)
    beats    of members that don't reach the lobby
    heal     a newcomer fetches everything (`state_transfer`)

A member whose connection has ended is lost until it connects again; what it sent before that isn't awaited. Who
couldn't send a message connects again at once, so that nobody waits for it. Of a member whose process has ended no
thread and no connection stays; of one that isn't in the view any more nothing at all (`forget`).
"""

import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from lightning_decentral.elastic.wire.sockets.door import Door, Serve, shut
from lightning_decentral.elastic.wire.sockets.frames import GROWTH_BYTES, connected, frame, receive, receive_bytes

KEPT_ROUNDS = 8  # behind the present one, whose frames are still awaited by somebody
AGAIN_SECONDS = 0.5  # seconds between two tries to connect to a member that waits for what was lost
ENDED_SECONDS = 1.0  # seconds in which all connections of a process that has ended are seen to end


class Slot(NamedTuple):
    """Identity of a message: of this sender, in this view and round, the `slot`-th. On a line (round, slot) rises."""

    sender: str
    key: int
    round: int
    slot: int


class Sent:
    """A message on its way out."""

    def __init__(self, slot: Slot, payload: memoryview) -> None:
        self.slot, self.payload = slot, payload
        self.over = threading.Event()

    def wait(self) -> None:
        """Wait until it has left, or is lost."""
        self.over.wait()

    def done(self) -> bool:
        return self.over.is_set()


class Mesh:
    """One member's connections at the address at which others reach this machine. Those that want something else than
    rounds are served by what they want; `changed` is notified when something has come."""

    def __init__(self, host: str, name: str, serve: Mapping[str, Serve], changed: threading.Condition) -> None:
        self.name, self.changed = name, changed
        self.lost: set[str] = set()
        self.round = 0
        self.awaited = True  # messages wait until they are taken; otherwise the two newest of each sender are kept
        self.begun: dict[str, int] = {}  # {sender: the newest round that was received from it}
        self._inbox: dict[Slot, bytearray] = {}  # what has come, until it is taken
        self._floor: dict[str, tuple[int, int]] = {}  # {sender: (round, slot) before which nothing comes}
        self._newest: dict[str, socket.socket] = {}  # {sender: its newest connection}; older ones end unseen
        self._lines: dict[str, Line] = {}  # {receiver: the thread that sends to it}
        self._largest = GROWTH_BYTES
        self._door = Door(host, {**serve, "rounds": self._receive})
        self.place = self._door.place

    def send(self, to: str, place: str, key: int, round: int, slot: int, payload: memoryview) -> Sent:
        """Queue it; `place` is where that member listens."""
        sent = Sent(Slot(self.name, key, round, slot), payload)
        with self.changed:
            line = self._lines.get(to)
            if line is None or line.place != place or line.over:
                if line is not None:
                    line.put(None)
                line = self._lines[to] = Line(self, to, place)
            line.put(sent)
        return sent

    def take(self, slot: Slot, expected: Callable[[], bool]) -> bytearray | None:
        """Wait for what was sent, and return it; None: it doesn't come any more, or isn't `expected` to, as far as the
        views are known."""
        with self.changed:
            while slot not in self._inbox:
                gone = slot.sender in self.lost or (slot.round, slot.slot) < self._floor.get(slot.sender, (0, 0))
                if gone or not expected():
                    return None
                self.changed.wait(0.5)  # `expected` also depends on time
            return self._inbox.pop(slot)

    def newest(self, sender: str, key: int, slots: int) -> tuple[int, list[bytearray]] | None:
        """(round, its messages) of the newest round in that view of which all `slots` have come. Once: it is taken, and
        what is older is dropped. None: nothing has come."""
        with self.changed:
            rounds = sorted({s.round for s in self._inbox if (s.sender, s.key) == (sender, key)}, reverse=True)
            for round in rounds:
                whole = [Slot(sender, key, round, slot) for slot in range(slots)]
                if all(slot in self._inbox for slot in whole):
                    taken = [self._inbox[slot] for slot in whole]
                    self._drop(sender, (key, round + 1))
                    return round, taken
        return None

    def idle(self, to: str) -> bool:
        """Return whether all that was queued for that member has left."""
        return (line := self._lines.get(to)) is None or line.idle

    def begins(self, round: int) -> None:
        """Begin a round: messages are of it from now on; what nobody took long ago is dropped."""
        with self.changed:
            self.round = round
            if self.awaited:
                self._inbox = {s: found for s, found in self._inbox.items() if s.round >= round - KEPT_ROUNDS}

    def _drop(self, sender: str, before: tuple[int, int]) -> None:
        """Drop what came from it before this (key, round)."""
        for slot in [s for s in self._inbox if s.sender == sender and (s.key, s.round) < before]:
            del self._inbox[slot]

    def lose(self, name: str) -> None:
        """Count a member as lost: nothing more comes from it until it connects."""
        with self.changed:
            self.lost.add(name)
            self.begun.pop(name, None)
            if not self.awaited:
                self._drop(name, (sys.maxsize, 0))
            self.changed.notify_all()

    def forget(self, names: Collection[str]) -> None:
        """Forget these, which are no members any more: nothing is kept of them."""
        with self.changed:
            for name in names:
                self.lost.discard(name)
                self.begun.pop(name, None)
                self._floor.pop(name, None)
                self._drop(name, (sys.maxsize, 0))
            lines = [line for name in names if (line := self._lines.pop(name, None))]
            connections = [accepted for name in names if (accepted := self._newest.pop(name, None))]
            for line in lines:
                line.put(None)
            self.changed.notify_all()
        for connection in [*connections, *(line.connection for line in lines)]:
            shut(connection)  # who waits there ends

    def close(self) -> None:
        """Close every connection: the others see it at once."""
        self._door.close()
        with self.changed:
            for line in self._lines.values():
                line.put(None)

    def _receive(self, connection: socket.socket) -> None:
        hello = receive(connection)
        sender, first = str(hello["from"]), (int(hello["round"]), int(hello["slot"]))
        connection.settimeout(None)
        with self.changed:
            self._newest[sender] = connection
            self._floor[sender] = first
            self.lost.discard(sender)  # it lives: it has connected
            self.changed.notify_all()
        try:
            while True:
                found = receive(connection)
                slot = Slot(sender, *(int(found[name]) for name in ("key", "round", "slot")))
                payload = receive_bytes(connection, int(found["bytes"]), self._largest)  # outside of the lock
                with self.changed:
                    self._inbox[slot] = payload
                    self.begun[sender] = max(slot.round, self.begun.get(sender, 0))
                    if not self.awaited:
                        # The newest may be coming in, and the one before is the newest that is whole.
                        rounds = sorted({(s.key, s.round) for s in self._inbox if s.sender == sender})
                        self._drop(sender, rounds[-2:][0])
                    self._largest = max(self._largest, len(payload))  # room for the next one at once
                    self.changed.notify_all()
        finally:
            self._received_last(sender, connection)

    def _received_last(self, sender: str, connection: socket.socket) -> None:
        with self.changed:
            if self._newest.get(sender) is not connection:
                return
            del self._newest[sender]
            self.lose(sender)
            line = self._lines.get(sender)
        if line is not None and line.cut():  # both ways: its process has ended
            with self.changed:
                line.put(None)


class Line(threading.Thread):
    """Sends to one member what is queued, in order; what can't be sent is lost, and that member learns of it. It ends
    with None, or where that member's process has ended."""

    def __init__(self, mesh: Mesh, to: str, place: str) -> None:
        super().__init__(name=f"lightning_decentral-to-{to}", daemon=True)
        self.place, self._mesh, self._to, self.over = place, mesh, to, False
        self._queue: queue.SimpleQueue[Sent | None] = queue.SimpleQueue()
        self._last: Sent | None = None  # idle once it has left
        self.connection: socket.socket | None = None
        self.start()

    @property
    def idle(self) -> bool:
        return self._last is None or self._last.done()

    def put(self, sent: Sent | None) -> None:
        self.over |= sent is None
        self._last = sent or self._last
        self._queue.put(sent)

    def cut(self) -> bool:
        """Return whether the other end has closed this connection, too, or does within `ENDED_SECONDS`."""
        if (connection := self.connection) is None:
            return self.idle
        try:
            readable, _, _ = select.select([connection], [], [], ENDED_SECONDS)
            return bool(readable) and not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (OSError, ValueError):
            return True

    def run(self) -> None:
        while (sent := self._queue.get()) is not None:
            try:
                self._send(sent)
            except ConnectionRefusedError:
                self._end()  # its process has ended
            except OSError:
                self._hang_up()
                sent.over.set()
                self._excuse(sent.slot)
            sent.over.set()
        self._hang_up()

    def _end(self) -> None:
        """End this line: what is sent later has another one."""
        self._mesh.lose(self._to)
        with self._mesh.changed:
            if self._queue.empty():
                self.put(None)

    def _excuse(self, lost: Slot) -> None:
        """Connect where no message follows that would: a member that waits for this one sends nothing either."""
        while self.connection is None and self._queue.empty():
            try:
                self._connect((lost.round, lost.slot + 1))
            except ConnectionRefusedError:
                self._end()
            except OSError:
                self._hang_up()
                time.sleep(AGAIN_SECONDS)

    def _connect(self, first: tuple[int, int]) -> None:
        self.connection = connected(self.place, "rounds", 5.0)
        self.connection.settimeout(None)
        self.connection.sendall(frame({"from": self._mesh.name, "round": first[0], "slot": first[1]}))

    def _send(self, sent: Sent) -> None:
        slot = sent.slot
        if self.connection is None:
            self._connect((slot.round, slot.slot))
        assert self.connection is not None
        head = {"key": slot.key, "round": slot.round, "slot": slot.slot, "bytes": len(sent.payload)}
        self.connection.sendall(frame(head))
        self.connection.sendall(sent.payload)

    def _hang_up(self) -> None:
        connection, self.connection = self.connection, None
        shut(connection)
