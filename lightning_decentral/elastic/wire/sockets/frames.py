"""Frames: four bytes of length, then JSON; what is longer than a frame may be, or isn't JSON, ends the connection.

    greeting   the first frame of a connection: {"job": ..., "wants": ...}
    refusal    what a guest gets that isn't let in: {"refused": why}
    value      of any size: {..., "head": bytes of the head}  head  tensors  {"digest": sha256 of crc32 of each piece}

Room is made for bytes as they come, not as they are announced. Of a value nothing is made twice: tensors' bytes go in
pieces, and the digest is of the bytes that go by.

The job is a digest of LIGHTNING_DECENTRAL_TOKEN: it keeps other jobs and wrong settings out, and is no password, as
all of this is readable on its way.
"""

import hashlib
import hmac
import json
import os
import socket
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.shared.wire.meeting.rendezvous import TOKEN
from lightning_decentral.shared.wire.plain import Serialized, lengths, pack, unpack

LENGTH_BYTES = 4
LARGEST_BYTES = 1 << 20  # bytes of a frame at most: a message to 1000 members has 100 KB
GREETING_BYTES = 1 << 10  # bytes of a greeting at most: of a stranger no more is read
GROWTH_BYTES = 1 << 20  # bytes for which there is room at once; twice as many when they have come, and so on
MOST_BYTES = 1 << 40  # bytes of one tensor at most
PIECE_BYTES = 256 * 2**10  # the receiver may be far: small, so that what else it is sent gets its turn
UNREAD_SECONDS = 60.0  # seconds for a piece: who doesn't read doesn't keep a thread
IDLE, EVERY, TIMES = 60, 20, 6
"""Seconds of silence until TCP asks whether the other host is there still; between its questions; how many."""


class Refused(ValueError):
    """The other end has sent why this one isn't let in."""


def frame(message: Any) -> bytes:
    """Bytes that are sent for a message: its length, then JSON."""
    text = json.dumps(message).encode()
    return len(text).to_bytes(LENGTH_BYTES, "big") + text  # sent by one call


def message(text: bytes | bytearray) -> Any:
    """Message in a frame. ValueError where it is no JSON, or nested too deeply; Refused where it is a refusal."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("a frame that is nested too deeply: another program speaks here") from None
    if type(found) is dict and set(found) == {"refused"}:
        raise Refused(str(found["refused"]))
    return found


def size_of(length: bytes | bytearray, most: int = LARGEST_BYTES) -> int:
    """Bytes of the frame behind these. ValueError where it may not have as many."""
    size = int.from_bytes(length, "big")
    if size > most:
        raise ValueError(f"a frame of {size} bytes: another program speaks here")
    return size


class Frames:
    """Bytes as they come, in frames of `most` bytes at most."""

    def __init__(self, most: int = LARGEST_BYTES - LENGTH_BYTES) -> None:
        self.most = most
        self._bytes = bytearray()

    @property
    def missing(self) -> int:
        """Bytes until the next message is complete, or its length is known."""
        have = len(self._bytes) - LENGTH_BYTES
        return -have if have < 0 else size_of(self._bytes[:LENGTH_BYTES], self.most) - have

    def feed(self, more: bytes) -> list[Any]:
        """The messages that are complete now. ValueError: these are no frames. Refused: this end isn't let in."""
        self._bytes += more
        found = []
        while len(self._bytes) >= LENGTH_BYTES:
            end = LENGTH_BYTES + size_of(self._bytes[:LENGTH_BYTES], self.most)
            if len(self._bytes) < end:  # the rest is still on its way
                break
            found.append(message(self._bytes[LENGTH_BYTES:end]))
            del self._bytes[:end]
        return found


def receive(connection: socket.socket) -> Any:
    """The next message, on a connection where bytes that aren't frames follow frames. ValueError where it is none,
    Refused where this end isn't let in, OSError where the connection has ended."""
    return message(receive_bytes(connection, size_of(receive_bytes(connection, LENGTH_BYTES))))


def receive_bytes(connection: socket.socket, size: int, at_once: int = GROWTH_BYTES) -> bytearray:
    """Receive `size` bytes. ValueError where nobody sends so many, OSError where the connection ends before. `at_once`:
    for which there is room before they come: no more than was sent before."""
    if not 0 <= size <= MOST_BYTES:
        raise ValueError(f"{size} bytes are announced: another program speaks here")
    found, have = bytearray(min(size, at_once)), 0
    while have < size:
        if have == len(found):
            found += bytes(min(have, size - have))  # doubled: copies cost no more than what came
        with memoryview(found) as view:
            more = connection.recv_into(view[have:])
        if not more:
            raise ConnectionResetError("the connection has ended")
        have += more
    return found


def raw_bytes(tensor: Tensor) -> memoryview:
    """Bytes of a tensor on the host, in place: to change it changes what is sent."""
    flat: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def send_value(connection: socket.socket, header: dict[str, Any], value: Any) -> None:
    """Send the value with these header fields. NotPlain where it can't be sent, OSError where the connection has ended,
    or nobody reads."""
    packed, digest = pack(value), hashlib.sha256()  # refused here: nothing is sent yet
    connection.settimeout(UNREAD_SECONDS)
    connection.sendall(frame({**header, "head": len(packed.head)}))
    for raw in (memoryview(packed.head), *map(raw_bytes, packed.payload)):
        for piece, checksum in _pieces(raw):
            connection.sendall(piece)
            digest.update(checksum)
    connection.sendall(frame({"digest": digest.hexdigest()}))


def receive_value(connection: socket.socket, header: Any = None) -> tuple[dict[str, Any], Any]:
    """Receive (header fields, value), or what follows a header that was already received. ValueError where what came
    isn't what was sent, OSError where the connection has ended."""
    if header is None:
        header = receive(connection)
    if type(header) is not dict or type(header.get("head")) is not int:
        raise ValueError("no value follows: give every worker the same version")
    digest = hashlib.sha256()
    head = receive_bytes(connection, header["head"])
    payload = [receive_bytes(connection, size) for size in lengths(bytes(head))]  # (bytes,) of each tensor
    for raw in (head, *payload):
        for _, checksum in _pieces(memoryview(raw)):
            digest.update(checksum)
    if receive(connection) != {"digest": digest.hexdigest()}:
        raise ValueError("what came isn't what was sent: its digest differs")
    tensors = [
        torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8) for raw in payload
    ]
    return header, unpack(Serialized(bytes(head), tensors))


def _pieces(raw: memoryview) -> Iterator[tuple[memoryview, bytes]]:
    """The pieces, and each's part of the digest: against damage, not against forgery, and cheaper than all bytes."""
    for start in range(0, len(raw), PIECE_BYTES):
        piece = raw[start : start + PIECE_BYTES]
        yield piece, zlib.crc32(piece).to_bytes(4, "big")


def refusal(why: str) -> bytes:
    """Bytes of the frame to a guest that isn't let in."""
    return frame({"refused": why})


def wanted(found: Any, *known: str) -> str:
    """Read what a guest of the same job wants. ValueError where it is none, or wants something else."""
    job, wants = (str(found.get(key)) for key in ("job", "wants")) if type(found) is dict else ("", "")
    if not hmac.compare_digest(job, _job()):
        raise ValueError(f"a guest of another job, or with another {TOKEN}")
    if wants not in known:
        raise ValueError(
            f"a guest that wants {wants!r}, which nobody serves at this port: give every worker the lobby's place, and "
            "the same version"
        )
    return wants


def _job() -> str:
    return hashlib.sha256(f"lightning_decentral elastic {os.environ.get(TOKEN, '')}".encode()).hexdigest()[:32]


def address(place: str) -> tuple[str, int]:
    """("host", 29400) of "host:29400". ValueError where it is no such place."""
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"a place is HOST:PORT such as 10.0.0.1:29400, got {place!r}")
    return host, int(port)


def connected(place: str, wants: str, seconds: float) -> socket.socket:
    """A connection that has greeted; small messages leave at once. OSError where nobody is."""
    made = socket.create_connection(address(place), seconds)
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # beats wait for no acknowledgement
        keeps_alive(made)
        made.sendall(frame({"job": _job(), "wants": wants}))
    except OSError:
        made.close()
        raise
    return made


def keeps_alive(connection: socket.socket) -> None:
    """A host that is gone without closing its connections doesn't keep this end's threads for ever."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": IDLE, "TCP_KEEPINTVL": EVERY, "TCP_KEEPCNT": TIMES}.items():
        if name in vars(socket):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, vars(socket)[name], value)


def own_address(lobby: str) -> str:
    """The one from which this machine reaches the lobby. ValueError for no such place."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address(lobby))  # UDP: it sends nothing, and asks the routes alone
        except OSError as error:
            raise ValueError(f"lobby={lobby!r} can't be reached from here ({error}): give HOST:PORT") from None
        return str(probe.getsockname()[0])
