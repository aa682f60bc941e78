"""State transfer: a newcomer takes everything from one member, as it was between two steps; a digest proves it.

donor     a copy, made by the training thread between two steps; sent during the training, in pieces
newcomer  reads, compares the digest, hands it over

While it prepares a copy the donor reports that it lives. It has one copy at a time, and none when nobody is served.
"""

import socket
import threading
from collections.abc import Callable
from typing import Any

from lightning_decentral.elastic.wire.sockets.frames import connected, frame, receive, receive_value, send_value

ALIVE: dict[str, Any] = {"prepares": True}
ALIVE_SECONDS = 0.2  # seconds between two signs of life


class Donor:
    """Serves copies that the training thread makes; `serves` returns (origin, round) of what may be given now, or None:
    this worker isn't healed itself."""

    def __init__(self, serves: Callable[[], tuple[str, int] | None]) -> None:
        self._serves = serves
        self._asked = threading.Event()
        self._made = threading.Condition()
        self._copy: Any = None
        self._turn = threading.Lock()  # one copy at a time: it may be as large as the model with its optimizer

    def between_steps(self, copy: Callable[[], Any]) -> None:
        """The training thread calls this where its parameters, optimizer and counters belong together; nobody changes a
        `copy` of all of it afterwards."""
        if self._asked.is_set():
            made = copy(), self._serves()  # outside of the lock: it takes long
            with self._made:
                if self._asked.is_set():  # the one that asked may have gone meanwhile
                    self._copy = made
                    self._asked.clear()
                    self._made.notify_all()

    def serve(self, connection: socket.socket) -> None:
        """Answer one newcomer, in its turn; by nothing where there is nothing to give."""
        while self._serves() is not None:
            connection.sendall(frame(ALIVE))
            if self._turn.acquire(timeout=ALIVE_SECONDS):
                try:
                    self._give(connection)
                finally:
                    self._turn.release()
                return

    def _give(self, connection: socket.socket) -> None:
        self._asked.set()
        try:
            while True:
                with self._made:
                    self._made.wait_for(lambda: self._copy is not None, ALIVE_SECONDS)
                    made, self._copy = self._copy, None  # it is nobody else's
                if made is not None:
                    break
                connection.sendall(frame(ALIVE))
        finally:
            self._asked.clear()
        value, given = made
        if given is not None:
            send_value(connection, {"origin": given[0], "round": given[1]}, value)


def fetched(place: str, seconds: float) -> tuple[Any, str, int]:
    """(everything, origin, round) of the member there, which counts as dead after so many seconds of silence. OSError
    where it isn't there, or ended while it served, ValueError where what came isn't what was sent."""
    with connected(place, "heal", seconds) as connection:
        connection.settimeout(seconds)
        while (header := receive(connection)) == ALIVE:  # each resets the silence that counts as death
            pass
        try:
            header, value = receive_value(connection, header)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    return value, str(header["origin"]), int(header["round"])
