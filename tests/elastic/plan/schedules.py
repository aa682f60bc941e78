"""Schedules that a seed decides: kills, stops, cuts, a lobby that dies; and what must hold in the end.

    python -m tests.elastic.plan.schedules SEED                what happened, line by line
    python -m tests.elastic.plan.schedules FIRST LAST [least]  the seeds that fail, and why

`least` lets a minority go on, where two views of one number may be in force after a lobby was started again.
"""

import random
import sys
import time

from lightning_decentral.elastic.plan.view import Bounds, View
from tests.elastic.plan.virtual import DEAD, LOBBY, World


class Faults:
    """Faults at random moments, all mended by `until`."""

    def __init__(self, world: World, many: int, until: float) -> None:
        self.world, self.rng, self.net, self.until = world, world.rng, world.net, until
        kinds = [self.kill, self.kill, self.stop, self.cut, self.lobby, world.start]
        for _ in range(many):
            self.net.at(self.rng.uniform(0.5, until - 0.5), self.rng.choice(kinds))

    def _seconds(self, most: float) -> float:
        return min(self.rng.uniform(0.1, most), self.until - self.net.now)

    def _living(self) -> list[str]:
        return [n for n, w in self.world.workers.items() if w.alive]

    def _running(self) -> list[str]:
        return [n for n in self._living() if not self.world.workers[n].stopped]

    def kill(self) -> None:
        if len(self._living()) > 1 and self._running():
            name, notice = self.rng.choice(self._running()), self.rng.random() < 0.7
            self.world.say(f"{name} is killed{'' if notice else ', silently'}")
            self.world.end(name, notice)
            self.net.at(self._seconds(self.until), self.world.start)

    def stop(self) -> None:
        if self._running():
            name = self.rng.choice(self._running())
            seconds = self._seconds(4 * DEAD)
            self.world.say(f"{name} is stopped for {seconds:.2f} s")
            self.world.workers[name].stopped = True
            self.net.at(seconds, lambda: self.world.resume(name))

    def cut(self) -> None:
        living = self._living()
        side = set(self.rng.sample(living, self.rng.randint(1, len(living))))
        side |= {LOBBY} if self.rng.random() < 0.3 else set()
        seconds, breaks = self._seconds(5 * DEAD), self.rng.random() < 0.5
        self.world.say(f"{sorted(side)} are cut off for {seconds:.2f} s, connections {'break' if breaks else 'hold'}")
        # In an order of its own: a set's differs from run to run.
        self.world.cut(sorted(side), sorted({*living, LOBBY} - side), seconds, breaks)

    def lobby(self) -> None:
        self.world.kill_lobby()
        self.net.at(self._seconds(4 * DEAD), self.world.start_lobby)


def faults_then_quiet(world: World) -> None:
    until = 14 * DEAD
    Faults(world, many=world.rng.randint(1, 6), until=until)
    world.net.run(until)
    world.say("faults end")
    world.start_lobby()
    world.net.run(until + 12 * DEAD)


def schedule(seed: int, strict: bool = True) -> World:
    """A run with faults, then quiet; what must hold is asserted."""
    least = 3 if strict else random.Random(seed).choice([1, 2])
    world = World(seed, Bounds(least, 5), size=4 if seed % 2 else 5, strict=strict)
    faults_then_quiet(world)
    ends_well(world)
    return world


def ends_well(world: World) -> None:
    """All that live train together, or all wait and say why; what was lost was lost in both directions."""
    living = {n: w for n, w in world.workers.items() if w.alive}
    now, waits = world.net.now, {n: w.state.waits(world.net.now) for n, w in living.items()}
    members = [n for n in living if living[n].state.mine.view]
    assert not one_sided(world), one_sided(world)[:3]
    if not members or any(waits[n] for n in members):
        assert all(waits.values()), waits
        assert any("reached" in why for why in waits.values()), waits
        return
    views = {living[n].state.mine.view for n in members}
    assert len(views) == 1, f"views {[v.number for v in views if v]} at once"
    (view,) = views
    assert view is not None
    assert set(view.members) == set(members), (view.members, members)
    assert len(living) == len(members) or len(members) == world.bounds.most, (sorted(living), sorted(members))
    for name in members:
        assert now - living[name].landed_at < 2 * DEAD, f"{name} has waited since {living[name].landed_at:.2f}"
    _keeps_mean(world, view)


def _keeps_mean(world: World, view: View) -> None:
    """Of the last rounds in which all have landed."""
    rounds = [xs for (number, _), xs in sorted(world.landed.items()) if number == view.number]
    whole = [[x for _, x in xs.values()] for xs in rounds if len(xs) == len(view.members)]
    means = [sum(xs) / len(xs) for xs in whole[len(whole) // 2 :]]
    assert all(abs(mean - means[0]) < 1e-9 for mean in means), means


def one_sided(world: World) -> list[tuple[str, str, int, int]]:
    """Messages that were mixed though the other direction wasn't, and nothing broke between the two."""
    found = []
    for i, j, number, round in world.received:
        if (j, i, number, round) in world.received or (number, round) not in world.landed:
            continue
        if j not in world.landed[number, round]:
            continue  # it ended, or still waits
        if not any({i, j} == {a, b} for a, b, _ in world.broke):
            found.append((i, j, number, round))
    return found


def main(first: int, last: int, strict: bool) -> None:
    began, failed = time.process_time(), 0
    for seed in range(first, last):
        try:
            schedule(seed, strict)
        except AssertionError as error:
            failed += 1
            print(f"seed {seed}: {error}")
    print(f"{failed} of {last - first} schedules failed, {time.process_time() - began:.0f} s of one processor")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:] if word != "least"]
    if len(numbers) == 1:
        World.shows = True
        schedule(numbers[0], "least" not in sys.argv)
    else:
        main(*numbers, "least" not in sys.argv)
