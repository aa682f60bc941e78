"""NCCL's order without NCCL: what the stages' real executors ask of their transports, as events that need each other.

A communicator does its calls strictly in order, each once the compute stream has come to where it was made; a transfer
needs both ends at the head of theirs. A wait holds up the compute stream, never the host. A pair's first message in a
communicator holds up both hosts until the other's has come. A drained host waits for all that its device was given.

What all of this needs must have come before, so a run ends if and only if no event needs itself; and it's over as soon
as the longest chain of events is.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from time import process_time
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_decentral.pipeline import OneForwardOneBackward, TeraPipe, ZeroBubble
from lightning_decentral.pipeline.plan.schedule import Action, Costs, Kind, Posts, Schedule, halved, in_step, two_ahead
from lightning_decentral.pipeline.stage_layout import StageGroups, StageLayout
from lightning_decentral.pipeline.wire.executor import Channel, Executor
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Message, Transport

Name = Callable[[Sequence[int], int], Hashable]
"""(workers, how many groups were made before) -> the communicator that the group's calls go to."""
Posting = Callable[[Sequence[Sequence[Action]], int], Sequence[Posts]]
"""(all stages' actions, slices) -> when each posts its receives."""


def each_its_own(workers: Sequence[int], number: int) -> Hashable:
    return number


def ahead(stages: Sequence[Sequence[Action]], slices: int) -> list[Posts]:
    return [two_ahead(actions) for actions in stages]


def just_in_time(stages: Sequence[Sequence[Action]], slices: int) -> list[Posts]:
    return [{action: [action] for action in own if action.kind is not Kind.WEIGHTS} for own in stages]


class Call(NamedTuple):
    """One send or receive of one worker."""

    communicator: Hashable
    source: int
    target: int
    tag: int
    sends: bool

    @property
    def pair(self) -> tuple[Hashable, int, int]:
        return self.communicator, self.source, self.target


class Wait(NamedTuple):
    """For a call: its place in the worker's program."""

    call: int


class Compute(NamedTuple):
    action: Action


Program = list[Call | Wait | Compute]
Place = tuple[int, int]
"""(worker, entry of its program)"""


@dataclass
class Waits:
    """What `exchange` hands out."""

    program: Program
    call: int

    def wait(self) -> None:
        self.program.append(Wait(self.call))


class Recorder(Transport):
    """Writes down what one worker asks of one group."""

    def __init__(self, communicator: Hashable, workers: Sequence[int], worker: int, program: Program) -> None:
        self.rank, self.size = workers.index(worker), len(workers)
        self._communicator, self._workers, self._worker, self._program = communicator, workers, worker, program

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        assert len(sends) + len(receives) == 1, "the model knows single messages only"
        for m in (*sends, *receives):
            ends = (self._worker, self._workers[m.peer])
            ends = ends if sends else ends[::-1]
            self._program.append(Call(self._communicator, *ends, m.tag, bool(sends)))
        pending: Any = Waits(self._program, len(self._program) - 1)
        return [pending for _ in sends], [pending for _ in receives]


class Noted(Executor):
    """Writes down, too, when it would compute."""

    program: Program

    def _timed(self, action: Action) -> Any:
        self.program.append(Compute(action))
        return super()._timed(action)


class Nothing:
    """A stage that computes nothing."""

    hidden = torch.zeros(0)

    def __init__(self, rank: int, size: int, slices: int) -> None:
        self.place = SimpleNamespace(first=rank == 0, last=rank == size - 1)
        self.bounds = [(0, 0)] * slices
        self.calls = defaultdict(lambda: SimpleNamespace(inputs=self.hidden))
        self.outputs: dict[int, list[Tensor]] = {}

    def forward(self, microbatch: int, *_: Any) -> Tensor:
        self.outputs[microbatch] = [torch.zeros(0, 1)] * len(self.bounds)
        return self.hidden

    def backward(self, *_: Any) -> Tensor:
        return self.hidden

    def weights(self, *_: Any) -> None: ...


def programs(
    schedule: Schedule, stages: int, microbatches: int, slices: int, name: Name = each_its_own,
    posting: Posting = in_step,
) -> list[Program]:  # fmt: skip
    """What each worker of one pipeline calls: its groups, then one step."""
    actions = schedule.actions(stages, microbatches, slices)
    posts = posting(actions, slices)
    return [_program(actions, rank, slices, name, posts[rank]) for rank in range(stages)]


def _program(actions: list[list[Action]], rank: int, slices: int, name: Name, posts: Posts) -> Program:
    program: Program = []
    made: list[Sequence[Sequence[int]]] = []

    def group(groups: Sequence[Sequence[int]]) -> Transport | None:
        own = next((workers for workers in groups if rank in workers), None)
        made.append(groups)
        return Recorder(name(own, len(made) - 1), own, rank, program) if own else None

    wire: Any = SimpleNamespace(group=group, hosts=lambda groups: SimpleNamespace())
    stages = len(actions)
    edges = StageGroups(wire, StageLayout(stages, stages, stages), torch.device("cpu")).edges
    links = Channel(edges, defaultdict(lambda: ((0,), torch.float32)), torch.device("cpu"))
    stage: Any = Nothing(rank, stages, slices)
    executor = Noted(stage, links, lambda microbatch, output: output.sum(), own=lambda: 0.0)
    executor.program = program
    executor.run(actions[rank], posts)
    return program


@dataclass
class Events:
    """Numbered; each with its seconds and the events that must have come before it starts."""

    seconds: list[float] = field(default_factory=list)
    needs: list[list[int]] = field(default_factory=list)

    def add(self, *needs: int, seconds: float = 0.0) -> int:
        self.seconds.append(seconds)
        self.needs.append(list(needs))
        return len(self.seconds) - 1

    def last(self) -> float | None:
        """When the last one is over; None where some never come."""
        followers: list[list[int]] = [[] for _ in self.needs]
        for event, needs in enumerate(self.needs):
            for needed in needs:
                followers[needed].append(event)
        missing = [len(needs) for needs in self.needs]
        over = [0.0] * len(missing)
        ready = [event for event, count in enumerate(missing) if count == 0]
        came = 0
        while ready:
            event = ready.pop()
            came += 1
            over[event] += self.seconds[event]
            for follower in followers[event]:
                over[follower] = max(over[follower], over[event])
                missing[follower] -= 1
                if missing[follower] == 0:
                    ready.append(follower)
        return max(over) if came == len(over) else None


@dataclass(frozen=True)
class Device:
    """How devices behave.

    Args:
        connects: a pair's first message in a communicator holds up the hosts.
        rests: a send isn't over before its receive is posted; else NCCL's own memory takes the message.
        drains: (worker, entry) -> whether its host waits there for all that its device was given so far.
        seconds: of each action.
        message: seconds.
    """

    connects: bool = True
    rests: bool = True
    drains: Callable[[int, int], bool] = lambda worker, entry: False
    seconds: Costs = lambda action: 0.0
    message: float = 0.0

    def last(self, programs: Sequence[Program]) -> float | None:
        """When these programs are over; None where they never are."""
        events = Events()
        transfers = self._transfers(events, programs)
        places = [self._worker(events, worker, program, transfers) for worker, program in enumerate(programs)]
        if self.connects:
            for sent, heard in _firsts(programs):
                for own, other in ((sent, heard), (heard, sent)):
                    events.needs[places[own[0]][own[1]]].append(places[other[0]][other[1]] - 1)
        return events.last()

    def _transfers(self, events: Events, programs: Sequence[Program]) -> dict[Place, int]:
        """Of each call, what it comes to."""
        found = {}
        for sent, heard in _pairs(programs):
            found[sent] = events.add(seconds=self.message if self.rests else 0.0)
            found[heard] = found[sent] if self.rests else events.add(found[sent], seconds=self.message)
        return found

    def _worker(self, events: Events, worker: int, program: Program, transfers: dict[Place, int]) -> list[int]:
        """Adds the events of one worker; of each entry, that it was issued, one behind that its host has come there."""
        issued: list[int] = []
        heads: dict[Hashable, int] = {}
        stream = events.add()
        for entry, asked in enumerate(program):
            came = events.add(*issued[-1:])
            if self.drains(worker, entry):
                events.needs[came] += [stream, *heads.values()]
            issued.append(events.add(came))
            seconds = self.seconds(asked.action) if isinstance(asked, Compute) else 0.0
            stream = events.add(issued[-1], stream, seconds=seconds)
            if isinstance(asked, Wait):
                events.needs[stream].append(transfers[worker, asked.call])
            elif isinstance(asked, Call):
                transfer = transfers[worker, entry]
                events.needs[transfer] += [
                    stream,
                    *([heads[asked.communicator]] if asked.communicator in heads else []),
                ]
                heads[asked.communicator] = transfer
        return issued


def _pairs(programs: Sequence[Program]) -> Iterator[tuple[Place, Place]]:
    """(send, its receive): by order. That their tags are equal is seen to, not looked for."""
    calls: dict[Any, list[tuple[Place, Call]]] = defaultdict(list)
    for worker, program in enumerate(programs):
        for entry, asked in enumerate(program):
            if isinstance(asked, Call):
                calls[asked.pair, asked.sends].append(((worker, entry), asked))
    for pair in {pair for pair, _ in calls}:
        for (sent, a), (heard, b) in zip(calls[pair, True], calls[pair, False], strict=True):
            assert a.tag == b.tag, "another message than was expected"
            yield sent, heard


def _firsts(programs: Sequence[Program]) -> Iterator[tuple[Place, Place]]:
    seen = set()
    for sent, heard in _pairs(programs):
        asked = programs[sent[0]][sent[1]]
        assert isinstance(asked, Call)
        if asked.pair not in seen:
            seen.add(asked.pair)
            yield sent, heard


def ends(programs: Sequence[Program], **device: Any) -> bool:
    """Whether all workers come to the end of their programs."""
    return Device(**device).last(programs) is not None


def one(worker: int) -> Callable[[int, int], bool]:
    """One stage's host waits for its device, wherever it has come to."""
    return lambda other, entry: other == worker


def everyone(worker: int, entry: int) -> bool:
    """All hosts wait for their devices, all the time: where this ends, any waits of any stages do, at any moments."""
    return True


def backward_twice(action: Action) -> float:
    return {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}[action.kind]


def slower(schedule: Schedule, in_time: Sequence[Program], ahead_of_it: Sequence[Program]) -> float:
    """How many times longer a step takes where receives are posted in step instead of two ahead; a message takes a
    tenth of a forward chunk."""
    device = Device(seconds=halved(backward_twice) if schedule.splits else backward_twice, message=0.1)
    found, least = device.last(in_time), device.last(ahead_of_it)
    assert found is not None
    assert least is not None
    return found / least


def main() -> None:
    """Every schedule with 2 to 8 stages, 1 to 8 micro-batches, 1 to 16 slices; two ahead with some of them."""
    sizes = [*product(range(2, 9), range(1, 9), range(1, 17))]
    some = [*product(range(2, 9), (1, 4, 8), (1, 4, 16))]
    for schedule in (TeraPipe(), OneForwardOneBackward(), ZeroBubble()):
        begin = process_time()
        stuck = sum(not ends(programs(schedule, *size), drains=everyone) for size in sizes)
        print(f"{schedule}, in step, all stages drained: {stuck} of {len(sizes)} sizes deadlock", flush=True)
        pairs = [[programs(schedule, *size, posting=posting) for posting in (in_step, ahead)] for size in some]
        stuck = sum(not ends(before, drains=one(0)) for _, before in pairs)
        most = max(slower(schedule, now, before) for now, before in pairs)
        print(f"  two ahead, the first stage drained: {stuck} of {len(some)}; in step takes {most:.3f} times as long")
        print(f"  {process_time() - begin:.0f} s of a processor", flush=True)


if __name__ == "__main__":
    main()
