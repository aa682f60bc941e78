"""Committed rounds of many members of one view on the virtual clock, some of which are killed: the votes alone.

    python -m tests.elastic.plan.many MEMBERS ROUNDS

Messages are taken to have come where their sender has sent them. A run of 1,000 members and rounds takes minutes.
"""

import random
import sys
import time
from collections.abc import Sequence

from lightning_decentral.elastic.plan.commit import Rounds, Sends
from lightning_decentral.elastic.plan.view import View
from tests.elastic.plan.network import Network

AGAIN, KNOWN = 2.0, 0.5  # seconds until votes are repeated; until a death is known


class Many:
    def __init__(self, size: int, rounds: int, deaths: int, seed: int = 0) -> None:
        self.rng, self.rounds, self.votes = random.Random(seed), rounds, 0
        self.net = Network(self.rng)
        names = tuple(f"host{n}-{n:08}@10.0.{n // 250}.{n % 250}:29400" for n in range(size))
        self.view = View(1, names, 0, names, names[0], size)
        self.members = {name: Rounds(name) for name in names}
        self.chains, self.at, self.done = (dict.fromkeys(names, start) for start in (0, -1, -1))
        self.sent: list[set[str]] = [set() for _ in range(rounds)]
        self.dead, self.known = set[str](), [*names]
        self.counted: dict[int, tuple[str, ...]] = {}
        for nth in range(deaths):
            self.net.at((nth + 0.5) * rounds * 0.2 / deaths, self.kill)
        for name in names:
            self.begin(name)

    def kill(self) -> None:
        name = self.rng.choice([n for n in self.known if n not in self.dead])
        self.dead.add(name)
        self.net.at(KNOWN, lambda: self.lose(name))

    def lose(self, name: str) -> None:
        self.known.remove(name)
        for other in self.known:
            self.drive(other)

    def begin(self, name: str) -> None:
        self.at[name] += 1
        round = self.at[name]
        if name in self.dead or round == self.rounds:
            return
        self.send(name, self.members[name].begins(round, 0, self.chains[name]))
        self.sent[round].add(name)
        self.net.at(0.1, lambda: self.arrive(name, round))

    def arrive(self, name: str, round: int) -> None:
        if name not in self.dead:
            self.send(name, self.members[name].arrives(self.key(round), self.view, self.sent[round], self.chains[name]))
            self.again(name, round)

    def again(self, name: str, round: int) -> None:
        if self.done[name] < round:
            self.drive(name, again=True)
            self.net.at(AGAIN, lambda: self.again(name, round))

    def key(self, round: int) -> tuple[int, int, int]:
        return self.view.key, round, 0

    def drive(self, name: str, again: bool = False) -> None:
        round = self.at[name]
        states, key = self.members[name].states, self.key(round)
        if name in self.dead or key not in states or self.done[name] == round:
            return
        states[key], sends = states[key].driven(self.known, (), again)
        self.send(name, [(key, sends)])
        if found := states[key].decided:
            assert self.counted.setdefault(round, found.counted) == found.counted
            self.done[name], self.chains[name] = round, found.chain(round)
            self.net.at(self.rng.uniform(0.05, 0.15), lambda: self.begin(name))

    def send(self, name: str, found: Sequence[tuple[tuple[int, int, int], Sends]]) -> None:
        for key, sends in found:
            for to, vote in sends:
                self.votes += 1
                self.net.send(name, to, lambda to=to, key=key, vote=vote: self.hear(to, key, vote))

    def hear(self, name: str, key: tuple[int, int, int], vote: object) -> None:
        if name not in self.dead:
            self.send(name, self.members[name].received(key, self.view.members, vote))  # type: ignore[arg-type]
            self.drive(name)


def ran(size: int, rounds: int, deaths: int) -> Many:
    """A run whose survivors have gone through all rounds with equal decisions."""
    many = Many(size, rounds, deaths)
    many.net.run(until=rounds * 10.0)
    living = [name for name in many.known if name not in many.dead]
    assert {many.done[name] for name in living} == {rounds - 1}
    assert len({many.chains[name] for name in living}) == 1
    return many


if __name__ == "__main__":
    began, (size, rounds) = time.process_time(), map(int, sys.argv[1:])
    found = ran(size, rounds, deaths=rounds // 20)
    spent, whole = time.process_time() - began, sum(map(bool, found.counted.values()))
    print(f"{size} members, {rounds} rounds, {len(found.dead)} deaths: {whole} rounds committed, all survivors alike")
    print(
        f"{spent:.0f} s of one processor, {found.votes / rounds:.0f} votes a round, {found.net.now:.0f} s of their own"
    )
