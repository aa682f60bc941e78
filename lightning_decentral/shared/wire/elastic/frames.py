"""Frames: four bytes of length, then JSON; what is longer than a frame may be, or isn't JSON, ends the connection.

    greeting   the first frame of whoever connects: {"job": ..., "wants": ...}

The job is a digest of LIGHTNING_DECENTRAL_TOKEN: it keeps other jobs and wrong settings apart, and is no password, as
all of this is readable on its way.
"""

import hashlib
import hmac
import json
import os
import socket
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.shared.wire.meeting.rendezvous import TOKEN

LENGTH_BYTES = 4
LARGEST_BYTES = 1 << 20
"""Of a frame: a word to 1000 members has 100 KB."""


def frame(message: Any) -> bytes:
    """What is sent for a message."""
    text = json.dumps(message).encode()
    return len(text).to_bytes(LENGTH_BYTES, "big") + text


class Frames:
    """Bytes as they come, in frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, more: bytes) -> list[Any]:
        """The messages that are complete now.

        Raises:
            ValueError: these are no frames.
        """
        self._bytes += more
        found = []
        while len(self._bytes) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._bytes[:LENGTH_BYTES], "big")
            if end > LARGEST_BYTES:
                raise ValueError(f"a frame of {end} bytes: another program speaks here")
            if len(self._bytes) < end:
                break
            found.append(json.loads(self._bytes[LENGTH_BYTES:end]))
            del self._bytes[:end]
        return found


def receive(connection: socket.socket) -> Any:
    """The next message, on a connection where bytes that aren't frames follow frames.

    Raises:
        ValueError: it is none.
        OSError: the connection has ended.
    """
    size = int.from_bytes(receive_bytes(connection, LENGTH_BYTES), "big")
    if size > LARGEST_BYTES:
        raise ValueError(f"a frame of {size} bytes: another program speaks here")
    return json.loads(receive_bytes(connection, size))


def receive_bytes(connection: socket.socket, size: int) -> bytearray:
    """So many. OSError where the connection ends before."""
    found = bytearray(size)
    view, have = memoryview(found), 0
    while have < size:
        more = connection.recv_into(view[have:])
        if not more:
            raise ConnectionResetError("the connection has ended")
        have += more
    return found


def raw_bytes(tensor: Tensor) -> memoryview:
    """Of a tensor on the host, in place: whoever changes it changes what is sent."""
    flat: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def greeting(wants: str) -> dict[str, str]:
    return {"job": _job(), "wants": wants}


def wanted(found: Any, *known: str) -> str:
    """What a guest of the same job wants.

    Raises:
        ValueError: it is none, or wants something else.
    """
    job, wants = (str(found.get(key)) for key in ("job", "wants")) if type(found) is dict else ("", "")
    if not hmac.compare_digest(job, _job()):
        raise ValueError(f"a guest of another job, or with another {TOKEN}")
    if wants not in known:
        raise ValueError(f"a guest that wants {wants!r}: give every worker the same version")
    return wants


def _job() -> str:
    return hashlib.sha256(f"lightning_decentral elastic {os.environ.get(TOKEN, '')}".encode()).hexdigest()[:32]


def address(place: str) -> tuple[str, int]:
    """("host", 29400) of "host:29400".

    Raises:
        ValueError: it is no such place.
    """
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"a place is HOST:PORT such as 10.0.0.1:29400, got {place!r}")
    return host, int(port)


def connected(place: str, wants: str, seconds: float) -> socket.socket:
    """A connection that has greeted; small messages leave at once. OSError where nobody is."""
    made = socket.create_connection(address(place), seconds)
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.sendall(frame(greeting(wants)))
    except OSError:
        made.close()
        raise
    return made


def own_address(lobby: str) -> str:
    """The one from which this machine reaches the lobby. ValueError for no such place."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address(lobby))
        except OSError as error:
            raise ValueError(f"lobby={lobby!r} can't be reached from here ({error}): give HOST:PORT") from None
        return str(probe.getsockname()[0])
