"""Decisions of the worker with whom a run begins, while it was set up: later workers are given the same, in order.

Such as the name of a run or a folder, which a process group would broadcast. A worker that was given them gives them.
"""

import socket
from typing import Any

from lightning_decentral.elastic.wire.sockets.frames import connected
from lightning_decentral.elastic.wire.sockets.values import receive_value, send_value
from lightning_decentral.shared.wire.plain import NotPlain, pack

SECONDS = 10.0
"""Seconds of silence, until the other one is asked again."""


class Beginnings:
    """One worker's.

    Attributes:
        given: values so far; None where one can't be sent, and every worker has its own.
    """

    def __init__(self) -> None:
        self.given: list[list[Any] | None] = []
        self._over = False

    def add(self, value: Any) -> Any:
        """The next one, which is returned."""
        try:
            pack(value)
        except NotPlain:
            self.given.append(None)
        else:
            self.given.append([value])
        return value

    def close(self) -> None:
        """Add no more: this worker is set up."""
        self._over = True

    def serve(self, connection: socket.socket) -> None:
        """Answer what it asks for: whether there will be one, whether it is there, and it."""
        words, _ = receive_value(connection)
        place = int(words["nth"])
        over, found = self._over, self.given[place : place + 1]
        none = over if not found else found[0] is None
        send_value(connection, {"found": bool(found) and not none, "none": none}, found[0] if found else None)


def asked(place: str, nth: int) -> tuple[bool, bool, Any]:
    """Ask another worker: (whether it is there, whether there is none, it). OSError or ValueError: no answer."""
    with connected(place, "beginnings", SECONDS) as connection:
        send_value(connection, {"nth": nth}, None)
        connection.settimeout(SECONDS)
        words, value = receive_value(connection)
        return bool(words["found"]), bool(words["none"]), value[0] if value else None
