"""Members whose address nobody reaches, as behind a router that translates addresses."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from lightning_decentral.elastic.wire.sockets import mesh
from lightning_decentral.elastic.wire.sockets.door import Door

REFUSES = "127.0.0.1:1"
"""Somebody else's address: it refuses, and that isn't the member's end."""


@contextmanager
def silent() -> Iterator[str]:
    """An address that drops what asks for a connection: its queue is full."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        yield f"127.0.0.1:{full.getsockname()[1]}"


@contextmanager
def behind(place: str) -> Iterator[None]:
    """Who begins in here says that it is reached at this address."""

    class Hidden(Door):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.place = place

    with patch.object(mesh, "Door", Hidden):
        yield
