"""Connections among members: each member sends on connections that it makes and receives on those that it accepts.

    rounds   frames {view's key, round, slot} with a tensor's bytes, in order; the greeting has the first (round, slot);
             among them votes, of frames alone (`plan.commit`)
    beats    heartbeats of members that don't reach the lobby
    heal     a newcomer fetches the training state (`state_transfer`)

A member whose connection has ended is lost until it connects again; its earlier messages aren't awaited. A member that
couldn't send a message connects again at once, so that no other waits for the message. When a member's process ends,
its thread and connections are closed; when it leaves the view, all its entries are dropped (`forget`)."""

import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from lightning_decentral.elastic.wire.sockets.dialing import Dialer
from lightning_decentral.elastic.wire.sockets.door import Door, Serve, hang_up
from lightning_decentral.elastic.wire.sockets.frames import GROWTH_BYTES, ended, frame, receive, receive_bytes

KEPT_ROUNDS = 8  # past rounds whose frames may still be awaited
AGAIN_SECONDS = 0.5  # seconds between two tries to connect to a member that waits for a lost message
ENDED_SECONDS = 1.0  # seconds within which all connections of an ended process are seen to end


class Slot(NamedTuple):
    """Identity of a message: its sender, view, round, and number in the round; (round, slot) rises on a connection."""

    sender: str
    key: int
    round: int
    slot: int


class Sent:
    """A message queued to be sent: the fields of its frame, and a tensor's bytes; a vote has none."""

    def __init__(self, fields: Mapping[str, Any], payload: memoryview) -> None:
        self.fields, self.payload = fields, payload
        self.over = threading.Event()

    def wait(self) -> None:
        """Wait until the message has left, or is lost."""
        self.over.wait()

    def done(self) -> bool:
        return self.over.is_set()


class Mesh:
    """Keeps one member's connections, at the address at which others reach this machine. `serve` maps services other
    than rounds to their functions; `changed` is notified when a message arrives."""

    def __init__(
        self, host: str, name: str, serve: Mapping[str, Serve], changed: threading.Condition, dial: Dialer | None = None
    ) -> None:
        self.name, self.changed, self.dial = name, changed, dial or Dialer()
        self.lost: set[str] = set()
        self.round = 0
        self.awaited = True  # keep all messages until taken; False: keep the two newest rounds of each sender
        self.begun: dict[str, int] = {}  # {sender: its newest round received}
        self.on_vote: Callable[[Any], None] = lambda vote: None  # called with `changed` held, for each vote received
        self.coming: dict[str, tuple[int, int]] = {}  # {receiver: (round, slot) before which nothing is sent to it now}
        self._inbox: dict[Slot, bytearray] = {}  # received messages, until taken
        self._floor: dict[str, tuple[int, int]] = {}  # {sender: (round, slot) before which no message comes}
        self._newest: dict[str, socket.socket] = {}  # {sender: its newest connection}; the end of older ones is ignored
        self._lines: dict[str, Line] = {}  # {receiver: the thread that sends to it}
        self._largest = GROWTH_BYTES
        own = {"rounds": self._receive, "called": self.dial.arrives}
        self._door = self.dial.door = Door(host, {**serve, **own}, key=self.dial.key)
        self.place = self._door.place

    def send(self, to: str, place: str, key: int, round: int, slot: int, payload: memoryview) -> Sent:
        """Queue a message to a member, which listens at the address `place`."""
        fields = {"key": key, "round": round, "slot": slot, "bytes": len(payload)}
        return self._queued(to, place, Sent(fields, payload))

    def vote(self, to: str, place: str, vote: Mapping[str, Any]) -> Sent:
        """Queue a vote to a member, which may be lost."""
        return self._queued(to, place, Sent({"vote": vote}, memoryview(b"")))

    def _queued(self, to: str, place: str, sent: Sent) -> Sent:
        with self.changed:
            line = self._lines.get(to)
            if line is None or line.place != place or line.over:
                if line is not None:
                    line.put(None)
                line = self._lines[to] = Line(self, to, place)
            line.put(sent)
        return sent

    def take(self, slot: Slot, expected: Callable[[], bool]) -> bytearray | None:
        """Wait for a message and return its bytes; None if it can't come any more, or isn't `expected` any more by the
        known views."""
        with self.changed:
            while slot not in self._inbox:
                gone = slot.sender in self.lost or (slot.round, slot.slot) < self._floor.get(slot.sender, (0, 0))
                if gone or not expected():
                    return None
                self.changed.wait(0.5)  # `expected` also depends on time
            return self._inbox.pop(slot)

    def newest(self, sender: str, key: int, slots: int) -> tuple[int, list[bytearray]] | None:
        """Take (round, its messages) of a sender's newest round in a view of which all `slots` have arrived, and
        drop older ones. None if there is no such round."""
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
        """Return whether all messages queued for that member have left."""
        return (line := self._lines.get(to)) is None or line.idle

    def begins(self, round: int) -> None:
        """Begin a round, and drop messages of rounds long past."""
        with self.changed:
            self.round = round
            if self.awaited:
                self._inbox = {s: found for s, found in self._inbox.items() if s.round >= round - KEPT_ROUNDS}

    def _drop(self, sender: str, before: tuple[int, int]) -> None:
        """Drop a sender's messages before this (key, round)."""
        for slot in [s for s in self._inbox if s.sender == sender and (s.key, s.round) < before]:
            del self._inbox[slot]

    def lose(self, name: str) -> None:
        """Count a member as lost: no message comes from it until it connects again."""
        with self.changed:
            self.lost.add(name)
            self.begun.pop(name, None)
            if not self.awaited:
                self._drop(name, (sys.maxsize, 0))
            self.changed.notify_all()

    def forget(self, names: Collection[str]) -> None:
        """Drop all entries and connections of these former members."""
        with self.changed:
            for name in names:
                self.lost.discard(name)
                self.begun.pop(name, None)
                self._floor.pop(name, None)
                self.coming.pop(name, None)
                self._drop(name, (sys.maxsize, 0))
            lines = [line for name in names if (line := self._lines.pop(name, None))]
            connections = [self._newest.pop(name, None) for name in names] + [line.connection for line in lines]
            for line in lines:
                self.dial.direct.pop(line.place, None)
                line.put(None)
            self.changed.notify_all()
        for connection in filter(None, connections):
            hang_up(connection)  # ends threads that wait there

    def close(self) -> None:
        """Close every connection; the other members see that at once."""
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
            self.lost.discard(sender)  # it has connected, so it lives
            self.changed.notify_all()
        try:
            while True:
                found = receive(connection)
                if "vote" in found:
                    with self.changed:
                        self.on_vote(found["vote"])
                        self.changed.notify_all()
                    continue
                slot = Slot(sender, *(int(found[name]) for name in ("key", "round", "slot")))
                payload = receive_bytes(connection, int(found["bytes"]), self._largest)  # outside of the lock
                with self.changed:
                    self._inbox[slot] = payload
                    self.begun[sender] = max(slot.round, self.begun.get(sender, 0))
                    if not self.awaited:
                        # The newest round may be incomplete; the round before it is complete.
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
        if line is not None and line.cut():  # cut both ways: its process has ended
            with self.changed:
                line.put(None)


class Line(threading.Thread):
    """Thread that sends queued messages to one member, in order; a message that can't be sent is lost, and the member
    learns of that. The thread ends at None, or when the member's process has ended."""

    def __init__(self, mesh: Mesh, to: str, place: str) -> None:
        super().__init__(name=f"lightning_decentral-to-{to}", daemon=True)
        self.place, self._mesh, self._to, self.over = place, mesh, to, False
        self._queue: queue.SimpleQueue[Sent | None] = queue.SimpleQueue()
        self._last: Sent | None = None  # the line is idle once this message has left
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
        """Return whether the other end closes this connection, too, within `ENDED_SECONDS`."""
        return self.idle if (connection := self.connection) is None else ended(connection, ENDED_SECONDS)

    def run(self) -> None:
        while (sent := self._queue.get()) is not None:
            try:
                self._send(sent)
            except ConnectionRefusedError:
                self._end()  # its process has ended
            except OSError:
                self._hang_up()
                sent.over.set()
                self._excuse()
            sent.over.set()
        self._hang_up()

    def _end(self) -> None:
        """End this thread's connection; later messages get a new one."""
        with self._mesh.changed:
            if self._to not in self._mesh._newest:  # else another program refuses at the address of a hidden member
                self._mesh.lose(self._to)
            if self._queue.empty():
                self.put(None)

    def _excuse(self) -> None:
        """Connect again if no queued message will: the member may wait for the lost one, and sends nothing itself."""
        while self.connection is None and self._queue.empty():
            try:
                self._connect(self._mesh.coming.get(self._to, (0, 0)))
            except ConnectionRefusedError:
                self._end()
            except OSError:
                self._hang_up()
                time.sleep(AGAIN_SECONDS)

    def _connect(self, first: tuple[int, int]) -> None:
        self.connection = self._mesh.dial(self._to, self.place, "rounds", 5.0)
        self.connection.settimeout(None)
        self.connection.sendall(frame({"from": self._mesh.name, "round": first[0], "slot": first[1]}))

    def _send(self, sent: Sent) -> None:
        first = self._mesh.coming.get(self._to, (0, 0))
        if "vote" not in sent.fields:
            first = sent.fields["round"], sent.fields["slot"]
            self._mesh.coming[self._to] = first[0], first[1] + 1  # whether it arrives or is lost
        if self.connection is None:
            self._connect(first)
        assert self.connection is not None
        self.connection.sendall(frame(sent.fields))
        self.connection.sendall(sent.payload)

    def _hang_up(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            hang_up(connection)
            connection.close()
