"""Lobbies in processes of their own, to be killed."""

import multiprocessing
import os
import socket
import threading
import time
from types import TracebackType
from typing import Any

from lightning_decentral.elastic.plan.view import Bounds, Times
from lightning_decentral.elastic.wire.lobby_server import serve
from lightning_decentral.elastic.wire.sockets.keys import Key, key_of
from tests import ports

DEAD = 1.5
"""Seconds: a beat each 0.3, of which a busy machine may delay some."""


def ends_with(parent: int) -> None:
    """On a thread of a forked process: tests that are killed leave nobody behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _serve(parent: int, *args: Any) -> None:
    ends_with(parent)
    serve(*args)


class LobbyProcess:
    """A lobby that may be killed and started again at the same port; without a key it takes the environment's."""

    def __init__(self, least: int, most: int, key: Key | None = None) -> None:
        self.port, self._bounds, self.key = ports.free(), Bounds(least, most), key or key_of("")
        self.place = f"127.0.0.1:{self.port}"

    def __enter__(self) -> "LobbyProcess":
        self.start()
        return self

    def start(self) -> None:
        args = (os.getpid(), self._bounds, Times(DEAD), "127.0.0.1", self.port, print, self.key)
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=args, daemon=True)
        self._process.start()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError("no lobby after 20 s")

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()


def losses(mesh: Any) -> list[Any]:
    """Messages that this member awaits from now on, and that don't come."""
    take, lost = mesh.take, list[Any]()

    def takes(slot: Any, expected: Any) -> Any:
        came = take(slot, expected)
        lost.extend([slot] if came is None else [])
        return came

    mesh.take = takes
    return lost
