"""State of a worker towards the lobby: newcomer, fetching, ready, member; and whether it may begin a round.

notified(update, now), met(beat, now), ticked(now), begins(round, now), ... -> the next state, and the actions to take
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lightning_decentral.elastic.plan.chronicle import HISTORY
from lightning_decentral.elastic.plan.messages import Heartbeat, History, LobbyUpdate
from lightning_decentral.elastic.plan.view import Bounds, Times, View


class Send(NamedTuple):
    """Action: send a heartbeat to the lobby (an empty name) or to a member."""

    to: str
    beat: Heartbeat


class Fetch(NamedTuple):
    """Action: fetch the training state from this member, and end an earlier fetch."""

    donor: str
    place: str


Act = Send | Fetch

FADES = 0.8  # by which an earlier longest trip counts
IN_STEP = 4  # Rounds by which members in step with each other may differ.


def _number(view: View | None) -> int:
    return view.number if view else 0


def _number_in(history: History, round: int) -> int:
    """Return the number of the view in force in a round; 0 if none is remembered."""
    return next((number for number, first in reversed(history) if first <= round), 0)


@dataclass(frozen=True)
class MemberState:
    """A worker's state, a value: its methods return the next state."""

    mine: Heartbeat  # the next heartbeat, except for its count
    times: Times
    least: int = 1
    agreed: int = 0  # the number of the highest view that may come into force
    reached: int = 0  # the newest round that a member is known to have reached
    # Views of `mine.entered` that are or will be in force, by number.
    views: Mapping[int, View] = field(default_factory=dict)
    # When the last heartbeat that the lobby has answered was sent: since then the lobby counts this worker as alive,
    # however late the answer came.
    acknowledged_at: float = float("-inf")
    asked: Mapping[int, float] = field(default_factory=dict)  # {count: when that heartbeat was sent}
    sent_at: float = float("-inf")  # when this worker last sent heartbeats
    met_at: Mapping[str, float] = field(default_factory=dict)  # when heartbeats of other members last came directly
    woke: float = float("-inf")  # when this worker last continued after a sleep
    # {member: [(view number, first round)]} of the views that came into force for it.
    entered: Mapping[str, History] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()  # members that are silent to the lobby
    ended: frozenset[str] = frozenset()  # members of these views whose connection to the lobby has ended
    paused: str = ""  # why the lobby lets the members wait
    # Reason why this worker must join anew under another name; empty if it needn't.
    out: str = ""

    def notified(self, update: LobbyUpdate, now: float) -> tuple["MemberState", list[Act]]:
        """Take a `LobbyUpdate` from the lobby."""
        if self.out:
            return self, []
        if update.out:
            why = "the run continued without this worker, which was silent or has another run's parameters"
            return replace(self, out=why), []
        if update.over and not self.mine.view:
            why = (
                "all members of the run at this lobby have ended, and a lobby serves one run: start another lobby for "
                "another fit"
            )
            return replace(self, out=why), []
        known = {name for view in self.views.values() for name in view.members}
        sent_at = self.asked.get(update.acknowledged)
        trip = self.mine.trip if sent_at is None else max(now - sent_at, FADES * self.mine.trip)
        state = replace(
            self,
            mine=replace(self.mine, trip=trip),
            acknowledged_at=max(self.acknowledged_at, self.asked.get(update.acknowledged, float("-inf"))),
            asked={count: at for count, at in self.asked.items() if count > update.acknowledged},
            gone=frozenset(update.gone),
            ended=(self.ended & known - set(update.view.members if update.view else ())).union(update.ended),
            paused=update.paused,
            times=Times(update.dead_after),
            least=update.least,
            reached=max(self.reached, update.round),
        )._knowing(update.view, update.agreed)
        state, acts = state._entries(update.entered)._healing(update)
        news = (state.mine.coming, state.mine.view) != (self.mine.coming, self.mine.view) or acts
        state, beats = state._beat(now) if news else (state, [])
        return state, [*acts, *beats]

    def met(self, beat: Heartbeat, now: float) -> tuple["MemberState", list[Act]]:
        """Take another member's heartbeat, which may bring a later view; answer if it can't reach the lobby."""
        if self.out:
            return self, []
        theirs, state = beat.view, replace(self._awake(now), reached=max(self.reached, beat.reached))
        if now - state.woke > self.times.beat:
            state = replace(state, met_at={**self.met_at, beat.sender: now})
        if theirs and self.mine.view and theirs.number > _number(self.mine.view):
            if self.mine.sender not in theirs.members:
                return replace(state, out=f"the run is in view {theirs.number}, made without this worker"), []
            state = state._knowing(theirs, theirs.number)
        state = state._entries({beat.sender: beat.entered})
        if not beat.asks or state.lonely(now) or not self.mine.view:
            return state, []
        return state._counted([beat.sender], state.sent_at)

    def ticked(self, now: float) -> tuple["MemberState", list[Act]]:
        """Send a heartbeat if one is due."""
        if self.out or now - self.sent_at < self.times.beat:
            return self, []
        return self._awake(now)._beat(now)

    def reconnects(self, now: float) -> tuple["MemberState", list[Act]]:
        """Send a heartbeat at once, as the connection to the lobby has ended."""
        return (self, []) if self.out else self._awake(now)._beat(now)

    def _awake(self, now: float) -> "MemberState":
        """Record a sleep of this host: heartbeats that arrived meanwhile don't show that their senders live."""
        return replace(self, woke=now) if self.times.alone < now - self.sent_at < float("inf") else self

    def fetched(self, donor: str, origin: str, round: int, now: float) -> tuple["MemberState", list[Act]]:
        """Record that the donor's state of this round has arrived; the lobby learns of it at once."""
        if self.mine.donor != donor or self.mine.origin:
            return self, []
        return replace(self, mine=replace(self.mine, origin=origin, round=round, donor="", failed=""))._beat(now)

    def failed(self, donor: str, now: float) -> tuple["MemberState", list[Act]]:
        """Record that the donor didn't send its state."""
        if self.mine.donor != donor or self.mine.origin:
            return self, []
        return replace(self, mine=replace(self.mine, donor="", failed=donor))._beat(now)

    def leaving(self, now: float) -> tuple["MemberState", list[Act]]:
        """Announce to the lobby that this worker ends."""
        return replace(self, mine=replace(self.mine, leaving=True))._beat(now)

    @property
    def serves(self) -> bool:
        """True if this worker may be a donor, which needs the run's parameters."""
        return bool(self.mine.origin) and not self.out

    def waits(self, now: float) -> str:
        """Return why the next round may not begin; empty if it may."""
        if not self.out and (self.mine.view is None or self.mine.sender not in self.mine.view.members):
            return self.paused or "waiting for the next view"
        return self.out or self.paused or self.doubts(now)

    def begins(self, round: int, pace: float) -> "MemberState":
        """Record that a round begins, which `waits` allowed."""
        return replace(self, mine=replace(self.mine, round=max(self.mine.round, round + 1), pace=pace))

    def view_of(self, round: int) -> View | None:
        """Return the view that is in force for this worker in this round."""
        number = _number_in(self.mine.entered, round)
        return self.views.get(number) if number else None

    def without(self, view: View, peer: str) -> bool:
        """Return whether a peer of this view is known to be lost: silent to the lobby, or not in a later view."""
        mine = self.mine.view
        return peer in self.gone or bool(mine and mine.number > view.number and peer not in mine.members)

    def expects(self, view: View, round: int, peer: str) -> bool:
        """Return whether a peer's message of a round may still come: the peer lives, and is in the same view in that
        round, as far as this worker knows."""
        history = self.entered.get(peer, ())
        if self.without(view, peer):
            return False
        reached = bool(history) and history[-1][0] >= view.number
        return not reached or _number_in(history, round) == view.number

    def lonely(self, now: float) -> bool:
        """Return whether the lobby has been silent for so long that members ask each other."""
        return now - self.acknowledged_at > self.times.alone

    def doubts(self, now: float) -> str:
        """Return why the run may have continued without this worker, which slept or can't reach the lobby; empty if
        nothing suggests that."""
        if self.out:
            return self.out
        view = self.mine.view
        if view is None or now - self.acknowledged_at <= self.times.dead_after:
            return ""
        reached = 1 + sum(now - self.met_at.get(n, float("-inf")) <= self.times.dead_after for n in self._others(view))
        if Bounds(self.least, self.least).may_go_on_alone(reached, len(view.members)):
            return ""
        return f"neither the lobby nor enough members are reached: {reached} of {len(view.members)}"

    def _others(self, view: View) -> list[str]:
        return [name for name in view.members if name != self.mine.sender]

    def _knowing(self, view: View | None, agreed: int) -> "MemberState":
        """Learn of a view, which comes into force once it is agreed: at its first round, or at once if that round is
        over."""
        mine = replace(self.mine, seen=max(self.mine.seen, _number(view)))
        state, coming = replace(self, mine=mine, agreed=max(self.agreed, agreed)), mine.coming
        if coming and coming.number <= state.agreed and coming.number < _number(view) and mine.sender in coming.members:
            state = state._entering(coming)  # the new view follows `coming`, in which others may be
        mine = state.mine
        if view is None or view.number <= _number(mine.view) or view.number < _number(mine.coming):
            return state
        if view.number > state.agreed:
            return replace(state, mine=replace(mine, coming=view))
        if self.mine.sender not in view.members:
            return replace(state, mine=replace(mine, coming=None))
        return state._entering(view)

    def _entering(self, view: View) -> "MemberState":
        mine = self.mine
        first = max(view.first_round, mine.round)
        # A view that would have begun later than this one never does.
        before = tuple(pair for pair in mine.entered if pair[1] < first)
        over = sum(since <= mine.round for _, since in before)
        # A newcomer begins at the others' round, and a member that is far behind skips the rounds between, as others
        # would have to wait. Only rounds that some member has reached count: a view that was planned while rounds were
        # quick may begin far ahead of all members.
        behind = min(first, self.reached) - mine.round - IN_STEP
        skips = mine.view is None or behind * mine.pace > self.times.dead_after
        gap = ((0, mine.round),) if skips and mine.view else ()
        entered = (*before[max(0, over - HISTORY) :], *gap, (view.number, first))
        views = {n: known for n, known in {**self.views, view.number: view}.items() if n >= entered[0][0]}
        round = first if skips else mine.round
        # Former members' histories aren't needed.
        history_of = {name: history for name, history in self.entered.items() if name in view.members}
        met_at = {name: at for name, at in self.met_at.items() if name in view.members}
        state = replace(self, views=views, entered=history_of, met_at=met_at)
        return replace(state, mine=replace(mine, view=view, coming=None, entered=entered, round=round))

    def _entries(self, found: Mapping[str, History]) -> "MemberState":
        """Record which views the other members are in; reports older than known ones are ignored."""
        newer = {name: history for name, history in found.items() if history[-1:] > self.entered.get(name, ())[-1:]}
        return replace(self, entered={**self.entered, **newer}) if newer else self

    def _healing(self, update: LobbyUpdate) -> tuple["MemberState", list[Act]]:
        mine = self.mine
        if update.founder and not mine.origin:
            return replace(self, mine=replace(mine, origin=self.mine.sender, donor="")), []
        if mine.origin or update.donor is None or update.donor[0] == mine.donor:
            return self, []
        donor, place = update.donor
        return replace(self, mine=replace(mine, donor=donor)), [Fetch(donor, place)]

    def _beat(self, now: float) -> tuple["MemberState", list[Act]]:
        """Send a heartbeat to the lobby, and to all members if the lobby is silent."""
        others = self._others(self.mine.view) if self.mine.view and self.lonely(now) else []
        state, acts = self._counted(["", *others], now, asks=bool(others))
        recent = {count: at for count, at in self.asked.items() if now - at <= self.times.dead_after}
        return replace(state, asked={**recent, state.mine.count: now}), acts

    def _counted(self, to: list[str], sent_at: float, asks: bool = False) -> tuple["MemberState", list[Act]]:
        mine = replace(self.mine, count=self.mine.count + 1, asks=asks)
        return replace(self, mine=mine, sent_at=sent_at), [Send(name, mine) for name in to]
