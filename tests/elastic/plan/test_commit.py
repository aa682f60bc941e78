"""LAW: members that go on commit the same mean, whoever dies, sleeps, is cut off, suspects or hears late."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from lightning_decentral.elastic.plan.commit import CommitState, Proposal, Rounds, Sends, Vote
from tests.elastic.plan import many
from tests.elastic.plan.committed import schedule
from tests.elastic.plan.network import Network

AGAIN = 0.25
UNTIL, END = 4.0, 12.0  # seconds: when faults end, and when all must know


@dataclass
class Member:
    has: tuple[str, ...]
    state: CommitState | None = None
    alive: bool = True
    asleep: bool = False
    early: list[object] = field(default_factory=list)
    suspects: set[str] = field(default_factory=set)


class Round:
    """One round among some members on a virtual network; what a lobby knows is made by hand."""

    def __init__(self, seed: int, size: int) -> None:
        self.rng = rng = random.Random(seed)
        self.net = Network(rng)
        self.names = tuple(f"w{n}" for n in range(size))
        self.later: tuple[str, ...] = ()
        self.members = {}
        for name in self.names:
            missing = {n for n in self.names if rng.random() < 0.15 and n != name}
            self.members[name] = Member(tuple(n for n in self.names if n not in missing))
            self.net.at(rng.uniform(0, 1), lambda name=name: self.arrive(name))
        for _ in range(rng.randint(0, 5)):
            self.net.at(rng.uniform(0, UNTIL), rng.choice([self.kill, self.kill, self.sleep, self.cut, self.suspect]))
        self.net.at(UNTIL, self.view)

    def arrive(self, name: str) -> None:
        member = self.members[name]
        member.state = CommitState(name, self.names, member.has, chain=7)
        early, member.early = member.early, []
        for vote in early:
            self.hear(name, vote)
        self.tick(name)

    def hear(self, name: str, vote: object) -> None:
        member = self.members[name]
        if not member.alive:
            return
        if member.state is None or member.asleep:
            member.early.append(vote)
            return
        member.state, sends = member.state.received(vote)  # type: ignore[arg-type]
        self.send(name, sends)
        self.drive(name, again=False)

    def drive(self, name: str, again: bool) -> None:
        member = self.members[name]
        assert member.state is not None
        if self.later and name not in self.later:
            member.alive = False  # it must join anew
            return
        live = {n for n in self.names if n == name or n not in member.suspects}
        if self.later:
            live &= set(self.later)
        member.state, sends = member.state.driven(live, self.later, again)
        self.send(name, sends)

    def tick(self, name: str) -> None:
        if self.members[name].alive and not self.members[name].asleep:
            self.drive(name, again=True)
        self.net.at(AGAIN, lambda: self.tick(name))

    def send(self, name: str, sends: Sends) -> None:
        for to, vote in sends:
            self.net.send(name, to, lambda to=to, vote=vote: self.hear(to, vote))

    # faults

    def _living(self) -> list[str]:
        return [n for n in self.names if self.members[n].alive]

    def kill(self) -> None:
        if len(self._living()) > 1:
            name = self.rng.choice(self._living())
            self.members[name].alive = False
            for other in self.names:
                delay = self.rng.choice([0.02, self.rng.uniform(0, UNTIL - self.net.now)])
                self.net.at(delay, lambda other=other: self.members[other].suspects.add(name))

    def sleep(self) -> None:
        name = self.rng.choice(self._living())
        self.members[name].asleep = True
        self.net.at(self.rng.uniform(0.1, 3.0), lambda: self.wake(name))

    def wake(self, name: str) -> None:
        member = self.members[name]
        member.asleep, early, member.early = False, member.early, []
        for vote in early:
            self.hear(name, vote)

    def cut(self) -> None:
        side = set(self.rng.sample(self.names, self.rng.randint(1, len(self.names) - 1)))
        for a in side:
            for b in set(self.names) - side:
                self.net.hold(a, b, self.rng.uniform(0.1, 3.0))
                if self.rng.random() < 0.5:
                    self.net.broken(a, b)
                    self.net.broken(b, a)
                    self.members[a].suspects.add(b)
                    self.net.at(2.0, lambda a=a, b=b: self.members[a].suspects.discard(b))

    def suspect(self) -> None:
        a, b = self.rng.sample(self.names, 2)
        self.members[a].suspects.add(b)
        self.net.at(self.rng.uniform(0.1, 2.0), lambda: self.trust(a, b))

    def trust(self, a: str, b: str) -> None:
        if self.members[b].alive:
            self.members[a].suspects.discard(b)

    def view(self) -> None:
        """A later view keeps those that live; where it is a quorum it may leave one out that lives."""
        self.later = tuple(self._living())
        if len(self.later) > 2 and self.rng.random() < 0.3:
            self.later = tuple(n for n in self.later if n != self.rng.choice(self.later))

    def decided(self) -> dict[str, Proposal]:
        return {n: m.state.decided for n, m in self.members.items() if m.state and m.state.decided}


def ran(seed: int) -> Round:
    one = Round(seed, size=seed % 5 + 2)
    one.net.run(END)
    living = one._living()
    found = one.decided()
    goes_on = {n: found.get(n) for n in living}
    assert None not in goes_on.values(), f"undecided: {goes_on}"
    assert len(set(goes_on.values())) == 1, goes_on
    return one


def test_whoever_goes_on_decides_alike() -> None:
    dropped = several = 0
    for seed in range(200):
        one = ran(seed)
        (proposal,) = {one.decided()[n] for n in one._living()}
        assert proposal.before == 7
        dropped += not proposal.counted
        several += len(proposal.counted) > 1
        if all(m.alive for m in one.members.values()):  # the others were suspected, and must join anew
            can = [m for m in one.members.values() if set(proposal.counted) <= set(m.has)]
            assert 2 * len(can) >= len(one.members)
    assert several > 30
    assert dropped


def test_a_wrong_promise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that begins its first ballot again, though it has promised a later one: two decisions."""
    opened = CommitState._opened

    def forgets(self: CommitState) -> tuple[CommitState, Sends]:
        return opened(replace(self, promised=0, accepted=None))

    monkeypatch.setattr(CommitState, "_opened", forgets)
    with pytest.raises(AssertionError, match="w"):
        all(map(ran, range(600)))


def test_schedules_of_whole_runs() -> None:
    """With views, newcomers and lobbies that die. More: python -m tests.elastic.plan.committed 0 3000"""
    events = Counter[str]()
    for seed in range(9):
        events += schedule(seed).events
    assert events["committed"] > 500
    assert events["joined"]
    assert events["without some"]


def test_many_members_commit_the_same_rounds_though_some_die() -> None:
    """More: python -m tests.elastic.plan.many 1000 1000"""
    found = many.ran(40, 40, deaths=6)
    assert len(found.dead) == 6
    assert len(found.counted) == 40
    assert {len(counted) for counted in found.counted.values()} >= {34, 40}
    assert found.votes < 40 * 40 * 10


def test_a_round_doesnt_wait_for_a_member_that_passed_it() -> None:
    key, members = (1, 5, 0), ("a", "b")
    leader = CommitState("a", members, ("a",), chain=7)
    leader, _ = leader.driven(members, (), again=False)  # opens the ballot, and waits for b's vote
    leader, sends = leader.driven(members, (), again=True)
    assert leader.decided is None
    passed = Rounds("b")
    (asked,) = [vote for to, vote in sends if to == "b"]
    assert passed.received(key, members, asked) == []  # b may still come to the round
    ((_, answers),) = passed.begins(6, 0, chain=7)
    for _, answer in answers:
        leader, _ = leader.received(answer)
    leader, sends = leader.driven(members, (), again=False)
    for _, vote in sends:
        for _, answers in passed.received(key, members, vote):
            for _, answer in answers:
                leader, _ = leader.received(answer)
    leader, _ = leader.driven(members, (), again=False)
    assert leader.decided == Proposal((), 7)  # nobody steps


def test_a_member_with_a_message_in_a_round_isnt_taken_for_passed() -> None:
    rounds = Rounds("b")
    rounds.begins(5, 0, chain=7)
    rounds.begins(6, 0, chain=7)  # delay 2: round 5 hasn't landed
    assert rounds.received((1, 5, 0), ("a", "b"), Vote("has", "a", ("a",), 7)) == []
    assert not rounds.states
