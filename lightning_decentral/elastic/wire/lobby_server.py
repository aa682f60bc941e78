"""Server of the lobby: answers heartbeats on one connection per worker. It writes no file, and may be killed."""

import asyncio
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial

from lightning_decentral.elastic.plan.lobby_state import LobbyState, Outgoing
from lightning_decentral.elastic.plan.messages import Heartbeat, read_message
from lightning_decentral.elastic.plan.view import Bounds, Times, waiting_at
from lightning_decentral.elastic.wire.sockets import clock
from lightning_decentral.elastic.wire.sockets.door import GREETING_SECONDS, Once
from lightning_decentral.elastic.wire.sockets.frames import (
    GREETING_BYTES,
    LARGEST_BYTES,
    Frames,
    frame,
    wanted,
)

READ_BYTES = 1 << 16
SILENT_TIMES = 10  # multiple of `dead_after` after which a silent guest is disconnected
UNREAD_BYTES = 1 << 18
"""Bytes that a worker may leave unread before the lobby skips updates for it; later updates contain the earlier."""


class LobbyServer:
    """Serves a `LobbyState`. `say` is called with a line for each view, and once for each reason why a host's guests
    are refused. `settled`: no run can have begun at an earlier lobby, so the lobby needn't wait for its members."""

    def __init__(self, bounds: Bounds, times: Times, say: Callable[[str], None], settled: bool = False) -> None:
        self._lobby, self._say = LobbyState(bounds, times, clock.now(), settled=settled), say
        self._say_once = Once(say)
        self._guests: dict[str, asyncio.StreamWriter] = {}
        self._paused = self._place = ""
        self._members: tuple[str, ...] = ()

    async def serve(self, host: str, port: int, ready: Callable[[int], None] = lambda port: None) -> None:
        """Serve until cancelled; `ready` is called with the port when it listens. OSError where it can't."""
        server = await asyncio.start_server(self._guest, host, port)  # one thread: states change one after the other
        async with server:
            port = server.sockets[0].getsockname()[1]
            self._place = f"{platform.node() if host in ('', '0.0.0.0') else host}:{port}"
            ready(port)
            while True:
                await asyncio.sleep(self._lobby.times.beat)
                self._tick()

    def _tick(self) -> None:
        self._next(*self._lobby.ticked(clock.now()))

    def members(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return (known members of all views, members of the highest view that haven't left). Thread-safe."""
        return self._members, self._lobby.stayed

    async def _guest(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._listen(reader, writer)
        except ValueError as error:
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
        frames, greeted = Frames(GREETING_BYTES), False  # no more is read before the greeting
        end = clock.now() + GREETING_SECONDS  # a connection without a greeting occupies a descriptor
        while more := await self._more(reader, end):
            for found in frames.feed(more):
                if greeted:
                    beat = read_message(Heartbeat, found)
                    self._guests[beat.sender] = writer  # the newest connection of that name
                    self._next(*self._lobby.received(beat, clock.now()))
                else:
                    wanted(found, "lobby")
                    greeted, frames.most = True, LARGEST_BYTES
            if greeted:
                end = clock.now() + SILENT_TIMES * self._lobby.times.dead_after

    async def _more(self, reader: asyncio.StreamReader, end: float) -> bytes:
        try:
            return await asyncio.wait_for(reader.read(READ_BYTES), max(0.0, end - clock.now()))
        except asyncio.TimeoutError:
            raise ValueError("a guest that sends nothing") from None

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


def serve(bounds: Bounds, times: Times, host: str, port: int, ready: Callable[[int], None]) -> None:
    """Run a lobby until Ctrl-C or SIGTERM. OSError if another program uses the port."""
    with suppress(KeyboardInterrupt):
        asyncio.run(LobbyServer(bounds, times, partial(print, flush=True)).serve(host, port, ready))
