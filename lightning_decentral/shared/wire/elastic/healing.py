"""A newcomer takes everything from one member, as that member was between two steps; its digest proves it.

donor     a copy, made by the training thread between two steps; sent beside the training, in pieces
newcomer  reads, compares the digest, hands it over
"""

import socket
import threading
from collections.abc import Callable
from typing import Any

import torch

from lightning_decentral.shared.compute.digest import digest
from lightning_decentral.shared.wire.elastic.frames import connected, frame, raw_bytes, receive, receive_bytes
from lightning_decentral.shared.wire.plain import Packed, pack, unpack

# A newcomer may be far: small pieces, so that what else it is sent gets its turn.
PIECE_BYTES = 256 * 2**10


class Donor:
    """Serves copies that the training thread makes.

    Args:
        serves: (origin, round) of what may be given now; None: this worker isn't healed itself.
    """

    def __init__(self, serves: Callable[[], tuple[str, int] | None]) -> None:
        self._serves = serves
        self._asked = threading.Event()
        self._made = threading.Condition()
        self._copy: Any = None
        self._copies = 0

    def between_steps(self, copy: Callable[[], Any]) -> None:
        """The training thread calls this where its parameters, optimizer and counters belong together.

        Args:
            copy: of all of it, which nobody changes afterwards.
        """
        if self._asked.is_set():
            self._asked.clear()
            with self._made:
                self._copy, self._copies = (copy(), self._serves()), self._copies + 1
                self._made.notify_all()

    def serve(self, connection: socket.socket, seconds: float = 60.0) -> None:
        """Answer one newcomer; by nothing where there is nothing to give."""
        if self._serves() is None:
            return
        with self._made:
            before = self._copies
            self._asked.set()
            if not self._made.wait_for(lambda: self._copies > before, seconds):
                return
            value, given = self._copy
        if given is None:
            return
        packed = pack(value)
        head = {"head": packed.head.decode(), "bytes": [len(p) for p in packed.payload], "digest": digest(value)}
        connection.sendall(frame({**head, "origin": given[0], "round": given[1]}))
        for tensor in packed.payload:
            raw = raw_bytes(tensor)
            for start in range(0, len(raw), PIECE_BYTES):
                connection.sendall(raw[start : start + PIECE_BYTES])


def fetched(place: str, seconds: float) -> tuple[Any, str, int]:
    """(everything, origin, round) of the member there.

    Args:
        seconds: of silence, until it counts as dead.

    Raises:
        OSError: it isn't there, or ended while it served.
        ValueError: what came isn't what was sent.
    """
    with connected(place, "heal", seconds) as connection:
        connection.settimeout(seconds)
        found = receive(connection)
        payload = [
            torch.frombuffer(receive_bytes(connection, size), dtype=torch.uint8)
            if size
            else torch.empty(0, dtype=torch.uint8)
            for size in found["bytes"]
        ]
    value = unpack(Packed(found["head"].encode(), payload))
    if digest(value) != found["digest"]:
        raise ValueError(f"what came from {place} isn't what was sent: its digest differs")
    return value, str(found["origin"]), int(found["round"])
