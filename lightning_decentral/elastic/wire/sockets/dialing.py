"""Connections to other members: one outgoing connection to the lobby is enough. A way from A to B has a state:

    dialing    A connects to B's address                     open, or calling if there is no answer
    calling    A sends a call to the lobby, the lobby to B   B dials A's address: open; if it can't, the lobby: relayed
    open       A sends, whichever end has connected          until it ends; B's address, once reached, isn't called
    relayed    A and B have connected to the lobby, which passes on what they send; it has the key, too
    lost       B isn't at the lobby, or nobody answers in time: OSError, and a later message begins anew

B answers a call on its own thread, and serves what A then asks for as if A had connected."""

import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightning_decentral.elastic.wire.sockets.door import Door, hang_up
from lightning_decentral.elastic.wire.sockets.frames import connected, frame, greet, receive
from lightning_decentral.elastic.wire.sockets.keys import Key

DIRECT_SECONDS = 2.5  # seconds in which an address must answer; a lost first packet is sent again after one
CALL_SECONDS = 10.0  # seconds until a call is answered: B tries A's address first
RELAYED = {"relayed": True}


class Dialer:
    """Connects to members, directly or by a call. `key`: None where the run has none; `lobby`: its address (host:port)
    where calls are possible."""

    door: Door  # this member's own

    def __init__(self, key: Key | None = None, lobby: str = "", there: Callable[[], bool] = lambda: True) -> None:
        self.key, self._lobby, self._there = key, lobby, there  # `there`: whether the lobby is reached
        self.direct: dict[str, bool] = {}  # {address: whether it answers}, as far as known
        self._calls: dict[str, list[socket.socket]] = {}  # {ticket: the call, then the connection that answers it}

    def __call__(self, to: str, place: str, wants: str, seconds: float) -> socket.socket:
        """Connect to the member of this name and address for a service. OSError if it isn't reached,
        ConnectionRefusedError if its process has ended."""
        known = self.direct.get(place)
        if known is False and (made := self._by_call(to, wants, seconds)):
            return made
        try:
            made = connected(place, wants, seconds if known else min(seconds, DIRECT_SECONDS), self.key)
            self.direct[place] = True
        except OSError:
            if known is not None or not (made := self._by_call(to, wants, seconds)):
                raise
            self.direct[place] = False
        return made

    def _by_call(self, to: str, wants: str, seconds: float) -> socket.socket | None:
        if not (self._lobby and self._there()):
            return None
        try:
            call = connected(self._lobby, "call", seconds, self.key)
        except OSError:
            return None
        ticket, made = secrets.token_hex(16), None
        self._calls[ticket] = [call]
        with suppress(OSError, ValueError):  # the lobby doesn't know it, or `arrives` hung up
            call.settimeout(CALL_SECONDS)
            call.sendall(frame({"to": to, "place": self.door.place, "ticket": ticket}))
            made = call if receive(call) == RELAYED else None
        _, *arrived = self._calls.pop(ticket)
        if made is None:
            call.close()
            made = arrived[0] if arrived else None
        if made is not None:
            made.settimeout(seconds)
            greet(made, wants)
        return made

    def arrives(self, connection: socket.socket) -> bool:
        """Take the connection of a member that was called."""
        waiting = self._calls.get(receive(connection))
        if waiting is None:
            raise ValueError("an answer to a call that isn't waited for")
        waiting.append(connection)
        hang_up(waiting[0])
        return True

    def called(self, call: Any) -> None:
        """Answer a member that can't connect here, and serve it on this thread until it ends."""
        place, made = str(call["place"]), None
        if self.direct.get(place) is not False:
            with suppress(OSError):
                made = connected(place, "called", DIRECT_SECONDS, self.key)
            self.direct[place] = made is not None
        with suppress(OSError, ValueError), made or connected(self._lobby, "called", CALL_SECONDS, self.key) as answer:
            answer.sendall(frame(str(call["ticket"])))
            self.door.admit(answer)
