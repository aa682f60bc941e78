"""Server of the lobby: answers heartbeats on one connection per worker. It writes no file, and may be killed."""

import asyncio
import platform
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from lightning_decentral.elastic.plan.lobby_state import LobbyState, Outgoing
from lightning_decentral.elastic.plan.messages import Heartbeat, read_message
from lightning_decentral.elastic.plan.view import Bounds, Times, waiting_at
from lightning_decentral.elastic.wire.sockets import clock
from lightning_decentral.elastic.wire.sockets.dialing import CALL_SECONDS, RELAYED
from lightning_decentral.elastic.wire.sockets.door import GREETING_SECONDS, Entrance, Guest, Once
from lightning_decentral.elastic.wire.sockets.frames import LARGEST_BYTES, first_of, frame, keeps_alive, wanted
from lightning_decentral.elastic.wire.sockets.keys import Key

READ_BYTES = 1 << 16
SILENT_TIMES = 10  # multiple of `dead_after` after which a silent guest is disconnected
UNREAD_BYTES = 1 << 18
"""Bytes that a worker may leave unread before the lobby skips updates for it; later updates contain the earlier."""


class LobbyServer:
    """Serves a `LobbyState`. `say` is called with a line for each view, and once for each reason why a host's guests
    are refused. `settled`: no run can have begun at an earlier lobby, so the lobby needn't wait for its members."""

    def __init__(
        self,
        bounds: Bounds,
        times: Times,
        say: Callable[[str], None],
        settled: bool = False,
        key: Key | None = None,  # None lets everybody in who knows the job
    ) -> None:
        self._lobby, self._say = LobbyState(bounds, times, clock.now(), settled=settled), say
        self._say_once, self._key = Once(say), key
        self._guests: dict[str, asyncio.StreamWriter] = {}
        # {ticket of a call: (its caller, who answers it by a connection of its own)}
        self._calls: dict[str, tuple[asyncio.StreamWriter, asyncio.Future[asyncio.StreamWriter]]] = {}
        self._paused = self._place = ""
        self._members: tuple[str, ...] = ()

    async def serve(self, host: str, port: int, ready: Callable[[int], None] = lambda port: None) -> None:
        """Serve until cancelled; `ready` is called with the port when it listens. OSError where it can't."""
        loop = asyncio.get_running_loop()  # one thread: states change one after the other
        with socket.create_server((host, port), backlog=128) as listening:
            entrance = Entrance(listening, loop, self._enter, self._key, self._say_once)
            port = listening.getsockname()[1]
            self._place = f"{platform.node() if host in ('', '0.0.0.0') else host}:{port}"
            ready(port)
            try:
                while True:
                    await asyncio.sleep(self._lobby.times.beat)
                    self._tick()
            finally:
                await entrance.close()

    def _tick(self) -> None:
        self._next(*self._lobby.ticked(clock.now()))

    def members(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return (known members of all views, members of the highest view that haven't left). Thread-safe."""
        return self._members, self._lobby.stayed

    async def _enter(self, guest: Guest) -> None:
        (raw, guest.connection), secured = (guest.connection, None), self._key.server if self._key else None
        assert raw is not None
        keeps_alive(raw)  # a relayed connection may be silent for long
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(), self._guest)  # called after the handshake
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, raw, ssl=secured)

    async def _guest(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        services = {"lobby": self._listen, "call": self._pass_on, "called": self._relay}
        try:
            await services[wanted(await _soon(first_of(reader.read)), *services)](reader, writer)
        except (ValueError, KeyError, TypeError) as error:
            host = (writer.get_extra_info("peername") or ("?",))[0]
            self._say_once(f"{host} {error}", f"refused {host}: {error}")
            writer.write(frame({"refused": str(error)}))
        except OSError:
            pass  # the guest connects again, or falls silent
        finally:
            for name in [name for name, other in self._guests.items() if other is writer]:
                del self._guests[name]
                self._lobby = self._lobby.hung_up(name)  # counts as lost after `times.ended` seconds of silence
                asyncio.get_running_loop().call_later(1.01 * self._lobby.times.ended, self._tick)
            writer.close()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seconds = GREETING_SECONDS
        while True:  # until the guest has gone
            beat = read_message(Heartbeat, await _soon(first_of(reader.read, LARGEST_BYTES), seconds))
            self._guests[beat.sender] = writer  # the newest connection of that name
            self._next(*self._lobby.received(beat, clock.now()))
            seconds = SILENT_TIMES * self._lobby.times.dead_after

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass a member's call on to another one (`sockets.dialing`); if that one answers here, relay what it sends."""
        call = await _soon(first_of(reader.read))
        called, ticket = self._guests.get(call["to"]), str(call["ticket"])
        if called is None:
            return
        self._calls[ticket] = writer, asyncio.get_running_loop().create_future()
        called.write(frame({"call": {"place": str(call["place"]), "ticket": ticket}}))
        try:
            answer = await asyncio.wait_for(self._calls[ticket][1], CALL_SECONDS)
        except asyncio.TimeoutError:
            self._calls.pop(ticket, None)  # its caller was answered directly, or not at all
        else:
            writer.write(frame(RELAYED))
            await _relayed(reader, answer)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay what the one who was called sends to its caller."""
        caller, answered = self._calls.pop(str(await _soon(first_of(reader.read))))
        answered.set_result(writer)
        await _relayed(reader, caller)

    def _next(self, lobby: LobbyState, updates: Outgoing) -> None:
        before, self._lobby = self._lobby.view, lobby
        if lobby.view is not None and lobby.view != before:
            self._say(lobby.view.line(lobby.ended, lobby.times.dead_after))
            there = {*lobby.guests, *lobby.members}
            self._members = tuple(dict.fromkeys(n for n in (*self._members, *lobby.members) if n in there))
        for name, update in updates:
            writer = self._guests.get(name)
            if writer and writer.transport.get_write_buffer_size() < UNREAD_BYTES:
                writer.write(frame(asdict(update)))
            if update.paused not in ("", self._paused) and lobby.stayed:  # otherwise all have ended, and none waits
                self._say(waiting_at(self._place, update.paused))
            self._paused = update.paused


async def _soon(awaited: Coroutine[Any, Any, Any], seconds: float = GREETING_SECONDS) -> Any:
    try:
        return await asyncio.wait_for(awaited, seconds)
    except asyncio.TimeoutError:
        raise ValueError("a guest that sends nothing") from None


async def _relayed(reader: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
    """Pass on bytes until either end has gone; a slow reader slows down the sender."""
    try:
        while more := await reader.read(READ_BYTES):
            to.write(more)
            await to.drain()
    finally:
        to.close()


def serve(
    bounds: Bounds, times: Times, host: str, port: int, ready: Callable[[int], None], key: Key | None = None
) -> None:
    """Run a lobby until Ctrl-C or SIGTERM. OSError if another program uses the port."""
    with suppress(KeyboardInterrupt):
        server = LobbyServer(bounds, times, partial(print, flush=True), key=key)
        asyncio.run(server.serve(host, port, ready))
