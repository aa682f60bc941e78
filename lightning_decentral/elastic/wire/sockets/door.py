"""A port at which guests are let in: who greets in time is served on a thread of its own, anybody else is shut out.

A guest without a greeting costs a descriptor for seconds, and no thread. Where descriptors run out, those go first,
and accepting goes on.
"""

import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from lightning_decentral.elastic.wire.sockets.frames import (
    GREETING_BYTES,
    LENGTH_BYTES,
    keeps_alive,
    message,
    refusal,
    size_of,
    wanted,
)

GREETING_SECONDS = 5.0  # seconds in which a guest greets, and in which it sends the first of what it wants
MOST_WAITING = 64  # guests that haven't greeted; one more, and the oldest goes
LOOK_SECONDS = 1.0  # seconds until it is seen that the door was closed, where the system doesn't report it
FULL_SECONDS = 0.1  # seconds until the next try to accept where descriptors have run out
LINES = 100  # number of refusals that are remembered, not to be printed again

Serve = Callable[[socket.socket], None]


def warned(line: str) -> None:
    print(f"lightning_decentral: {line}", file=sys.stderr, flush=True)


class Once:
    """Prints a line for each cause by `say`, once, however often it comes."""

    def __init__(self, say: Callable[[str], None] = warned) -> None:
        self._say, self._said = say, dict[str, None]()

    def __call__(self, cause: str, line: str) -> None:
        if cause not in self._said:
            self._said = dict.fromkeys([*self._said, cause][-LINES:])
            self._say(line)


class Greeting:
    """Greeting of one guest, as far as it has come."""

    def __init__(self, until: float) -> None:
        self.until, self._bytes = until, bytearray()

    def wants(self, connection: socket.socket, *known: str) -> str:
        """Read on, and return what the guest wants; nothing behind the greeting is read.

        Raises:
            BlockingIOError: it isn't whole yet.
            ValueError: this is no greeting.
            OSError: the connection has ended.
        """
        self._read(connection, LENGTH_BYTES)
        self._read(connection, LENGTH_BYTES + size_of(self._bytes[:LENGTH_BYTES], GREETING_BYTES))
        return wanted(message(self._bytes[LENGTH_BYTES:]), *known)

    def _read(self, connection: socket.socket, end: int) -> None:
        while len(self._bytes) < end:
            came = connection.recv(end - len(self._bytes))
            if not came:
                raise ConnectionResetError("the connection has ended")
            self._bytes += came


class Door:
    """Listens, on a thread, at the address at which others reach this machine; serves guests by what they want, and
    prints a line by `say` about one that is refused."""

    def __init__(self, host: str, serve: Mapping[str, Serve], say: Callable[[str], None] = warned) -> None:
        self._serve, self._say = serve, Once(say)
        self._listening = socket.create_server((host, 0), backlog=128)
        self._listening.setblocking(False)
        self.place = f"{host}:{self._listening.getsockname()[1]}"
        self._waiting: dict[socket.socket, Greeting] = {}  # by age, as dictionaries keep their order
        self._open: set[socket.socket] = set()  # served on threads, to be shut at the end
        self._closed = False
        threading.Thread(target=self._run, name="lightning_decentral-door", daemon=True).start()

    def close(self) -> None:
        """Let nobody in any more, and shut out who is."""
        self._closed = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes up the thread, which closes it
        for connection in list(self._open):
            shut(connection)

    def _run(self) -> None:
        with selectors.PollSelector() as selector:
            selector.register(self._listening, selectors.EVENT_READ)
            while not self._closed:
                first = min((greeting.until for greeting in self._waiting.values()), default=float("inf"))
                for key, _ in selector.select(min(LOOK_SECONDS, max(0.0, first - time.monotonic()))):
                    if key.fileobj is self._listening:
                        self._accept(selector)
                    else:
                        self._receive(selector, key.fileobj)  # type: ignore[arg-type]
                for late in [c for c, greeting in self._waiting.items() if greeting.until <= time.monotonic()]:
                    self._refuse(selector, late, "a guest that doesn't greet")
            for connection in list(self._waiting):
                self._drop(selector, connection)
            self._listening.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return  # it has gone meanwhile
        except OSError as error:
            if not self._closed:
                self._say("full", f"no guest can be let in ({error}): raise `ulimit -n`; trying again")
                for waiting in list(self._waiting):
                    self._drop(selector, waiting)
                time.sleep(FULL_SECONDS)
            return
        if len(self._waiting) >= MOST_WAITING:
            self._refuse(selector, next(iter(self._waiting)), "a guest that doesn't greet, of too many")
        connection.setblocking(False)  # one thread reads all greetings
        self._waiting[connection] = Greeting(time.monotonic() + GREETING_SECONDS)
        selector.register(connection, selectors.EVENT_READ)

    def _receive(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        if connection not in self._waiting:
            return
        try:
            wants = self._waiting[connection].wants(connection, *self._serve)
        except ValueError as error:
            self._refuse(selector, connection, str(error))
        except BlockingIOError:
            return
        except OSError:
            self._drop(selector, connection)
        else:
            selector.unregister(connection)
            del self._waiting[connection]  # it is its thread's now
            self._let_in(connection, wants)

    def _let_in(self, connection: socket.socket, wants: str) -> None:
        self._open.add(connection)
        target = partial(self._served, connection, self._serve[wants])
        try:
            threading.Thread(target=target, name=f"lightning_decentral-{wants}", daemon=True).start()
        except RuntimeError as error:  # no thread can be started: as no descriptor
            self._say("full", f"no guest can be let in ({error}): raise `ulimit -u`; trying again")
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
                    connection.sendall(refusal(why))
        finally:
            self._open.discard(connection)

    def _refuse(self, selector: selectors.BaseSelector, connection: socket.socket, why: str) -> None:
        with suppress(OSError):
            peer = connection.getpeername()[0]
            self._say(f"{peer} {why}", f"refused {peer}: {why}")
            connection.send(refusal(why))
        self._drop(selector, connection)

    def _drop(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        selector.unregister(connection)
        del self._waiting[connection]
        connection.close()


def shut(connection: socket.socket | None) -> None:
    if connection is None:
        return
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
