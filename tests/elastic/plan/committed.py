"""Committed outer rounds in virtual time: the protocol's own code under schedules of faults, over rules and codecs.

    python -m tests.elastic.plan.committed SEED         what happened, line by line
    python -m tests.elastic.plan.committed FIRST LAST   the seeds that fail, and why

A worker holds a number x; each round it learns something, sends x - anchor through a toy codec, and steps from the
anchor by what its members commit.

Of seeds 0 to 2,999 none fails, and in none do members that go on differ. Before, newcomers skipped rounds quicker than
views settled (965), and the lobby made a member of a former one (1762). In about one seed of ten a member that was cut
off from a decision joins anew; in fewer than one of a hundred a newcomer comes too late, or has nobody to ask.
"""

import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from lightning_decentral.elastic.plan.commit import Key, Proposal, Rounds, Sends, Vote
from lightning_decentral.elastic.plan.member_state import MemberState
from lightning_decentral.elastic.plan.view import Bounds, View
from tests.elastic.plan.schedules import faults_then_quiet
from tests.elastic.plan.virtual import DEAD, Worker, World

RULES = ((1.0, 0.0), (0.7, 0.5), (0.6, 0.9))  # (lr, momentum), in Nesterov's form
GRAINS = (0.0, 0.5, 4.0)  # what a codec keeps: multiples of this number; 0: all
AGAIN = 0.1


@dataclass(frozen=True)
class Held:
    """What a newcomer copies."""

    x: float
    anchor: float = 0.0
    m: float = 0.0
    chain: int = 0

    def stepped(self, sent: float, ways: list[float], lr: float, momentum: float, chain: int) -> "Held":
        if not ways:
            return replace(self, chain=chain)
        d = sum(ways) / len(ways)
        m = momentum * self.m + d
        step = lr * (d + momentum * m)
        return Held(self.x + step - sent, self.anchor + step, m, chain)


class CommittedWorld(World):
    """Every round is an outer round of all members, as by `rounds.commits`."""

    def __init__(self, seed: int, bounds: Bounds, size: int) -> None:
        self.rule, self.grain = RULES[seed % 3], GRAINS[seed // 3 % 3]
        self.votes: dict[str, Rounds] = {}
        self.kept: dict[str, tuple[int, Held]] = {}  # {member: (number of a view, for its newcomers)}
        self.first: dict[str, int] = {}  # {member: number of the view that it has begun}
        self.asks: set[str] = set()
        self.last: dict[str, int] = {}  # {member: the round that it has begun}
        self.come: set[tuple[str, Key]] = set()
        self.sent: dict[tuple[Key, str], float] = {}
        self.committed: list[tuple[str, str, Key, Proposal]] = []  # (run, member, ...)
        self.path: dict[int, tuple[int, Key, Proposal]] = {}  # {checksum after: (checksum before, ...)}
        self.after: dict[tuple[str, int], Held] = {}  # by checksum
        self.events: Counter[str] = Counter()
        super().__init__(seed, bounds, size)

    def start(self) -> None:
        super().start()
        name = f"w{len(self.workers) - 1}"
        self.workers[name].x = Held(0.0)  # type: ignore[assignment]
        self.votes[name] = Rounds(name)

    def _launch(self, name: str, worker: Worker) -> None:
        round = worker.state.mine.round
        view = worker.state.view_of(round)
        if view is None or not self._begins(name, worker, view):
            return
        if self.last.setdefault(name, round - 1) < round - 1:  # `Participant.begin` ends with an error
            self.events["skipped"] += 1
            self.end(name, notice=True)
            self.net.at(0.2, self.start)
            return
        self.last[name] = round
        worker.state = worker.state.begins(round, self.net.now - worker.began_at)
        held: Any = worker.x
        held = replace(held, x=held.x + random.Random(f"{name} {round}").gauss(1, 1))
        way = held.x - held.anchor
        way = self.grain * (way // self.grain) if self.grain else way
        worker.x, worker.began_at = held, self.net.now
        worker.landing = (view, round, way)
        self.launched[name, round] = view.key
        self.sent[(view.key, round, 0), name] = way
        self._sends(name, self.votes[name].begins(round, 0, held.chain))
        for target in view.members:
            if target != name:
                self._frame(name, target, view, round, (way, held.chain))  # type: ignore[arg-type]
        self._land(name)

    def _begins(self, name: str, worker: Worker, view: View) -> bool:
        """Whether it has what a view begins with: a newcomer asks earlier members for their anchor."""
        if self.first.get(name) == view.number:
            return True
        newcomer = name not in view.before and view.number > 1
        if not newcomer:
            self.kept[name], self.first[name] = (view.number, worker.x), view.number  # type: ignore[assignment]
            return True
        earlier = [
            j
            for j in view.members
            if j in view.before and j not in worker.lost and not worker.state.without(view, j) and j != name
        ]
        if not earlier:
            self.first[name] = view.number  # nobody is left to ask
            self.events["orphan"] += 1
            return True
        if name not in self.asks:
            self.asks.add(name)
            self.net.at(0.3, lambda: self.asks.discard(name))
            for j in earlier:
                self.net.send(name, j, lambda j=j: self._gives(j, name, view))
        return False

    def _gives(self, giver: str, name: str, view: View) -> None:
        if self.workers[giver].alive and not self.workers[giver].stopped and giver in self.kept:
            number, held = self.kept[giver]
            if number == view.number:
                self.net.send(giver, name, lambda: self.on(name, lambda w: self._takes(name, w, view, held)))
            elif number > view.number:
                self.net.send(giver, name, lambda: self.on(name, lambda w: self._too_late(name, w, view)))

    def _too_late(self, name: str, worker: Worker, view: View) -> tuple[MemberState, list[Any]]:
        if self.first.get(name) != view.number:
            self.events["too late"] += 1
            self.end(name, notice=True)
            self.net.at(0.2, self.start)
        return worker.state, []

    def _takes(self, name: str, worker: Worker, view: View, held: Held) -> tuple[MemberState, list[Any]]:
        if self.first.get(name) != view.number:
            self.first[name] = view.number
            self.events["joined"] += 1
            worker.x = replace(held, x=held.anchor)  # type: ignore[assignment]
        return worker.state, []

    def _land(self, name: str) -> None:
        worker = self.workers[name]
        if worker.landing is None or worker.stopped or not worker.alive:
            return
        view, round, _ = worker.landing
        key, held = (view.key, round, 0), worker.x
        assert isinstance(held, Held)
        if (name, key) not in self.come:
            others = [j for j in view.members if j != name]
            frames = {j: worker.frames.get((view.key, round, j)) for j in others}
            if any(found is None and self._may_come(worker, view, round, j) for j, found in frames.items()):
                return
            came = {j for j, found in frames.items() if found is not None and found[1] == held.chain}  # type: ignore[index]
            has = tuple(j for j in view.members if j == name or j in came)
            self.come.add((name, key))
            self._sends(name, self.votes[name].arrives(key, view, has, held.chain))
            self._again(name, key)
        self._drive(name, key, again=False)

    def _again(self, name: str, key: Key) -> None:
        worker = self.workers[name]
        if worker.alive and worker.landing is not None and (worker.landing[0].key, worker.landing[1], 0) == key:
            if not worker.stopped:
                self._drive(name, key, again=True)
            self.net.at(AGAIN, lambda: self._again(name, key))

    def _drive(self, name: str, key: Key, again: bool) -> None:
        worker = self.workers[name]
        if worker.landing is None or not worker.alive:
            return
        view, round, way = worker.landing
        newer = worker.state.mine.view
        heirs = newer.members if newer and newer.number > view.number else ()
        if heirs and name not in heirs:
            return  # it hears that it is out
        live = [j for j in view.members if j == name or self._votes_in(worker, view, round, j)]
        states = self.votes[name].states
        states[key], sends = states[key].driven(live, heirs, again)
        self._sends(name, [(key, sends)])
        if decided := states[key].decided:
            worker.landing, worker.landed_at = None, self.net.now
            self._commit(name, worker, view, key, way, decided)

    def _votes_in(self, worker: Worker, view: View, round: int, j: str) -> bool:
        return j not in worker.lost and worker.state.expects(view, round, j)

    def _commit(self, name: str, worker: Worker, view: View, key: Key, way: float, decided: Proposal) -> None:
        held: Any = worker.x
        has = self.votes[name].states[key].has
        if decided.before != held.chain or not set(decided.counted) <= set(has):
            self.say(f"{name} can't follow {decided} in round {key[1]} with {has}: it comes back")
            self.events["cut off"] += 1
            self.end(name, notice=True)
            self.net.at(0.2, self.start)
            return
        run = view.origin
        self.committed.append((run, name, key, decided))
        self.path[decided.chain(key[1])] = (held.chain, key, decided)
        now = worker.state.mine.view
        goes_on = [
            (j, k, p)
            for of, j, k, p in self.committed[-400:]
            if (of, k[1]) == (run, key[1]) and p != decided and self.workers[j].alive and now and j in now.members
        ]
        both = [one for one in goes_on if one[2].counted and decided.counted and self._in_view_of(name, one[0])]
        assert not both, f"{name} commits {decided} of {key}, {both} go on, too"
        self.events["late"] += bool(goes_on)
        ways = [self.sent[key, j] for j in decided.counted]
        own = way if name in decided.counted else 0.0
        after: Held = held.stepped(own, ways, *self.rule, chain=decided.chain(key[1]))
        worker.x = after  # type: ignore[assignment]
        seen = self.after.setdefault((run, after.chain), after)
        assert (seen.anchor, seen.m, seen.chain) == (after.anchor, after.m, after.chain), (name, seen, after)
        self.events["committed" if decided.counted else "dropped"] += 1
        self.events["without some"] += 0 < len(decided.counted) < len(view.members)
        self.mixed += 1

    def _in_view_of(self, name: str, other: str) -> bool:
        theirs = self.workers[other].state.mine.view
        return theirs is not None and name in theirs.members

    def _sends(self, name: str, found: list[tuple[Key, Sends]]) -> None:
        for key, sends in found:
            members = self.votes[name].states[key].members
            for to, vote in sends:
                self.net.send(name, to, lambda to=to, vote=vote, key=key, m=members: self._on_vote(to, key, m, vote))

    def _on_vote(self, name: str, key: Key, members: tuple[str, ...], vote: Vote) -> None:
        def hear(worker: Worker) -> tuple[MemberState, list[Any]]:
            self._sends(name, self.votes[name].received(key, members, vote))
            return worker.state, []

        self.on(name, hear)  # it drives, where it still waits

    def check_replay(self, name: str) -> int:
        """Follow the decisions from the start in one process; return their number."""
        end: Any = self.workers[name].x
        chain, steps = end.chain, list[tuple[Key, Proposal]]()
        while chain:
            chain, *step = self.path[chain]
            steps.append(tuple(step))  # type: ignore[arg-type]
        held = Held(0.0)
        for key, decided in reversed(steps):
            ways = [self.sent[key, j] for j in decided.counted]
            held = held.stepped(0.0, ways, *self.rule, chain=decided.chain(key[1]))
        assert (held.anchor, held.m) == (end.anchor, end.m)
        return len(steps)


def schedule(seed: int) -> CommittedWorld:
    """A run with faults, then quiet; what must hold is asserted."""
    world = CommittedWorld(seed, Bounds(3, 5), size=4 if seed % 2 else 5)
    faults_then_quiet(world)
    living = {n: w for n, w in world.workers.items() if w.alive}
    members = [n for n in living if living[n].state.mine.view]
    if not members or any(living[n].state.waits(world.net.now) for n in members):
        return world  # too few are left: they wait and say so, as `schedules` asserts
    assert len({living[n].state.mine.view for n in members}) == 1
    for name in members:
        waited = world.net.now - living[name].landed_at
        assert waited < 3 * DEAD, f"{name} has waited for {waited:.2f} s"
        assert world.check_replay(name)
    return world


def main(first: int, last: int) -> None:
    began, failed, events = time.process_time(), 0, Counter[str]()
    for seed in range(first, last):
        try:
            events += schedule(seed).events
        except AssertionError as error:
            failed += 1
            print(f"seed {seed}: {error}")
    print(f"{failed} of {last - first} schedules failed, {time.process_time() - began:.0f} s of one processor")
    print(dict(events))


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    if len(numbers) == 1:
        World.shows = True
        schedule(numbers[0])
    else:
        main(*numbers)
