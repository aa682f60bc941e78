"""State of the lobby: which workers live, may train together, and send their state to newcomers. Steps don't need it.

    received(beat, now), ticked(now) -> the next state, and a message for each of these workers

The lobby may end at any moment, as its workers' heartbeats contain its whole state. A lobby that is started again waits
until it has heartbeats of all members of the highest view, or for `dead_after` seconds, and continues from there."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from lightning_decentral.elastic.plan.messages import Heartbeat, LobbyUpdate
from lightning_decentral.elastic.plan.view import Bounds, Times, View

Outgoing = list[tuple[str, LobbyUpdate]]


class Guest(NamedTuple):
    """A worker's last heartbeat, and the time at which it came."""

    beat: Heartbeat
    at: float


@dataclass(frozen=True)
class LobbyState:
    """The lobby's state, a value: its methods return the next state. A worker's possible states are:

    left         its last heartbeat announced that it leaves
    lives        hasn't left, and wasn't silent for `dead_after` (for `ended`, where its connection has ended)
    dead         left, or was silent for longer: while the lobby itself may be cut off, for `minority`
    alive        members that live;  `stayed`: those that haven't left, silent ones, too
    ready        guests that live, have the run's parameters and wait to be members
    dismissed    was in a view before the one agreed on, and isn't in that
    out          is dismissed or behind, or has parameters of another run"""

    bounds: Bounds
    times: Times
    began: float  # when it was started
    guests: Mapping[str, Guest] = field(default_factory=dict)  # last heartbeats by name, in the order of arrival
    view: View | None = None  # the highest view (numbered membership) made so far
    agreed: int = 0  # number of the highest view that may be in force
    seen: int = 0  # the highest number of a view that any worker knew
    # Members of earlier views only, for ever: they may return under new names. One that slept may have been forgotten.
    dismissed: frozenset[str] = frozenset()
    origin: str = ""  # name of the worker that founded the run; empty: none yet
    came: float = 0.0  # when the last new guest came
    doubted: float = float("-inf")  # when the lobby last had heartbeats of half of the members or fewer
    settled: bool = False  # whether it has met all members of the highest view, or waited for them
    ended: frozenset[str] = frozenset()  # guests whose connection has ended and hasn't come back

    def received(self, beat: Heartbeat, now: float) -> tuple["LobbyState", Outgoing]:
        """Take a heartbeat: return the next state, and a `LobbyUpdate` for the sender, or for all after a new view."""
        known = self.guests.get(beat.sender)
        if known and known.beat.count >= beat.count:
            return self, []
        guests = {**self.guests, beat.sender: Guest(beat, now)}
        state = replace(self._doubting(now), guests=guests, came=self.came if known else now)
        state = replace(state, ended=self.ended - {beat.sender})._learnt(beat)._decided(now)
        receivers = state.guests if (state.view, state.agreed) != (self.view, self.agreed) else [beat.sender]
        return state, [(name, state.update_for(name, now)) for name in receivers]

    def hung_up(self, name: str) -> "LobbyState":
        """Record that a guest's connection has ended; its process probably, too, unless it connects again soon."""
        return replace(self, ended=self.ended | {name}) if name in self.guests else self

    def ticked(self, now: float) -> tuple["LobbyState", Outgoing]:
        """Advance the time without a message. Call this every `times.beat` seconds."""
        state = self._doubting(now)._forgotten(now)._decided(now)
        changed = (state.view, state.agreed) != (self.view, self.agreed)
        return state, [(name, state.update_for(name, now)) for name in state.guests if changed]

    def _doubting(self, now: float) -> "LobbyState":
        """Record when half of the members or more are silent: the lobby itself may have slept or been cut off. Then the
        first members to return don't continue without the others."""
        stay, size = self._counted(now)
        return replace(self, doubted=now) if size > 0 and 2 * stay <= size else self

    def _learnt(self, beat: Heartbeat) -> "LobbyState":
        """Learn the highest view and the run's founder from a heartbeat, as a restarted lobby must."""
        view = self.view
        for other in (beat.view, beat.coming):
            if other and (view is None or other.number > view.number):
                view = other
        agreed = max(self.agreed, beat.view.number if beat.view else 0)
        origin = view.origin if view else self.origin or beat.origin
        seen = max(self.seen, beat.seen, view.number if view else 0)
        return replace(self, view=view, agreed=agreed, seen=seen, origin=origin)

    def _forgotten(self, now: float) -> "LobbyState":
        """Forget silent guests that aren't members: their names are never used again."""
        members = self.members
        kept = {n: g for n, g in self.guests.items() if n in members or self._silent(n, now) <= self.times.dead_after}
        # The founder may have died before another worker had its parameters.
        origins = [guest.beat.origin for name, guest in kept.items() if guest.beat.origin and not self._left(name)]
        origin = self.origin if self.seen or self.origin in origins else next(iter(origins), "")
        return replace(self, guests=kept, origin=origin, ended=self.ended.intersection(kept))

    def _decided(self, now: float) -> "LobbyState":
        """Update whether the lobby is settled, then which view is agreed, then make a next view if needed."""
        known = self.view is not None and self.guests.keys() >= set(self.members)
        settled = self.settled or known or now - self.began > self.times.dead_after
        state = replace(self, settled=settled)._confirmed(now)
        if not state.settled or (state.view and state.agreed < state.view.number):
            return state
        following = state._following(now)
        return replace(state, view=following)._confirmed(now) if following else state

    def _confirmed(self, now: float) -> "LobbyState":
        """Let the highest view come into force once enough members of the previous view know it, from whom later
        workers, and a restarted lobby, learn of it."""
        if self.view is None:
            return self
        before = [name for name in self.view.before if not self._left(name)]
        beats = [self.guests[name].beat for name in before if name in self.guests]
        know = sum(self.view in (beat.view, beat.coming) for beat in beats)
        stay = sum(self._lives(name, now) for name in before if name in self.view.members)
        if 2 * know <= len(before) and know < max(stay, self.bounds.needed(len(before))):
            return self
        gone = frozenset(self.view.before) - frozenset(self.view.members)
        return replace(self, agreed=self.view.number, dismissed=self.dismissed | gone)

    def _following(self, now: float) -> View | None:
        """Return the next view; None if the present one stays."""
        wanted = (self.alive(now) + self.ready(now))[: self.bounds.most]
        if self.view is None:
            waited = now - self.came > self.times.dead_after and len(wanted) >= self.bounds.least
            # If a view was seen, its members may still train: their newcomers must not found another run.
            begins = not self.seen and (waited or len(wanted) == self.bounds.most)
            return View(1, wanted, 0, wanted, self.origin, len(wanted)) if begins else None
        # More than half of the last view may follow at once, fewer once the missing have long been silent.
        stay, size = self._counted(now)
        certain = stay > 0 and all(self._dead(name, now) for name in self.members if name not in wanted)
        if wanted == self.members or not certain or not self.bounds.may_follow(stay, size, len(wanted)):
            return None
        last, left = self.view, tuple(name for name in self.members if name not in wanted and self._left(name))
        return View(last.number + 1, wanted, self._first_round(now), last.members, self.origin, last.founders, left)

    def _first_round(self, now: float) -> int:
        """Return the round in which a next view begins, so far ahead that all members know of the view by then."""
        guests = [guest for name, guest in self.guests.items() if name in self.members]
        # The median of all: members wait for each other, and a single outlier would be far ahead.
        pace = median([guest.beat.pace for guest in guests if guest.beat.pace] or [0.0])
        ahead, times = [self.view.first_round + 1 if self.view else 1], self.times
        trips = [guest.beat.trip for guest in guests]
        trip = max(trips, default=0.0) if all(trips) else 0.0
        for guest in guests:
            since = times.rounds_in(min(now - guest.at, times.beat), pace)
            ahead.append(guest.beat.round + since + times.rounds_ahead(pace, trip))
        return max(ahead)

    def _counted(self, now: float) -> tuple[int, int]:
        """Return (number of live members, number of members that haven't left) of the last agreed view."""
        last = self.members if self.view is None or self.agreed == self.view.number else self.view.before
        members = [name for name in last if not self._left(name)]
        return sum(self._lives(name, now) for name in members), len(members)

    @property
    def members(self) -> tuple[str, ...]:
        """Members of the highest view, the oldest first."""
        return self.view.members if self.view else ()

    @property
    def stayed(self) -> tuple[str, ...]:
        """Members that haven't left, including silent ones."""
        return tuple(name for name in self.members if not self._left(name))

    def alive(self, now: float) -> tuple[str, ...]:
        return tuple(name for name in self.members if self._lives(name, now))

    def ready(self, now: float) -> tuple[str, ...]:
        """Return the guests that have the run's parameters and wait to become members."""
        waiting = (name for name in self._newcomers(now) if self.guests[name].beat.origin)
        return tuple(name for name in waiting if not self.out(name))

    def _newcomers(self, now: float) -> list[str]:
        return [name for name in self.guests if name not in self.members and self._lives(name, now)]

    def _silent(self, name: str, now: float) -> float:
        """Return the seconds since a worker's last heartbeat."""
        guest = self.guests.get(name)
        return now - (guest.at if guest else self.began)

    def _dead(self, name: str, now: float) -> bool:
        """Return whether a worker left, or was silent so long that the lobby itself can't be the one cut off."""
        certain = now - self.doubted > self.times.dead_after
        limit = self._patience(name) if certain else self.times.minority
        return self._left(name) or self._silent(name, now) > limit

    def _left(self, name: str) -> bool:
        guest = self.guests.get(name)
        return guest is not None and guest.beat.leaving

    def _lives(self, name: str, now: float) -> bool:
        return name in self.guests and not self._left(name) and self._silent(name, now) <= self._patience(name)

    def _patience(self, name: str) -> float:
        return self.times.ended if name in self.ended else self.times.dead_after

    def out(self, name: str) -> bool:
        """Return whether the run continued without this worker, or the worker has another run's parameters."""
        beat = self.guests[name].beat
        other_run = bool(beat.origin) and bool(self.origin) and beat.origin != self.origin
        if name in self.dismissed:
            return True
        if self.view is None or beat.view is None or self.agreed < self.view.number:
            return other_run
        behind = beat.view.number < self.view.number and name not in self.view.members
        return other_run or behind or (beat.view.number == self.view.number and beat.view != self.view)

    def founder(self, now: float) -> str:
        """Return the worker whose parameters the run begins with, the oldest one; empty if there is one or none yet."""
        # At once, without the others: each worker sets itself up and finds its own errors first.
        known = self.origin or self.seen or not self.settled
        return "" if known else next(iter(self._newcomers(now)), "")

    def donor(self, name: str, now: float) -> str:
        """Return the member that sends its state to a newcomer: its present donor if alive, else the least busy."""
        beat = self.guests[name].beat
        # Silent members may soon be lost: newcomers that could replace them fetch the state meanwhile.
        alive = [n for n in self.alive(now) if n not in self.ended and self._silent(n, now) <= self.times.late]
        members = alive if self.view else self.ready(now)
        healing = [n for n in self._newcomers(now) if not self.guests[n].beat.origin]
        room = self.bounds.most - len(alive) - len(self.ready(now))
        if beat.origin or not self.settled or name not in healing[: max(0, room)]:
            return ""
        if beat.donor in members and beat.donor != beat.failed:
            return beat.donor
        serves = [self.guests[n].beat.donor for n in healing]
        others = [n for n in members if n != beat.failed] or members
        return min(others, key=serves.count, default="")

    def paused(self, now: float) -> str:
        """Return why the members (or the workers before a run begins) wait; empty if they don't."""
        if self.view is None and not self.seen and (there := len(self._newcomers(now))) < self.bounds.least:
            return f"waiting for {self.bounds.least} workers, {there} {'is' if there == 1 else 'are'} here"
        if self.view is None and not self.seen:
            return f"waiting until {self.bounds.most} workers are here or none came for {self.times.dead_after:g} s"
        (stay, size), most = self._counted(now), self.bounds.most
        wanted = min(stay + len(self.ready(now)), most)
        if not self.seen or not self.settled or 2 * stay > size or self.bounds.may_follow(stay, size, wanted):
            return ""
        if not stay:
            return (
                f"no member of view {self.seen} is reached: end the lobby and all workers, and resume from a checkpoint"
            )
        more = self.bounds.may_follow(stay, size, most)
        needed = f"{self.bounds.least} workers" if more else f"{self.bounds.needed(size)} of them"
        remedy = f"mend the network, {'start workers, ' if more else ''}or start the lobby again with a lower minimum"
        return f"{stay} of {size} members are reached, and {needed} are needed: {remedy}"

    def update_for(self, name: str, now: float) -> LobbyUpdate:
        """Make the `LobbyUpdate` for this guest."""
        donor = self.donor(name, now)
        return LobbyUpdate(
            acknowledged=self.guests[name].beat.count,
            view=self.view,
            agreed=self.agreed,
            gone=tuple(n for n in self.members if self.settled and self._dead(n, now)),
            entered={n: self.guests[n].beat.entered for n in self.members if n in self.guests},
            round=max((self.guests[n].beat.reached for n in self.members if n in self.guests), default=0),
            donor=(donor, self.guests[donor].beat.place) if donor else None,
            founder=self.founder(now) == name,
            out=self.out(name),
            over=self.view is not None and not self.stayed,
            paused=self.paused(now),
            least=self.bounds.least,
            dead_after=self.times.dead_after,
            ended=tuple(sorted(self.ended)),
        )
