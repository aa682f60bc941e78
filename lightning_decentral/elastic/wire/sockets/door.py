"""Listening port: a guest (connection) that greets in time is served on its own thread, any other is closed.

A guest without the run's key, or that doesn't greet, occupies a descriptor for seconds, but no thread. If descriptors
run out, such guests are closed first, and accepting continues."""

import asyncio
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_decentral.elastic.wire.sockets.frames import (
    GREETING_BYTES,
    first_of,
    frame,
    keeps_alive,
    receive,
    wanted,
)
from lightning_decentral.elastic.wire.sockets.keys import HANDSHAKE, NEEDS_KEY, NEEDS_NONE, Key

GREETING_SECONDS = 5.0  # seconds in which a guest must greet, and then send its first message
MOST_WAITING = 64  # guests that haven't greeted; beyond this number the oldest one of the host with most is closed
PARTING_SECONDS = 0.5  # seconds in which a refused guest may read why
FULL_SECONDS = 0.1  # seconds until the next try to accept where descriptors have run out
LINES = 100  # number of refusals remembered, so as to print each once

Serve = Callable[[socket.socket], Any]  # returns True if the connection is another thread's from now on


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


async def ready(connection: socket.socket, call: Callable[..., Any], *args: Any) -> Any:
    """Return `call(*args)`, which reads from a connection that doesn't block, plain or TLS, as soon as it needn't wait.
    What a handshake sends always finds room in a new connection's buffer."""
    woken = asyncio.Event()
    asyncio.get_running_loop().add_reader(connection, woken.set)
    try:
        while True:
            with suppress(BlockingIOError, ssl.SSLWantReadError):
                return call(*args)
            woken.clear()
            await woken.wait()
    finally:
        asyncio.get_running_loop().remove_reader(connection)


@dataclass
class Guest:
    """A connection that hasn't greeted; None: `enter` has passed it on, and answers itself."""

    connection: socket.socket | None
    peer: str


class Entrance:
    """Accepts guests on an event loop. `enter` takes a guest through handshake and greeting within `GREETING_SECONDS`;
    its ValueError is the reason why the guest is refused. A guest that speaks plainly where there is a key, or TLS
    where there is none, is refused by its first byte."""

    def __init__(
        self,
        listening: socket.socket,
        loop: asyncio.AbstractEventLoop,
        enter: Callable[[Guest], Coroutine[Any, Any, None]],
        key: Key | None,
        say: Callable[[str, str], None],  # `Once`
    ) -> None:
        self._listening, self._loop, self._enter, self._key, self._say = listening, loop, enter, key, say
        self._waiting = dict[asyncio.Task[None], str]()  # {guest that hasn't greeted: its host}, the oldest first
        listening.setblocking(False)
        loop.add_reader(listening, self._accept)

    async def close(self) -> None:
        """Stop accepting, and close guests that haven't greeted."""
        self._loop.remove_reader(self._listening)
        for greeting in (waiting := list(self._waiting)):
            greeting.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def _accept(self) -> None:
        try:
            connection, (peer, *_) = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return  # the guest has gone meanwhile
        except OSError as error:
            self._say("full", f"no connection can be accepted ({error}): raise `ulimit -n`; trying again")
            for greeting in self._waiting:
                greeting.cancel()
            self._loop.remove_reader(self._listening)
            self._loop.call_later(FULL_SECONDS, self._loop.add_reader, self._listening, self._accept)
            return
        if len(self._waiting) >= MOST_WAITING:  # many guests of one host mustn't keep others out
            hosts = list(self._waiting.values())
            most = max(hosts, key=hosts.count)
            oldest = next(greeting for greeting, host in self._waiting.items() if host == most)
            del self._waiting[oldest]
            oldest.cancel("a guest that doesn't greet, of too many")
        connection.setblocking(False)
        greeting = self._loop.create_task(self._greeted(Guest(connection, peer)))
        self._waiting[greeting] = peer
        self._loop.call_later(GREETING_SECONDS, greeting.cancel, "a guest that doesn't greet")
        greeting.add_done_callback(lambda done: self._waiting.pop(done, None))

    async def _greeted(self, guest: Guest) -> None:
        """Let the guest in once it has greeted correctly; else refuse it, with the reason."""
        raw, why, reads = guest.connection, "", False
        assert raw is not None
        try:
            first = await ready(raw, raw.recv, 1, socket.MSG_PEEK)
            if first and (secret := first == HANDSHAKE) is (self._key is None):
                told = f"a guest with a key: {NEEDS_NONE}" if secret else f"a guest without a key: {NEEDS_KEY}"
                raise ValueError(told)
            await self._enter(guest)
            return
        except ssl.SSLError as error:
            why = "" if isinstance(error, ssl.SSLEOFError) else f"a guest without the run's key ({error.reason})"
        except OSError:
            pass  # it has gone
        except (ValueError, asyncio.CancelledError) as error:
            why, reads = str(error), isinstance(error, ValueError)
        await self._refuse(guest, why, reads)

    async def _refuse(self, guest: Guest, why: str, reads: bool) -> None:
        if why:
            self._say(f"{guest.peer} {why}", f"refused {guest.peer}: {why}")
        if (connection := guest.connection) is not None:
            with connection, suppress(OSError, asyncio.TimeoutError):
                if why:
                    connection.send(frame({"refused": why}))
                if reads:
                    await asyncio.wait_for(_parted(connection), PARTING_SECONDS)


async def _parted(connection: socket.socket) -> None:
    """Read on until the guest has closed: a connection that is closed with bytes unread loses what was sent last."""
    hang_up(connection, socket.SHUT_WR)
    while await ready(connection, connection.recv, GREETING_BYTES):
        pass


class Door:
    """Listens on a thread at this machine's address, and serves each guest by the service that its greeting names.
    `say`: prints a line about each refused guest. `key`: None lets everybody in who knows the job."""

    def __init__(
        self, host: str, serve: Mapping[str, Serve], say: Callable[[str], None] = warned, key: Key | None = None
    ) -> None:
        self._serve, self._say, self._key = serve, Once(say), key
        self._listening = socket.create_server((host, 0), backlog=128)
        self.place = f"{host}:{self._listening.getsockname()[1]}"
        self._open: set[socket.socket] = set()  # served on threads, to be shut at the end
        self._loop = asyncio.new_event_loop()  # one thread reads all greetings
        self._entrance = Entrance(self._listening, self._loop, self._enter, key, self._say)
        self._thread = threading.Thread(target=self._run, name="lightning_decentral-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and close all connections. A guest that comes afterwards is refused by the system."""
        with suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()  # else a guest could still be let in, whose messages nobody would read
        for connection in list(self._open):
            hang_up(connection)

    def _run(self) -> None:
        with closing(self._loop), self._listening:
            self._loop.run_forever()
            self._loop.run_until_complete(self._entrance.close())

    async def _enter(self, guest: Guest) -> None:
        connection = guest.connection
        assert connection is not None
        if self._key is not None:
            secured = self._key.server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
            connection = guest.connection = secured
            await ready(connection, secured.do_handshake)
        wants = wanted(await first_of(partial(ready, connection, connection.recv)), *self._serve)
        self._open.add(connection)
        target = partial(self._served, connection, self._serve[wants])
        try:
            threading.Thread(target=target, name=f"lightning_decentral-{wants}", daemon=True).start()
        except RuntimeError as error:  # no thread can be started
            self._say("full", f"no connection can be served ({error}): raise `ulimit -u`; trying again")
            self._open.discard(connection)
            connection.close()

    def admit(self, connection: socket.socket) -> None:
        """Serve the other end of a connection that this end has made, on the calling thread."""
        connection.settimeout(GREETING_SECONDS)
        serve = self._serve[wanted(receive(connection), *self._serve)]
        self._open.add(connection)
        self._served(connection, serve)

    def _served(self, connection: socket.socket, serve: Serve) -> None:
        kept = False
        try:
            with suppress(OSError):
                peer = connection.getpeername()[0]
                connection.settimeout(GREETING_SECONDS)
                keeps_alive(connection)
                try:
                    kept = serve(connection) is True
                except (ValueError, KeyError, TypeError, MemoryError) as error:
                    why = str(error) if str(error)[20:] else f"{type(error).__name__}: {error}"
                    self._say(f"{peer} {why}", f"shut out {peer}: {why}")
                    connection.sendall(frame({"refused": why}))
        finally:
            self._open.discard(connection)
            if not kept:
                connection.close()


def hang_up(connection: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """End a connection of which another thread may be reading or writing; only that one may close it."""
    with suppress(OSError):
        socket.socket.shutdown(connection, how)  # a TLS connection's own `shutdown` would go on in plain text
