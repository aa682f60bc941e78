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

from lightning_decentral.elastic.wire.sockets.frames import frame, raw_bytes, receive, receive_bytes
from lightning_decentral.shared.wire.plain import Serialized, lengths, pack, unpack

PIECE_BYTES = 256 * 2**10  # the receiver may be far: small, so that what else it is sent gets its turn
UNREAD_SECONDS = 60.0  # seconds for a piece: who doesn't read doesn't keep a thread


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
