"""The sweep's end of its members' connections: who sits where, what each sends, and what is no message of a member.

Of that, random bytes or a message that no member would send, nothing reaches the arbiter: its connection is closed. The
sweep goes on.
"""

import logging
import select
import selectors
import socket
from contextlib import suppress
from typing import Protocol

from lightning_decentral.sweep.wire.client import Lines, Message, write

log = logging.getLogger(__name__)

GUESTS = 64  # connections of which nobody knows yet whose they are


class SeatEvents(Protocol):
    """Receiver of members' messages: the sweep."""

    def expects(self, name: str) -> bool:
        """Return whether a member of this name trains now."""

    def receive(self, name: str, message: Message) -> None:
        """ValueError where it is no message of a member."""

    def leave_seat(self, name: str) -> None:
        """The process that held the device is gone, the member may live on."""


class Seats:
    """Connections by member.

    Attributes:
        refused: how many connections sent what no member sends.
    """

    def __init__(self, selector: selectors.BaseSelector, receiver: SeatEvents) -> None:
        self._selector, self._receiver = selector, receiver
        self._taken: dict[str, Lines] = {}
        self._guests: list[socket.socket] = []
        self.refused = 0

    def accept(self, listener: socket.socket) -> None:
        """Accept a new connection, of a member as its first message will show."""
        connection, _ = listener.accept()
        lines = Lines(connection)
        self._guests.append(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._read(lines))
        if len(self._guests) > GUESTS:
            self._refuse(self._guests[0], f"{GUESTS} connections that send nothing")

    def write(self, name: str, message: Message) -> None:
        """Send to the member, unless it has just died: its process reports that next."""
        with suppress(OSError, KeyError):
            write(self._taken[name].connection, message)

    def hang_up(self, name: str) -> None:
        """The member has ended."""
        if name in self._taken:
            self._close(self._taken.pop(name).connection)

    def _read(self, lines: Lines) -> None:
        try:
            for message in lines.arrived():
                self._act(lines, message)
        except (EOFError, OSError):
            self._gone(lines.connection)
        except ValueError as error:
            self._refuse(lines.connection, str(error))

    def _act(self, lines: Lines, message: Message) -> None:
        name = self._name(lines.connection)
        if message.get("say") == "hello":
            self._sit(lines, name, message.get("member"))
        elif name is None:
            raise ValueError("a message before hello")
        else:
            self._receiver.receive(name, message)

    def _sit(self, lines: Lines, before: str | None, name: object) -> None:
        if not isinstance(name, str) or not self._receiver.expects(name):
            raise ValueError(f"a hello of {name!r:.40}, who is no member that trains")
        # The member's former process may be gone, of which we may learn in a moment only.
        while name in self._taken and name != before and _readable(self._taken[name].connection):
            self._read(self._taken[name])
        if name in self._taken or before is not None:
            raise ValueError(f"a second hello of member {name}")
        self._guests.remove(lines.connection)
        self._taken[name] = lines

    def _name(self, connection: socket.socket) -> str | None:
        return next((name for name, seat in self._taken.items() if seat.connection is connection), None)

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        if self.refused == 0:
            log.warning(f"the sweep's socket received what no member sends ({reason}): ignored, as all others are")
        self.refused += 1
        self._gone(connection)

    def _gone(self, connection: socket.socket) -> None:
        name = self._name(connection)
        self._close(connection)
        if name is None:
            self._guests.remove(connection)
        else:
            del self._taken[name]
            self._receiver.leave_seat(name)

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()


def _readable(connection: socket.socket) -> bool:
    """Return whether something has come, if only the end of the connection."""
    return bool(select.select([connection], [], [], 0)[0])
