"""Frames on a connection: four bytes of length, then JSON. A frame that is too long or no JSON ends the connection.

    greeting   the first frame of a connection: {"job": ..., "wants": ...}
    refusal    answer to a guest that isn't served: {"refused": why}
    value      of any size: {..., "head": bytes of the head}  head  tensors  {"digest": sha256 of crc32 of each piece}

Memory is allocated as bytes arrive, not as they are announced. A value is never copied as a whole: tensors are sent in
pieces, and the digest is computed over the pieces.

The job is a digest of LIGHTNING_DECENTRAL_TOKEN: it keeps other jobs and wrong settings out. It is no password: that is
the key, with which frames travel in TLS (`keys`)."""

import hashlib
import hmac
import json
import os
import select
import socket
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.elastic.wire.sockets.keys import Key
from lightning_decentral.shared.wire.meeting.rendezvous import TOKEN
from lightning_decentral.shared.wire.plain import Serialized, lengths, pack, unpack

LENGTH_BYTES = 4
LARGEST_BYTES = 1 << 20  # bytes of a frame at most: a message to 1000 members has 100 KB
GREETING_BYTES = 1 << 10  # bytes of a greeting at most: no more is read from an unknown program
GROWTH_BYTES = 1 << 20  # bytes allocated at once; doubled each time they have arrived
MOST_BYTES = 1 << 40  # bytes of one tensor at most
PIECE_BYTES = 256 * 2**10  # small, so that other messages on a slow link get their turn
UNREAD_SECONDS = 60.0  # seconds to send a piece: a receiver that doesn't read must not keep a thread
IDLE, EVERY, TIMES = 60, 20, 6
"""TCP keepalive: seconds of silence before the first probe, seconds between probes, and their number."""


class Refused(ValueError):
    """Raised if the other end has refused this connection; the text is its reason."""


def frame(message: Any) -> bytes:
    """Encode a message as a frame: its length, then JSON."""
    text = json.dumps(message).encode()
    return len(text).to_bytes(LENGTH_BYTES, "big") + text  # sent by one call


def message(text: bytes | bytearray) -> Any:
    """Decode the message in a frame. ValueError if it is no JSON or nested too deeply; Refused if it is a refusal."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("a frame is nested too deeply: another program uses this port") from None
    if type(found) is dict and set(found) == {"refused"}:
        raise Refused(str(found["refused"]))
    return found


def size_of(length: bytes | bytearray, most: int = LARGEST_BYTES) -> int:
    """Decode a frame's length. ValueError if it exceeds `most`."""
    size = int.from_bytes(length, "big")
    if size > most:
        raise ValueError(f"a frame of {size} bytes: another program uses this port")
    return size


class Frames:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, more: bytes) -> list[Any]:
        """Add received bytes and return the messages complete now. ValueError: no frames. Refused: a refusal."""
        self._bytes += more
        found = []
        while len(self._bytes) >= LENGTH_BYTES:
            end = LENGTH_BYTES + size_of(self._bytes[:LENGTH_BYTES], LARGEST_BYTES - LENGTH_BYTES)
            if len(self._bytes) < end:  # the rest is still on its way
                break
            found.append(message(self._bytes[LENGTH_BYTES:end]))
            del self._bytes[:end]
        return found


async def first_of(read: Callable[[int], Awaitable[bytes]], most: int = GREETING_BYTES) -> Any:
    """Return the next message, of at most `most` bytes, by `read(bytes at most)`, and read nothing after it."""
    found, size = b"", LENGTH_BYTES
    while len(found) < size:
        if not (more := await read(size - len(found))):
            raise ConnectionResetError("the connection has ended")
        found += more
        if len(found) == LENGTH_BYTES:
            size += size_of(found, most)
    return message(found[LENGTH_BYTES:])


def receive(connection: socket.socket) -> Any:
    """Receive the next message, on a connection with raw bytes between frames. ValueError if it is no frame, Refused if
    this end is refused, OSError if the connection has ended."""
    return message(receive_bytes(connection, size_of(receive_bytes(connection, LENGTH_BYTES))))


def receive_bytes(connection: socket.socket, size: int, at_once: int = GROWTH_BYTES) -> bytearray:
    """Receive `size` bytes. ValueError beyond `MOST_BYTES`, OSError if the connection ends before. `at_once`:
    number of bytes allocated before they arrive, at most the size of an earlier message."""
    if not 0 <= size <= MOST_BYTES:
        raise ValueError(f"{size} bytes are announced: another program uses this port")
    found, have = bytearray(min(size, at_once)), 0
    while have < size:
        if have == len(found):
            found += bytes(min(have, size - have))  # doubled: copies cost no more than the received bytes
        with memoryview(found) as view:
            more = connection.recv_into(view[have:])
        if not more:
            raise ConnectionResetError("the connection has ended")
        have += more
    return found


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return a host tensor's bytes without a copy: changing the tensor changes what is sent."""
    flat: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def send_value(connection: socket.socket, header: dict[str, Any], value: Any) -> None:
    """Send a value with these header fields. NotPlain if it can't be sent, OSError if the connection has ended or the
    receiver doesn't read."""
    packed, digest = pack(value), hashlib.sha256()  # refused here: nothing is sent yet
    connection.settimeout(UNREAD_SECONDS)
    connection.sendall(frame({**header, "head": len(packed.head)}))
    for raw in (memoryview(packed.head), *map(raw_bytes, packed.payload)):
        for piece, checksum in _pieces(raw):
            connection.sendall(piece)
            digest.update(checksum)
    connection.sendall(frame({"digest": digest.hexdigest()}))


def receive_value(connection: socket.socket, header: Any) -> Any:
    """Receive the value after its `header`. ValueError if the digest differs from the sender's, OSError if the
    connection has ended."""
    if type(header) is not dict or type(header.get("head")) is not int:
        raise ValueError("no value follows: give every worker the same version")
    digest = hashlib.sha256()
    head = receive_bytes(connection, header["head"])
    payload = [receive_bytes(connection, size) for size in lengths(bytes(head))]  # (bytes,) of each tensor
    for raw in (head, *payload):
        for _, checksum in _pieces(memoryview(raw)):
            digest.update(checksum)
    if receive(connection) != {"digest": digest.hexdigest()}:
        raise ValueError("the bytes received differ from those sent (by their digest): try again")
    tensors = [
        torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8) for raw in payload
    ]
    return unpack(Serialized(bytes(head), tensors))


def _pieces(raw: memoryview) -> Iterator[tuple[memoryview, bytes]]:
    """Yield each piece and its CRC32, which goes into the digest: against damage, not against forgery."""
    for start in range(0, len(raw), PIECE_BYTES):
        piece = raw[start : start + PIECE_BYTES]
        yield piece, zlib.crc32(piece).to_bytes(4, "big")


def wanted(found: Any, *known: str) -> str:
    """Return the service that a guest of the same job wants. ValueError for another job or an unknown service."""
    job, wants = (str(found.get(key)) for key in ("job", "wants")) if type(found) is dict else ("", "")
    if not hmac.compare_digest(job.encode(), _job().encode()):  # as bytes: text must be ASCII
        raise ValueError(f"a guest of another job, or with another {TOKEN}")
    if wants not in known:
        raise ValueError(
            f"a guest that wants {wants!r}, which this port doesn't serve: give every worker the lobby's address, and "
            "the same version"
        )
    return wants


def _job() -> str:
    return hashlib.sha256(f"lightning_decentral elastic {os.environ.get(TOKEN, '')}".encode()).hexdigest()[:32]


def address(place: str) -> tuple[str, int]:
    """Parse "host:29400" into ("host", 29400). ValueError for another text."""
    host, _, port = place.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"an address is HOST:PORT such as 10.0.0.1:29400, got {place!r}")
    return host, int(port)


def connected(place: str, wants: str, seconds: float, key: Key | None = None) -> socket.socket:
    """Connect to an address and greet; small messages leave at once. OSError if the address isn't reached, WrongKey if
    it has another key."""
    made = socket.create_connection(address(place), seconds)
    try:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # heartbeats wait for no acknowledgement
        keeps_alive(made)
        made = key.secured(made, place) if key else made
        greet(made, wants)
    except OSError:
        made.close()
        raise
    return made


def greet(connection: socket.socket, wants: str) -> None:
    """Send the greeting of a guest that wants this service."""
    connection.sendall(frame({"job": _job(), "wants": wants}))


def readable(connection: socket.socket, seconds: float) -> bool:
    """Return whether something to read, or the end, comes within this time."""
    poll = select.poll()  # `select` knows no descriptors beyond 1024
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def ended(connection: socket.socket, seconds: float) -> bool:
    """Return whether the other end closes a connection within this time, even one on which a thread is sending."""
    try:  # below TLS, whose state is that thread's
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
        return readable(connection, seconds) and not socket.socket.recv(connection, 1, flags)
    except (OSError, ValueError):
        return True


def keeps_alive(connection: socket.socket) -> None:
    """Enable TCP keepalive, so that a host lost without closing its connections doesn't keep threads for ever."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": IDLE, "TCP_KEEPINTVL": EVERY, "TCP_KEEPCNT": TIMES}.items():
        if name in vars(socket):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, vars(socket)[name], value)


def own_address(lobby: str) -> str:
    """Return this machine's address towards the lobby. ValueError if the lobby's address isn't valid."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address(lobby))  # connecting UDP sends nothing, and only looks up the route
        except OSError as error:
            raise ValueError(f"lobby={lobby!r} can't be reached from here ({error}): give HOST:PORT") from None
        return str(probe.getsockname()[0])
