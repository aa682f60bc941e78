"""Reads an offline W&B run back: a `.wandb` file is a LevelDB log of protobuf records.

7 bytes of header (":W&B", magic 0xBEE1, version), which count to the first of the blocks of 32 KiB. A block holds
pieces, never one across its end: crc32 (4 bytes), length (2), kind (1), payload. Kind 1 is a whole record, 2 its first
piece, 3 a middle one, 4 its last. Fewer than 7 bytes at a block's end are padding.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

FILE_HEADER = struct.Struct("<4sHB")
PIECE_HEADER = struct.Struct("<IHB")
BLOCK_BYTES = 32 * 1024
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def payloads(content: bytes) -> Iterator[bytes]:
    """One bytes object per record; an unfinished last record is left out."""
    assert FILE_HEADER.unpack_from(content)[:2] == (b":W&B", 0xBEE1)
    position, record = FILE_HEADER.size, b""
    while position + PIECE_HEADER.size <= len(content):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < PIECE_HEADER.size:
            position += left
            continue
        checksum, length, kind = PIECE_HEADER.unpack_from(content, position)
        position += PIECE_HEADER.size
        piece = content[position : position + length]
        assert checksum == zlib.crc32(piece, zlib.crc32(bytes([kind]))), f"damaged at byte {position}"
        position += length
        record = piece if kind in (WHOLE, FIRST) else record + piece
        if kind in (WHOLE, LAST):
            yield record


def records(path: Path) -> list[Any]:
    return [Record.FromString(payload) for payload in payloads(path.read_bytes())]


def history(path: Path) -> list[dict[str, Any]]:
    """Logged rows, in order."""
    rows = [record.history.item for record in records(path) if record.HasField("history")]
    return [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


def settings(path: Path) -> dict[str, Any]:
    """The run's configuration; W&B's own entry left out."""
    found: dict[str, Any] = {}
    for record in records(path):
        updates = [*record.run.config.update, *record.config.update]
        found |= {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in updates}
    return {key: value for key, value in found.items() if key != "_wandb"}


def run(path: Path) -> Any:
    """Project, group and name of the run."""
    return next(record.run for record in records(path) if record.HasField("run"))
