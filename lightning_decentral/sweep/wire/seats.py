"""Server's connections to a sweep's members: which member uses which, and rejection of messages from others.

Random bytes, or a message that no member would send, never reach the arbiter: their connection is closed. The sweep
continues."""

import logging
import select
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress

from lightning_decentral.sweep.wire.client import Lines, Message, write

log = logging.getLogger(__name__)

GUESTS = 64  # maximum of connections whose member isn't known yet


class Seats:
    """Connections of a sweep's server by member."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        expects: Callable[[str], bool],  # whether a member of this name trains now
        receive: Callable[[str, Message], None],  # handles a member's message; ValueError for a malformed one
        leave: Callable[[str], None],  # the process with the device is gone; its member may be alive
    ) -> None:
        self._selector, self._expects, self._receive, self._leave = selector, expects, receive, leave
        self._taken: dict[str, Lines] = {}
        self._guests: list[socket.socket] = []  # by age: the oldest is closed if there are too many
        self.refused = 0  # number of connections that sent what no member sends

    def accept(self, listener: socket.socket) -> None:
        """Accept a new connection; its first message will name the member."""
        connection, _ = listener.accept()
        lines = Lines(connection)
        self._guests.append(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._read(lines))
        if len(self._guests) > GUESTS:
            self._refuse(self._guests[0], f"{GUESTS} connections that send nothing")

    def write(self, name: str, message: Message) -> None:
        """Send a message to the member, unless it has just died: its process reports that next."""
        with suppress(OSError, KeyError):
            write(self._taken[name].connection, message)

    def hang_up(self, name: str) -> None:
        """Close the connection of a member that has ended."""
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
        before, name = self._name(lines.connection), message.get("member")
        if message.get("say") != "hello":
            if before is None:
                raise ValueError("a message before hello")
            self._receive(before, message)
            return
        if not isinstance(name, str) or not self._expects(name):
            raise ValueError(f"a hello of {name!r:.40}, who is no member that trains")
        # The member's former process may be gone: its last messages, or only its end, may have arrived by now.
        while name in self._taken and name != before and select.select([self._taken[name].connection], [], [], 0)[0]:
            self._read(self._taken[name])
        if name in self._taken or before is not None:
            raise ValueError(f"a second hello of member {name}")
        self._guests.remove(lines.connection)
        self._taken[name] = lines  # with what arrived after the hello

    def _name(self, connection: socket.socket) -> str | None:
        return next((name for name, seat in self._taken.items() if seat.connection is connection), None)

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        if self.refused == 0:
            log.warning(f"the sweep's socket received what no member sends ({reason}): the connection is closed")
        self.refused += 1
        self._gone(connection)

    def _gone(self, connection: socket.socket) -> None:
        name = self._name(connection)
        self._close(connection)
        if name is None:
            self._guests.remove(connection)
        else:
            del self._taken[name]
            self._leave(name)

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)  # a closed descriptor's number may be reused
        connection.close()
