"""Values on a connection, of any size: a frame, the head, the tensors' bytes in pieces, and a digest of all of them.

    {..., "head": bytes of the head}   head   tensors   {"digest": sha256 of crc32 of each piece}

Nothing is made twice: the digest is of the bytes that go by.
"""

import hashlib
import socket
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.elastic.wire.sockets.frames import frame, raw_bytes, receive, receive_bytes
from lightning_decentral.shared.wire.plain import Serialized, lengths, pack, unpack

PIECE_BYTES = 256 * 2**10
"""The receiver may be far: small, so that what else it is sent gets its turn."""
UNREAD_SECONDS = 60.0
"""Seconds for a piece: who doesn't read doesn't keep a thread."""


class Sum:
    """Against damage, not against forgery."""

    def __init__(self) -> None:
        self._state = hashlib.sha256()

    def add(self, raw: memoryview | bytes | bytearray) -> None:
        self._state.update(zlib.crc32(raw).to_bytes(4, "big"))  # cheaper than sha256 of all bytes

    def text(self) -> str:
        return self._state.hexdigest()


def send_value(connection: socket.socket, header: dict[str, Any], value: Any) -> None:
    """Send the value with these header fields.

    Raises:
        NotPlain: it can't be sent.
        OSError: the connection has ended, or nobody reads.
    """
    packed, found = pack(value), Sum()  # refused here: nothing is sent yet
    connection.settimeout(UNREAD_SECONDS)
    connection.sendall(frame({**header, "head": len(packed.head)}))
    for raw in (memoryview(packed.head), *map(raw_bytes, packed.payload)):
        for piece in _pieces(raw):
            connection.sendall(piece)
            found.add(piece)
    connection.sendall(frame({"digest": found.text()}))


def receive_value(connection: socket.socket) -> tuple[dict[str, Any], Any]:
    """Receive (header fields, value).

    Raises:
        ValueError: what came isn't what was sent.
        OSError: the connection has ended.
    """
    return received(connection, receive(connection))


def received(connection: socket.socket, header: Any) -> tuple[dict[str, Any], Any]:
    """`receive_value` for a header that was already received."""
    if type(header) is not dict or type(header.get("head")) is not int:
        raise ValueError("no value follows: give every worker the same version")
    found = Sum()
    head = receive_bytes(connection, header["head"])
    payload = [receive_bytes(connection, size) for size in lengths(bytes(head))]  # (bytes,) of each tensor
    for raw in (head, *payload):
        for piece in _pieces(memoryview(raw)):
            found.add(piece)
    if receive(connection) != {"digest": found.text()}:
        raise ValueError("what came isn't what was sent: its digest differs")
    return header, unpack(Serialized(bytes(head), [_tensor(raw) for raw in payload]))


def _tensor(raw: bytearray) -> Tensor:
    return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def _pieces(raw: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(raw), PIECE_BYTES):
        yield raw[start : start + PIECE_BYTES]
