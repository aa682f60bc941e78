"""Lobby client: a worker's thread that sends heartbeats, takes the lobby's updates, and lets rounds begin.

Heartbeats have their own connection, so that they never wait behind other messages."""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from lightning_decentral.elastic.plan.member_state import Act, Fetch, MemberState, Send
from lightning_decentral.elastic.plan.messages import Heartbeat, LobbyUpdate, read_message
from lightning_decentral.elastic.plan.view import Times, View
from lightning_decentral.elastic.wire.sockets import clock
from lightning_decentral.elastic.wire.sockets.door import Once, hang_up, warned
from lightning_decentral.elastic.wire.sockets.frames import Frames, Refused, connected, frame, readable
from lightning_decentral.elastic.wire.sockets.keys import Key, WrongKey

READ_BYTES = 1 << 16
Step = Callable[[MemberState, float], tuple[MemberState, list[Act]]]


class LobbyClient:
    """Runs a `MemberState` on the clock and a connection to the lobby."""

    def __init__(
        self,
        name: str,  # name of this start of this worker, which no other start has
        place: str,  # "host:port" at which other members reach this worker
        lobby: str,  # "host:port"
        fetch: Callable[[str, str], None],  # fetches from (donor, address), as long as no other donor was chosen
        ask: Callable[[str, Heartbeat], None],  # sends a beat to the member of this name
        times: Times | None = None,
        changed: threading.Condition | None = None,  # notified when the state changes; None: makes a new one
        say: Callable[[str], None] = warned,  # prints a line if the lobby isn't reached or refuses this worker
        key: Key | None = None,
        called: Callable[[Any], None] = lambda call: None,  # answers a member that can't connect to this one
    ) -> None:
        self.refused = ""  # why the lobby refuses this worker; empty: it doesn't, or hasn't answered
        self.trouble = ""  # why the lobby isn't reached; empty: it is reached
        self._say = Once(say)
        self.changed = changed or threading.Condition()
        self.state = MemberState(Heartbeat(name, 0, place), times or Times())
        self.lobby, self._key, self._fetch, self._ask, self._called = lobby, key, fetch, ask, called
        self._turn = threading.Lock()  # a TLS connection can't be read and written at a time
        self._connection: socket.socket | None = None
        self._frames = Frames()
        self._ended = self._answered = False  # whether this connection has brought an answer
        self._thread = threading.Thread(target=self._run, name="lightning_decentral-membership", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def step(self, step: Step) -> None:
        """Replace the state by what `step` makes of it and the time, and carry out the resulting actions."""
        with self.changed:
            self.state, acts = step(self.state, clock.now())  # pure: nothing is sent under the lock
            self.changed.notify_all()
        for act in acts:
            match act:
                case Send("", beat):
                    self._send(beat)
                case Send(to, beat):
                    _apart(self._ask, to, beat)
                case Fetch(donor, place):
                    _apart(self._fetch, donor, place)

    def begin(self, pace: float, seconds: float, at_least: int = 0) -> tuple[View, int]:
        """Wait until a round may begin, and return (view, round). TimeoutError, with the reason, after `seconds`.
        `pace`: the seconds that a round takes (0: unknown). Rounds before `at_least` are skipped."""
        end = clock.now() + seconds
        with self.changed:
            while True:
                now, state = clock.now(), self.state
                round = max(state.mine.round, at_least)  # late workers of asynchronous rounds skip some
                view = state.view_of(round)
                if view is not None and not state.waits(now):
                    self.state = state.begins(round, pace)  # under the lock: no update comes between
                    return view, round
                if now > end or state.out:
                    raise TimeoutError(state.waits(now))
                self.changed.wait(min(state.times.beat, max(0.0, end - now)))

    def sure(self, seconds: float) -> None:
        """Wait until it is sure that the run didn't continue without this worker. TimeoutError if it did, or if that is
        still in doubt after `seconds`."""
        end = clock.now() + seconds
        with self.changed:
            while why := self.state.doubts(now := clock.now()):
                if now > end or self.state.out:
                    raise TimeoutError(why)
                self.changed.wait(min(self.state.times.beat, max(0.0, end - now)))

    def leave(self) -> None:
        """Announce to the lobby that this worker leaves, and end the thread."""
        self._end()
        self.step(lambda state, now: state.leaving(now))
        if self._connection is not None:
            with suppress(OSError):  # until the lobby has read it: a connection closed with messages unread loses it
                hang_up(self._connection, socket.SHUT_WR)
                while self._connection.recv(READ_BYTES):
                    pass
        self._hang_up()

    def close(self) -> None:
        """End the thread without an announcement."""
        self._end()
        self._hang_up()

    def _end(self) -> None:
        self._ended = True  # the thread sees it within a quarter of a beat
        self._thread.join()

    def _run(self) -> None:
        while not self._ended:
            self.step(lambda state, now: state.ticked(now))
            self._listen(self.state.times.beat / 4)  # often enough for beats that are due

    def _listen(self, seconds: float) -> None:
        if (connection := self._connection) is None:
            time.sleep(seconds)
            return
        try:
            if not readable(connection, seconds):
                return
            with self._turn:
                more = connection.recv(READ_BYTES)
            for found in self._frames.feed(more):
                self._take(found)
        except TimeoutError:
            return
        except (OSError, ValueError) as error:
            self._is_amiss(error)
            more = b""
        if not more:  # the lobby has ended, or closed the connection
            answered, self._answered = self._answered, False
            self._hang_up()
            if answered and not self._ended:  # not again and again where the lobby refuses this worker
                self.step(lambda state, now: state.reconnects(now))

    def _take(self, found: Any) -> None:
        if type(found) is dict and set(found) == {"call"}:
            _apart(self._called, found["call"])
            return
        update = read_message(LobbyUpdate, found)
        self.refused, self.trouble, self._answered = "", "", True
        self.step(lambda state, now: state.notified(update, now))

    def _send(self, beat: Heartbeat) -> None:
        try:
            with self._turn:
                if self._connection is None:
                    self._frames = Frames()  # an incomplete frame of the earlier connection is dropped
                    self._connection = connected(self.lobby, "lobby", self.state.times.beat, self._key)
                self._connection.settimeout(self.state.times.beat)
                self._connection.sendall(frame(asdict(beat)))
        except OSError as error:
            self._is_amiss(error)
            self._hang_up()

    def _is_amiss(self, error: Exception) -> None:
        """Record that the lobby gave no answer or a wrong one, and wake the waiting threads."""
        with self.changed:
            self.trouble = f"the lobby at {self.lobby} isn't reached: {error}"
            if type(error) is Refused:
                self.refused = f"the lobby at {self.lobby} refuses this worker: {error}"
            elif isinstance(error, WrongKey):
                self.refused = f"the lobby refuses this worker: {error}"
            elif isinstance(error, ValueError):
                self.refused = f"the program at {self.lobby} is no lobby of this version: {error}"
            self.changed.notify_all()
        self._say(self.trouble.partition(": ")[0], f"{self.refused or self.trouble}; trying again")

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            hang_up(connection)
            connection.close()


def _apart(act: Callable[..., None], *args: Any) -> None:
    """Begin an act on a thread, as one towards a lost member must not delay the heartbeats to others."""
    threading.Thread(target=act, args=args, name="lightning_decentral-acts", daemon=True).start()
