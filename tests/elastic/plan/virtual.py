"""Workers and a lobby in virtual time: the elastic protocol's own code, with what must hold asserted at each step.

A toy takes the place of training: a worker holds one number, mixes it with its neighbours' on a ring and adds nothing.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from lightning_decentral.elastic.plan.lobby_state import LobbyState
from lightning_decentral.elastic.plan.member_state import Act, Fetch, MemberState, Send
from lightning_decentral.elastic.plan.messages import Heartbeat
from lightning_decentral.elastic.plan.view import Bounds, Times, View
from tests.elastic.plan.network import Network

LOBBY = "lobby"
TIMES = Times(1.0)
DEAD = TIMES.dead_after
TRANSFER = 0.3  # seconds that a newcomer's parameters take


def neighbours(view: View, name: str) -> list[str]:
    """On a ring, in both directions."""
    rank, size = view.members.index(name), len(view.members)
    return [view.members[r] for r in dict.fromkeys(((rank - 1) % size, (rank + 1) % size)) if r != rank]


def weight(view: View) -> float:
    """Of each neighbour."""
    return 1 / min(3, len(view.members))


@dataclass
class Worker:
    """One process, by its name; one that starts again is another."""

    state: MemberState
    x: float
    pace: float
    alive: bool = True
    stopped: bool = False
    kept: list[Callable[[], None]] = field(default_factory=list)
    landing: tuple[View, int, float] | None = None  # of which view and round, and what was sent
    frames: dict[tuple[int, int, str], float] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    floor: dict[str, int] = field(default_factory=dict)
    began_at: float = 0.0
    landed_at: float = 0.0


class World:
    """Workers and their lobby; what must hold is checked while they run."""

    shows = False

    def __init__(self, seed: int, bounds: Bounds, size: int, strict: bool = True) -> None:
        self.rng = random.Random(seed)
        self.net = Network(self.rng)
        self.bounds, self.strict = bounds, strict
        self.workers: dict[str, Worker] = {}
        self.lobby: LobbyState | None = None
        self.lobbies = 0
        self.log: list[str] = []
        self.in_force: dict[int, View] = {}
        self.launched: dict[tuple[str, int], int] = {}
        self.received: set[tuple[str, str, int, int]] = set()
        self.broke: list[tuple[str, str, float]] = []
        self.landed: dict[tuple[int, int], dict[str, tuple[float, float]]] = {}
        self.members: set[str] = set()
        self.highest = 0
        self.used: dict[int, float] = {}
        self.refused = 0
        self.mixed = 0
        self._names = count()
        self.start_lobby()
        for _ in range(size):
            self.net.at(self.rng.uniform(0, 0.2), self.start)
        self._tick_lobby()

    def say(self, text: str) -> None:
        self.log.append(f"{self.net.now:8.3f} {text}")
        if self.shows:
            print(self.log[-1])

    # the lobby

    def start_lobby(self) -> None:
        if self.lobby is None:
            self.lobbies += 1
            self.lobby = LobbyState(self.bounds, TIMES, self.net.now)
            self.say("lobby starts")

    def kill_lobby(self) -> None:
        self.lobby = None
        for name in self.workers:
            self.net.broken(name, LOBBY)
            self.net.broken(LOBBY, name)
        self.say("lobby is killed")

    def _lobby_ticks(self) -> None:
        if self.lobby is not None:
            self._lobby_did(*self.lobby.ticked(self.net.now))

    def _tick_lobby(self) -> None:
        self._lobby_ticks()
        self.net.at(TIMES.beat, self._tick_lobby)

    def _hear(self, beat: Heartbeat) -> None:
        if self.lobby is not None:
            self._lobby_did(*self.lobby.received(beat, self.net.now))

    def _hung_up(self, name: str) -> None:
        if self.lobby is not None:
            self.lobby = self.lobby.hung_up(name)
            self.net.at(1.01 * TIMES.ended, self._lobby_ticks)

    def _lobby_did(self, state: LobbyState, words: list[Any]) -> None:
        if self.lobby and state.view != self.lobby.view and state.view:
            self._comes_anew(state.view)
            self.say(f"lobby: view {state.view.number} {state.view.members} from {state.view.first_round}")
        self.lobby = state
        for name, word in words:
            self.net.send(
                LOBBY, name, lambda name=name, word=word: self.on(name, lambda w: w.state.notified(word, self.net.now))
            )

    def _comes_anew(self, view: View) -> None:
        """Who isn't a member any more isn't one again: a newcomer has another name."""
        back = (set(view.members) - set(view.before)) & self.members if view.number > 1 else set()
        if view.number > self.highest:  # a lobby that was started again hears of older ones first
            assert not back, f"{back} are members again"
            self.highest, self.members = view.number, self.members | set(view.members)

    # workers

    def start(self) -> None:
        name = f"w{next(self._names)}"
        beat = Heartbeat(name, 0, name)
        self.workers[name] = Worker(MemberState(beat, TIMES), self.rng.gauss(0, 1), self.rng.uniform(0.05, 0.3))
        self.say(f"{name} starts")
        self._tick(name)
        self._work(name)

    def on(self, name: str, step: Callable[[Worker], tuple[MemberState, list[Act]]]) -> None:
        """Let a worker do something, when it isn't stopped."""
        worker = self.workers[name]
        if not worker.alive:
            return
        if worker.stopped:
            worker.kept.append(lambda: self.on(name, step))
            return
        before = worker.state
        worker.state, acts = step(worker)
        self._check(name, before, worker.state)
        for act in acts:
            self._do(name, act)
        if worker.state.out and not before.out:
            self.say(f"{name} comes back as a newcomer: {worker.state.out}")
            self.end(name, notice=True)
            self.net.at(0.2, self.start)
        self._land(name)

    def _check(self, name: str, before: MemberState, after: MemberState) -> None:
        old, new = before.mine.view, after.mine.view
        if new is None or new == old:
            return
        assert old is None or new.number > old.number, f"{name} went back from view {old.number} to {new.number}"
        assert name in new.members
        self.say(f"{name} is in view {new.number} from round {after.mine.entered[-1][1]}")
        self._another_run(new)
        known = self.in_force.setdefault(new.number, new)
        assert known == new or not self.strict, f"two views {new.number} are in force: {known.members}, {new.members}"

    def _another_run(self, view: View) -> None:
        """It begins where all of the one before and their lobby have ended: nobody is left who knows of it."""
        before = {known.origin for known in self.in_force.values()} - {view.origin}
        if before:
            left = [n for n, w in self.workers.items() if w.alive and w.state.mine.origin in before]
            assert not left, f"another run begins while {left} are left of the one before"
            self.in_force, self.used, self.landed = {}, {}, {}

    def _do(self, name: str, act: Act) -> None:
        match act:
            case Send("", beat):
                self.net.send(name, LOBBY, lambda: self._hear(beat))
            case Send(to, beat):
                self.net.send(name, to, lambda: self.on(to, lambda w: w.state.met(beat, self.net.now)))
            case Fetch(donor, _):
                self._fetch(name, donor)

    def _fetch(self, name: str, donor: str) -> None:
        def served() -> None:
            if not self.workers[donor].alive:
                self.net.at(0.01, failed)
                return
            giver = self.workers[donor]
            if giver.stopped or not giver.state.serves:
                assert giver.stopped or giver.state.out, f"{donor} was asked to heal {name} and isn't healed"
                return
            x, mine = giver.x, giver.state.mine
            self.net.at(TRANSFER, lambda: came(x, mine.origin, mine.round) if giver.alive else failed())

        def came(x: float, origin: str, round: int) -> None:
            def take(worker: Worker) -> tuple[MemberState, list[Act]]:
                state, acts = worker.state.fetched(donor, origin, round, self.net.now)
                if state is not worker.state:
                    worker.x = x
                    self.say(f"{name} has everything from {donor}")
                return state, acts

            self.net.send(donor, name, lambda: self.on(name, take))

        def failed() -> None:
            self.on(name, lambda w: w.state.failed(donor, self.net.now))

        self.net.send(name, donor, served)
        self.net.at(2 * DEAD, failed)  # silence

    def _tick(self, name: str) -> None:
        if self.workers[name].alive:
            self.on(name, lambda w: w.state.ticked(self.net.now))
            self.net.at(TIMES.beat / 2, lambda: self._tick(name))

    def end(self, name: str, notice: bool) -> None:
        """The others' connections close, or (power-off) stay silent."""
        self.workers[name].alive = False
        if notice:
            self.net.send(name, LOBBY, lambda: self._hung_up(name))
        for other in self.workers:
            if notice:
                self.net.send(name, other, lambda other=other: self._closed(other, name))
            else:
                self.net.broken(name, other)
        self.broke += [(name, other, self.net.now) for other in self.workers]

    def _closed(self, name: str, source: str) -> None:
        def close(worker: Worker) -> tuple[MemberState, list[Act]]:
            worker.lost.add(source)
            return worker.state, []

        self.on(name, close)

    def connect(self, name: str, target: str) -> None:
        """Anew: what this worker sent before is lost, or has come."""
        round = self.workers[name].state.mine.round

        def greet(worker: Worker) -> tuple[MemberState, list[Act]]:
            worker.lost.discard(name)
            worker.floor[name] = round
            return worker.state, []

        self.net.send(name, target, lambda: self.on(target, greet))

    def resume(self, name: str) -> None:
        worker = self.workers[name]
        worker.stopped, kept, worker.kept = False, worker.kept, []
        self.say(f"{name} goes on")
        for do in kept:
            do()

    def cut(self, side: list[str], rest: list[str], seconds: float, breaks: bool) -> None:
        for a, b in ((a, b) for a in side for b in rest):
            self.net.hold(a, b, seconds)
            for source, target in [(a, b), (b, a)] if breaks else []:
                self._break(source, target)

    def _break(self, source: str, target: str) -> None:
        self.net.broken(source, target)
        self.broke.append((source, target, self.net.now))
        if LOBBY not in (source, target):
            self._closed(target, source)
            self.connect(source, target)
        if target == LOBBY:
            self._hung_up(source)
            self.on(source, lambda worker: worker.state.reconnects(self.net.now))

    # rounds

    def _work(self, name: str) -> None:
        worker = self.workers[name]
        if not worker.alive:
            return
        if not worker.stopped and worker.landing is None and not worker.state.waits(self.net.now):
            self._launch(name, worker)
        wait = worker.pace if worker.landing else 0.05
        self.net.at(wait, lambda: self._work(name))

    def _launch(self, name: str, worker: Worker) -> None:
        round = worker.state.mine.round
        view = worker.state.view_of(round)
        if view is None:
            return
        worker.state = worker.state.begins(round, self.net.now - worker.began_at)
        worker.landing, worker.began_at = (view, round, worker.x), self.net.now
        self.launched[name, round] = view.key
        self._not_behind(name, view)
        for target in neighbours(view, name):
            self._frame(name, target, view, round, worker.x)
        self._land(name)

    def _frame(self, name: str, target: str, view: View, round: int, x: float) -> None:
        def arrive(worker: Worker) -> tuple[MemberState, list[Act]]:
            worker.frames[view.key, round, name] = x
            return worker.state, []

        self.net.send(name, target, lambda: self.on(target, arrive))

    def _not_behind(self, name: str, view: View) -> None:
        """Nobody trains long without knowing of a view in which others train."""
        self.used.setdefault(view.number, self.net.now)
        last = self.workers[name].state.mine.view
        newer = [since for number, since in self.used.items() if last and number > last.number]
        late = self.net.now - min(newer, default=self.net.now)
        assert not self.strict or late < 3 * DEAD, f"{name} still trains in view {view.number}"

    def _land(self, name: str) -> None:
        worker = self.workers[name]
        if worker.landing is None or worker.stopped or not worker.alive:
            return
        view, round, sent = worker.landing
        sources = neighbours(view, name)
        keys = {j: (view.key, round, j) for j in sources}
        if any(keys[j] not in worker.frames and self._may_come(worker, view, round, j) for j in sources):
            return
        for j in sources:
            found = worker.frames.pop(keys[j], None)
            if found is None:
                self.refused += 1
                if j in worker.state.gone:  # a silence as long as a death is one
                    self.broke.append((name, j, self.net.now))
                continue
            assert self.launched[j, round] == view.key, "a message of another view was mixed"
            self.received.add((name, j, view.number, round))
            worker.x += weight(view) * (found - sent)
            self.mixed += 1
        worker.landing, worker.landed_at = None, self.net.now
        self.landed.setdefault((view.number, round), {})[name] = (self.net.now, worker.x)

    def _may_come(self, worker: Worker, view: View, round: int, j: str) -> bool:
        return j not in worker.lost and round >= worker.floor.get(j, 0) and worker.state.expects(view, round, j)
