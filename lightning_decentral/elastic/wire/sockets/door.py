"""Listening port: a guest (connection) that greets in time is served on its own thread, any other is closed.

A guest that doesn't greet occupies a descriptor for seconds, but no thread. If descriptors run out, such guests are
closed first, and accepting continues."""

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Any

from lightning_decentral.elastic.wire.sockets.frames import (
    GREETING_BYTES,
    Frames,
    frame,
    keeps_alive,
    wanted,
)

GREETING_SECONDS = 5.0  # seconds in which a guest must greet, and then send its first message
MOST_WAITING = 64  # guests that haven't greeted; beyond this number the oldest is closed
FULL_SECONDS = 0.1  # seconds until the next try to accept where descriptors have run out
LINES = 100  # number of refusals remembered, so as to print each once

Serve = Callable[[socket.socket], None]


def warned(line: str) -> None:
    print(f"lightning_decentral: {line}", file=sys.stderr, flush=True)


class Once:
    """Prints a line by `say` once for each cause, however often the cause occurs."""

    def __init__(self, say: Callable[[str], None] = warned) -> None:
        self._say, self._said = say, dict[str, None]()

    def __call__(self, cause: str, line: str) -> None:
        if cause not in self._said:
            self._said = dict.fromkeys([*self._said, cause][-LINES:])
            self._say(line)


class Door:
    """Listens on a thread at this machine's address, and serves each guest by the service that its greeting names.
    `say`: prints a line about each refused guest."""

    def __init__(self, host: str, serve: Mapping[str, Serve], say: Callable[[str], None] = warned) -> None:
        self._serve, self._say = serve, Once(say)
        self._listening = socket.create_server((host, 0), backlog=128)
        self._listening.setblocking(False)
        self.place = f"{host}:{self._listening.getsockname()[1]}"
        self._open: set[socket.socket] = set()  # served on threads, to be shut at the end
        self._waiting = dict[asyncio.Task[None], None]()  # guests that haven't greeted, the oldest first
        self._loop = asyncio.new_event_loop()  # one thread reads all greetings
        self._loop.add_reader(self._listening, self._accept)
        self._thread = threading.Thread(target=self._run, name="lightning_decentral-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close all connections. A guest that comes afterwards is refused by the system."""
        with suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()  # else a guest could still be let in, whose messages nobody would read
        for connection in list(self._open):
            shut(connection)

    def _run(self) -> None:
        with closing(self._loop), self._listening:
            self._loop.run_forever()
            self._loop.remove_reader(self._listening)
            for greeting in list(self._waiting):
                greeting.cancel()
                with suppress(asyncio.CancelledError):
                    self._loop.run_until_complete(greeting)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return  # the guest has gone meanwhile
        except OSError as error:
            self._say("full", f"no connection can be accepted ({error}): raise `ulimit -n`; trying again")
            for greeting in self._waiting:
                greeting.cancel()
            time.sleep(FULL_SECONDS)
            return
        if len(self._waiting) >= MOST_WAITING:
            next(iter(self._waiting)).cancel("a guest that doesn't greet, of too many")
        connection.setblocking(False)
        greeting = self._loop.create_task(self._greeted(connection))
        self._waiting[greeting] = None
        greeting.add_done_callback(self._waiting.pop)

    async def _greeted(self, connection: socket.socket) -> None:
        """Serve the guest once it has greeted correctly; else refuse it, with the reason."""
        try:
            greeting = await asyncio.wait_for(self._greeting(connection), GREETING_SECONDS)
            self._let_in(connection, wanted(greeting, *self._serve))
            return
        except asyncio.TimeoutError:
            why = "a guest that doesn't greet"
        except (ValueError, asyncio.CancelledError) as error:
            why = str(error)
        except OSError:
            why = ""  # it has gone
        with connection, suppress(OSError):
            if why:
                peer = connection.getpeername()[0]
                self._say(f"{peer} {why}", f"refused {peer}: {why}")
                connection.send(frame({"refused": why}))

    async def _greeting(self, connection: socket.socket) -> Any:
        frames, found = Frames(GREETING_BYTES), list[Any]()
        while not found:
            more = await self._loop.sock_recv(connection, frames.missing)  # nothing after the greeting is read
            if not more:
                raise ConnectionResetError("the connection has ended")
            found = frames.feed(more)
        return found[0]

    def _let_in(self, connection: socket.socket, wants: str) -> None:
        self._open.add(connection)
        target = partial(self._served, connection, self._serve[wants])
        try:
            threading.Thread(target=target, name=f"lightning_decentral-{wants}", daemon=True).start()
        except RuntimeError as error:  # no thread can be started
            self._say("full", f"no connection can be served ({error}): raise `ulimit -u`; trying again")
            self._open.discard(connection)
            connection.close()

    def _served(self, connection: socket.socket, serve: Serve) -> None:
        try:
            with connection, suppress(OSError):
                peer = connection.getpeername()[0]
                connection.settimeout(GREETING_SECONDS)
                keeps_alive(connection)
                try:
                    serve(connection)
                except (ValueError, KeyError, TypeError, MemoryError) as error:
                    why = str(error) if str(error)[20:] else f"{type(error).__name__}: {error}"
                    self._say(f"{peer} {why}", f"shut out {peer}: {why}")
                    connection.sendall(frame({"refused": why}))
        finally:
            self._open.discard(connection)


def shut(connection: socket.socket | None) -> None:
    if connection is None:
        return
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
