"""State transfer: a newcomer copies one member's training state, as of a moment between two steps; a digest checks it.

donor     its training thread makes a copy between two steps; a server thread sends the copy during the training
newcomer  receives the state and compares the digest

While it prepares a copy the donor sends signs of life. It keeps one copy at a time, and none when no newcomer asks."""

import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightning_decentral.elastic.wire.sockets.frames import connected, frame, receive, receive_value, send_value

ALIVE: dict[str, Any] = {"prepares": True}
ALIVE_SECONDS = 0.2  # seconds between two signs of life
Dial = Callable[[str, str, float], socket.socket]  # `connected`, or what reaches that member by another way


class Donor:
    """Sends newcomers copies that the training thread makes; `serves` returns (origin, round) of the present state,
    None if this worker has no state of the run itself."""

    def __init__(self, serves: Callable[[], tuple[str, int] | None]) -> None:
        self._serves = serves
        self._asked: queue.SimpleQueue[queue.SimpleQueue[Any]] = queue.SimpleQueue()  # where a newcomer's copy is put
        self._turn = threading.Lock()  # one copy at a time: it may be as large as the model with its optimizer

    def between_steps(self, copy: Callable[[], Any]) -> None:
        """Make a `copy` for a newcomer that asked. Call this on the training thread, between two steps; the copy must
        not change afterwards."""
        with suppress(queue.Empty):
            newcomer = self._asked.get_nowait()
            newcomer.put((copy(), self._serves()))  # nobody keeps it if the newcomer has gone meanwhile

    def serve(self, connection: socket.socket) -> None:
        """Send one newcomer the state, in its turn; send nothing if there is no state."""
        while self._serves() is not None:
            connection.sendall(frame(ALIVE))
            if self._turn.acquire(timeout=ALIVE_SECONDS):
                break
        else:
            return  # no state to send
        try:
            newcomer, made = queue.SimpleQueue[Any](), None
            self._asked.put(newcomer)
            while made is None:
                connection.sendall(frame(ALIVE))
                with suppress(queue.Empty):
                    made = newcomer.get(timeout=ALIVE_SECONDS)
            value, given = made
            if given is not None:
                send_value(connection, {"origin": given[0], "round": given[1]}, value)
        finally:
            with suppress(queue.Empty):
                self._asked.get_nowait()  # nobody waits for it any more
            self._turn.release()


def fetched(place: str, seconds: float, dial: Dial = connected) -> tuple[Any, str, int]:
    """Fetch (training state, origin, round) from the member at this address. OSError if it isn't reached, ended, or was
    silent for `seconds`; ValueError if the state received differs from the state sent."""
    with dial(place, "heal", seconds) as connection:
        connection.settimeout(seconds)
        while (header := receive(connection)) == ALIVE:  # each resets the silence that counts as death
            pass
        try:
            value = receive_value(connection, header)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
    return value, str(header["origin"]), int(header["round"])
