"""Turns of jobs' workers, by events: one piece on a device at a time, one order of gangs, nobody waits in vain."""

import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from lightning_decentral.sweep.plan.arbiter import Instruction, TurnReport
from lightning_decentral.sweep.plan.gang_arbiter import LEAST, PATIENCE_SECONDS, WINDOW, GangArbiter
from lightning_decentral.sweep.plan.gangs import ComplementaryPairing, Gang, LatinSquare, Turns

Piece = tuple[str, int]


class World:
    """Jobs that train under the arbiter, in simulated time; before the next forward all workers of a job meet."""

    def __init__(self, jobs: dict[str, Sequence[float]], iterations: dict[str, int], **options: Any) -> None:
        self.jobs, self.left, self.iterations = jobs, dict(iterations), iterations
        self.arbiter = GangArbiter([f"cpu:{i}" for i in range(len(next(iter(jobs.values()))))], **options)
        self.now, self.order = 0.0, dict[str, list[str]]()  # {device: jobs in the order of their pieces}
        self.events: list[tuple[float, str, int]] = []  # ends of pieces
        self.ended: dict[str, float] = {}
        self.met: dict[str, int] = {}
        for name in jobs:
            self.arbiter.join(name, len(jobs[name]))
        for name in jobs:
            self.ask(name)
        self.settle()

    def ask(self, name: str) -> None:
        self.met[name] = 0
        for rank in range(len(self.jobs[name])):
            self.arbiter.request(f"{name}/{rank}")

    def settle(self) -> None:
        for seat, instruction in self.arbiter.settle(self.now):
            assert instruction is Instruction.RUN
            name, _, rank = seat.partition("/")
            place = self.arbiter.place(seat)
            assert place is not None
            self.order.setdefault(place, []).append(name)
            self.events.append((self.now + self.jobs[name][int(rank)], name, int(rank)))

    def run(self) -> None:
        while self.events:
            self.events.sort()
            self.now, name, rank = self.events.pop(0)
            self.arbiter.give_back(f"{name}/{rank}", TurnReport(piece_seconds=self.jobs[name][rank]), self.now)
            self.met[name] += 1
            if self.met[name] == len(self.jobs[name]):
                self.left[name] -= 1
                if self.left[name]:
                    self.ask(name)
                else:
                    self.ended[name] = self.now
                    self.arbiter.leave(name, self.now)
            self.settle()
        assert len(self.ended) == len(self.jobs), "a job waits for ever"


@pytest.mark.parametrize("seed", range(20))
def test_all_jobs_end_and_every_device_runs_one_piece_at_a_time_in_one_order(seed: int) -> None:
    draw = Random(seed)
    size = draw.randint(2, 4)
    jobs = {str(j): [draw.uniform(0.1, 2.0) for _ in range(size)] for j in range(draw.randint(1, 6))}
    world = World(jobs, {name: draw.randint(1, 30) for name in jobs})
    world.run()
    spans = list(world.arbiter.spans().values())
    for device in world.arbiter.devices:
        own = sorted((span for span in spans if span.worker == device), key=lambda span: span.start)
        assert all(a.finish <= b.start + 1e-9 for a, b in pairwise(own))
    assert len({tuple(order) for order in world.order.values()}) == 1, "the same jobs in the same order everywhere"
    order = next(iter(world.order.values()))
    assert len(world.ended) == len(jobs)
    assert sum(map(order.count, jobs)) == len(order) == sum(world.iterations.values())


@pytest.mark.parametrize(
    ("jobs", "cycle"),
    [
        ({"a": (2.0, 3.0), "b": (2.0, 3.0)}, ComplementaryPairing()),
        ({"a": (1.0, 2.0, 3.0), "b": (1.0, 2.0, 3.0), "c": (1.0, 2.0, 3.0)}, LatinSquare()),
    ],
)
def test_measured_jobs_run_in_the_cycle_that_their_pairing_promises(jobs: Any, cycle: Any) -> None:
    turns: Turns = cycle.turns([Gang(name, seconds) for name, seconds in jobs.items()])
    iterations = 200
    world = World(jobs, dict.fromkeys(jobs, iterations))
    world.run()
    first = (LEAST + 2) * turns.unaware_seconds
    assert turns.cycle_seconds * iterations <= world.now <= turns.cycle_seconds * iterations + first
    said = f"{', '.join(jobs)} takes {turns.cycle_seconds:.3g} s, one job after the other {turns.unaware_seconds:.3g} s"
    assert f"JigSaw: an iteration of each of {said}" in world.arbiter.remarks


def test_even_jobs_gain_nothing_and_one_line_says_so() -> None:
    world = World({"a": (3.0, 3.0), "b": (2.0, 2.0)}, {"a": 50, "b": 80})
    world.run()
    assert world.arbiter.remarks == ["JigSaw gains nothing for a, b: a cycle takes 5 s, one job after the other 5 s"]


def test_a_job_that_has_ended_leaves_the_others_placed_anew() -> None:
    world = World({"a": (1.0, 3.0), "b": (1.0, 3.0), "c": (3.0, 1.0)}, {"a": 90, "b": 90, "c": 30})
    world.run()
    assert "JigSaw: an iteration of each of a, b takes 4 s, one job after the other 6 s" in world.arbiter.remarks


@pytest.mark.parametrize("how", ["left", "gone"])
def test_a_worker_that_ends_keeps_nobody_waiting(how: str) -> None:
    arbiter = GangArbiter(["cpu:0", "cpu:1"])
    for name in "ab":
        arbiter.join(name, 2)
        for rank in (0, 1):
            arbiter.request(f"{name}/{rank}")
    assert [seat for seat, _ in arbiter.settle(0.0)] == ["a/0", "a/1"]
    end = {"left": lambda: arbiter.left("b/1"), "gone": lambda: arbiter.gone("b/1", 1.0)}[how]
    end()
    # b/0 was in the queue: as its fellow is gone, it runs at once, or in its order.
    alone = [seat for seat, _ in arbiter.settle(1.0)]
    arbiter.give_back("a/0", TurnReport(), 2.0)
    arbiter.give_back("a/1", TurnReport(), 2.0)
    assert [*alone, *(seat for seat, _ in arbiter.settle(2.0))] == ["b/0"]
    arbiter.give_back("b/0", TurnReport(), 3.0)
    arbiter.request("b/0")
    assert arbiter.settle(3.0) == [("b/0", Instruction.RUN)], "its next collective call will find out"
    assert arbiter.place("b/0") is None
    arbiter.request("b/1")  # of the job's next Trainer
    assert [seat for seat, _ in arbiter.settle(4.0)] == ["b/1"]


def test_who_dies_with_a_device_frees_its_jobs_devices() -> None:
    arbiter = GangArbiter(["cpu:0", "cpu:1"])
    for name in "ab":
        arbiter.join(name, 2)
        for rank in (0, 1):
            arbiter.request(f"{name}/{rank}")
    arbiter.settle(0.0)
    arbiter.gone("a/1", 1.0)
    assert [seat for seat, _ in arbiter.settle(1.0)] == ["b/0", "b/1"]
    arbiter.leave("a", 2.0)
    assert {span.finish for span in arbiter.spans().values()} == {1.0}


def test_nobody_waits_longer_than_the_patience() -> None:
    arbiter = GangArbiter(["cpu:0", "cpu:1"])
    for name in "ab":
        arbiter.join(name, 2)
    arbiter.request("a/0")
    assert arbiter.settle(0.0) == []
    assert arbiter.rests_seconds(1.0) == PATIENCE_SECONDS - 1
    assert arbiter.settle(PATIENCE_SECONDS) == [("a/0", Instruction.RUN)], "a/1 doesn't ask"
    arbiter.request("a/1")
    assert arbiter.settle(11.0) == [("a/1", Instruction.RUN)], "a/0 has passed"
    for rank in (0, 1):
        arbiter.request(f"b/{rank}")
    assert arbiter.settle(12.0) == [("b/0", Instruction.RUN)]
    assert arbiter.settle(11.0 + PATIENCE_SECONDS) == [("b/1", Instruction.RUN)], "a/1 hangs"
    assert math.isfinite(arbiter.rests_seconds(21.0))


def test_none_runs_before_all_that_belong_together_have_asked() -> None:
    arbiter = GangArbiter(["cpu:0", "cpu:1"], together=("a", "b"))
    for name in "ab":
        arbiter.join(name, 2)
    arbiter.request("a/0")
    arbiter.request("a/1")
    assert arbiter.settle(1.0) == []
    arbiter.request("b/0")
    arbiter.request("b/1")
    assert [seat for seat, _ in arbiter.settle(3.0)] == ["a/0", "a/1"]
    assert arbiter.opened == 3.0


def test_on_gpus_workers_are_placed_before_they_start_by_what_is_forecast() -> None:
    given = {"a": (2.0, 3.0), "b": (2.0, 3.0), "c": (1.0, 1.0)}
    arbiter = GangArbiter(["cuda:0", "cuda:1"], given)
    homes = [arbiter.join(name, 2).home for name in ("a", "b", "c", "unknown")]
    assert homes[0] == tuple(reversed(homes[1])), "the deep worker of one beside the other's shallow one"
    assert homes[3] == ("cuda:0", "cuda:1")


def test_a_piece_that_takes_another_time_is_noticed_within_the_window() -> None:
    world = World({"a": (3.0, 3.0), "b": (3.0, 3.0)}, {"a": 20, "b": 20})
    while world.events and world.left["a"] > 10:
        world.events.sort()
        world.now, name, rank = world.events.pop(0)
        world.arbiter.give_back(f"{name}/{rank}", TurnReport(piece_seconds=world.jobs[name][rank]), world.now)
        world.met[name] += 1
        if world.met[name] == 2:
            world.left[name] -= 1
            world.ask(name)
        world.settle()
    world.arbiter.remarks.clear()
    world.jobs = {"a": (1.0, 3.0), "b": (1.0, 3.0)}  # a warm-up at full depth has ended
    began, world.left = world.now, {"a": WINDOW + 40, "b": WINDOW + 40}
    world.run()
    assert any(remark.startswith("JigSaw: an iteration of each of a, b takes") for remark in world.arbiter.remarks)
    assert world.now - began < (WINDOW + 2) * 6 + 42 * 4
