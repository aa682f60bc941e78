"""Network side of one elastic worker: its lobby client, its connections to members, its state transfer.

worker = Endpoint("10.0.0.1:29400", "10.0.0.7")
worker.founds()                              whether this worker founds the run; then `as_founded` during set-up
value = worker.healed()                      the run's training state; None: the run begins with this worker's own
while training:
    view, round = worker.begin(pace, copy)   then a step, and a round over the members of the view
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from lightning_decentral.elastic.plan.messages import Heartbeat, read_message
from lightning_decentral.elastic.plan.view import Times, View, name_of, place_of, shown, waiting_at
from lightning_decentral.elastic.wire.collective import Collective
from lightning_decentral.elastic.wire.lobby_client import LobbyClient
from lightning_decentral.elastic.wire.sockets.dialing import Dialer
from lightning_decentral.elastic.wire.sockets.door import Once
from lightning_decentral.elastic.wire.sockets.frames import connected, frame, receive
from lightning_decentral.elastic.wire.sockets.keys import Key
from lightning_decentral.elastic.wire.sockets.mesh import Mesh
from lightning_decentral.elastic.wire.starter import STARTER
from lightning_decentral.elastic.wire.state_transfer import Donor, fetched

AGAIN_SECONDS = 0.05  # seconds between two requests for an open decision
Refuses = Callable[[Any], str]  # returns why a member's state can't be used; empty: it can


class Endpoint:
    """One start of one worker, under a name that no other start has."""

    def __init__(
        self,
        lobby: str,  # "host:port"
        host: str,  # the address at which other workers reach this machine
        times: Times | None = None,  # until the lobby sends its own
        title: str = "",  # prefix of the worker's name
        weight: int = 1,  # weight of its batches, part of its name
        refuses: Refuses = lambda value: "",  # checks the donor's state before this worker becomes a member
        key: Key | None = None,
    ) -> None:
        self._donor, self._refuses, self._refused = Donor(self._given), refuses, ""
        self._set_up = threading.Event()  # no state is fetched before it is set
        changed = threading.Condition()  # one for all parts: any change wakes every waiter
        self._dial = Dialer(key, lobby, lambda: not self.lobby_client.trouble)
        self.collective = Collective("", place_of, self._dial)
        served = {"heal": self._donor.serve, "beat": self._met, "meet": self.collective.serve}
        self.mesh = Mesh(host, "", {**served, "refuse": self._report_refused}, changed, self._dial)
        name = name_of(title, secrets.token_hex(4), weight, self.mesh.place)  # a new token at each start
        self.name = self.mesh.name = self.collective.name = name
        given = self._fetch, self._ask, times, changed
        self.lobby_client = LobbyClient(self.name, self.mesh.place, lobby, *given, key=key, called=self._dial.called)
        self._value: Any = None
        self._view: View | None = None
        self._failed = ""
        self._say = Once()
        self._speaks = STARTER not in os.environ  # a starter prints the lobby's lines itself
        self.lobby_client.start()  # last: its updates use all of the above

    def founds(self, seconds: float) -> bool:
        """Wait until it is known whether the run begins with this worker's parameters. Errors as `healed`."""
        self._until(lambda: bool(self.lobby_client.state.mine.origin or self.lobby_client.state.mine.donor), seconds)
        return bool(self.lobby_client.state.mine.origin)

    def as_founded(self, value: Any, seconds: float) -> Any:
        """Return in the n-th call the founder's n-th value (on the founder `value` itself). TimeoutError if it isn't
        received within `seconds`."""
        begun, end = self.collective.begun, time.monotonic() + seconds
        while not (mine := self.lobby_client.state.mine).origin:
            if mine.donor:
                found, given, over = self.collective.found(mine.donor, ("begun", len(begun)))
                value = given if found else value
                if found or over:  # can't be sent: every worker uses its own value
                    break
            if why := self.lobby_client.state.out:
                raise ValueError(why)
            if time.monotonic() > end:
                raise TimeoutError(f"{shown(mine.donor) or 'no member'} didn't send the founder's settings in time")
            time.sleep(AGAIN_SECONDS)
        begun.append(value)
        return value

    def healed(self, seconds: float) -> Any:
        """Wait for the donor's training state, after set-up; None if the run begins with this worker's own.
        TimeoutError if no member sends it within `seconds`. ValueError if the lobby refuses this worker, or the
        worker can't use the state."""
        self.collective.set_up = True  # a worker that asks for more values uses its own from now on
        self._set_up.set()
        self._until(lambda: bool(self.lobby_client.state.mine.origin), seconds)
        value, self._value = self._value, None  # so that the caller can free the memory
        return value

    def _until(self, holds: Callable[[], bool], seconds: float) -> None:
        lobby, soon = self.lobby_client, min(seconds, self.lobby_client.state.times.dead_after)
        for last, limit in ((False, soon), (True, seconds - soon)):
            with lobby.changed:
                if lobby.changed.wait_for(lambda: holds() or lobby.refused or self._refused or lobby.state.out, limit):
                    break
            donor = lobby.state.mine.donor
            heals = f"{shown(donor) if donor else 'no member'} hasn't sent this worker the run's state"
            why = lobby.trouble or self._failed or lobby.state.paused or heals
            if last:
                raise TimeoutError(why)
            self._say(why, waiting_at(lobby.lobby, why))  # a worker started by hand may see no lobby's lines
        if self._refused or not holds():
            raise ValueError(self._refused or lobby.refused or lobby.state.out)

    def begin(self, pace: float, copy: Callable[[], Any], seconds: float, at_least: int = 0) -> tuple[View, int]:
        """Begin the next round, not before `at_least`; return (view, round). The caller is between two steps: newcomers
        get a `copy` of its state then. TimeoutError as in `LobbyClient.begin`."""
        began = time.monotonic()
        while True:
            self._donor.between_steps(copy)  # also while this worker waits, perhaps for that newcomer
            try:
                view, round = self.lobby_client.begin(pace, self.lobby_client.state.times.beat, at_least)
            except TimeoutError as error:
                if self.lobby_client.state.out or time.monotonic() > began + seconds:
                    raise
                soon = self._view is None and self._speaks
                if soon or time.monotonic() > began + self.lobby_client.state.times.dead_after:
                    self._say(str(error), waiting_at(self.lobby_client.lobby, str(error)))
                continue
            self.mesh.begins(round)
            if self._view is not None and self._view != view:
                self.mesh.forget(set(self._view.members).difference(view.members))
            if self._view != view and self._speaks and (self._view is None or view.members[0] == self.name):
                state = self.lobby_client.state
                self._say(f"view {view.number}", view.line(state.ended, state.times.dead_after))
            self._view = view
            return view, round

    def leave(self) -> None:
        """Leave the run, so that no member waits for this worker."""
        self.collective.close()  # first, as results that others wait for need the connections
        self.lobby_client.leave()
        self.mesh.close()

    def _given(self) -> tuple[str, int] | None:
        state = self.lobby_client.state
        return (state.mine.origin, state.mine.round) if state.serves else None

    def _report_refused(self, connection: socket.socket) -> None:
        who, _, why = str(receive(connection)).partition(": ")
        self._say(why, f"worker {shown(who)} can't join: {why}")

    def _met(self, connection: socket.socket) -> None:
        found = read_message(Heartbeat, receive(connection))
        self.lobby_client.step(lambda state, now: state.met(found, now))
        if found.asks and not self.lobby_client.state.out:  # answered here, too: its sender may not be reached
            connection.sendall(frame(asdict(replace(self.lobby_client.state.mine, asks=False))))

    def _fetch(self, donor: str, place: str) -> None:
        self._set_up.wait()  # a member that isn't set up would delay the others
        if self.lobby_client.state.mine.donor != donor:
            return
        try:
            value, origin, round = fetched(place, self.lobby_client.state.times.dead_after, partial(self._dial, donor))
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._failed = f"fetching the run's state from {shown(donor)} failed: {error}"
            self._say(self._failed, self._failed)
            self.lobby_client.step(lambda state, now: state.failed(donor, now))
            return
        refused = self._refuses(value)
        if refused:  # the donor may wait for this worker: send it why this one can't join
            with suppress(OSError), self._dial(donor, place, "refuse", 1.0) as connection:
                connection.sendall(frame(f"{self.name}: {refused}"))
        with self.lobby_client.changed:
            if refused:
                self._refused = refused
                self.lobby_client.changed.notify_all()
            elif self.lobby_client.state.mine.donor == donor:  # the lobby may have chosen another donor meanwhile
                self._value = value
                self.lobby_client.step(lambda state, now: state.fetched(donor, origin, round, now))

    def _ask(self, to: str, beat: Heartbeat) -> None:
        with suppress(OSError, ValueError), connected(place_of(to), "beat", 1.0, self._dial.key) as connection:
            connection.sendall(frame(asdict(beat)))
            if beat.asks:
                self._met(connection)
