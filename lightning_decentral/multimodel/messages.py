"""Lines of JSON over a local socket: what members and the arbiter say to each other."""

import json
import socket
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]


def write(connection: socket.socket, message: Message) -> None:
    """One line."""
    connection.sendall(json.dumps(message).encode() + b"\n")


class Lines:
    """The messages that arrive on one socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def arrived(self) -> Iterator[Message]:
        """Reads once, which may wait, and yields what is whole.

        Raises:
            EOFError: the other side is gone.
        """
        try:
            chunk = self.connection.recv(1 << 16)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise EOFError("the other side has closed the connection")
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        yield from map(json.loads, whole)
