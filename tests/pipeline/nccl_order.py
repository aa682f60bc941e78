"""NCCL's order without NCCL: what the stages' real executors ask of their transports, played on a model of its streams.

A communicator does its calls strictly in order, each once the compute stream has come to where it was made; a transfer
needs both ends at the head of theirs. A wait holds up the compute stream, never the host. A pair's first message in a
communicator holds up both hosts until the other's has come.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_decentral.pipeline import OneForwardOneBackward, TeraPipe, ZeroBubble
from lightning_decentral.pipeline.plan.schedule import Schedule
from lightning_decentral.pipeline.stage_layout import StageGroups, StageLayout
from lightning_decentral.pipeline.wire.channel import Links
from lightning_decentral.pipeline.wire.executor import Executor
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Message, Transport

Name = Callable[[Sequence[int], int], Hashable]
"""(workers, how many groups were made before) -> the communicator that the group's calls go to."""


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


Program = list[Call | Wait]


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


class Nothing:
    """A stage that computes nothing."""

    chunks_held = 0
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


def programs(schedule: Schedule, stages: int, microbatches: int, slices: int, name: Name) -> list[Program]:
    """What each worker of one pipeline calls: its groups, then one step."""
    actions = schedule.actions(stages, microbatches, slices)
    return [_program(actions[rank], rank, stages, slices, name) for rank in range(stages)]


def _program(actions: Any, rank: int, stages: int, slices: int, name: Name) -> Program:
    program: Program = []
    made: list[Sequence[Sequence[int]]] = []

    def group(groups: Sequence[Sequence[int]]) -> Transport | None:
        own = next((workers for workers in groups if rank in workers), None)
        made.append(groups)
        return Recorder(name(own, len(made) - 1), own, rank, program) if own else None

    wire: Any = SimpleNamespace(group=group)
    edges = StageGroups(wire, StageLayout(stages, stages, stages), torch.device("cpu")).edges
    links = Links(edges, lambda action, stage: ((0,), torch.float32), torch.device("cpu"))
    stage: Any = Nothing(rank, stages, slices)
    Executor(stage, links, lambda microbatch, output: output.sum()).run(actions)
    return program


@dataclass
class Worker:
    """How far one worker has come."""

    program: Program
    host: int = 0
    compute: int = 0
    done: set[int] = field(default_factory=set)
    queues: dict[Hashable, list[int]] = field(default_factory=lambda: defaultdict(list))

    def arrive(self, number: int, came: dict[Any, set[int]], connects: bool) -> None:
        """The host goes on until a first message's other end is missing."""
        while self.host < len(self.program):
            call = self.program[self.host]
            if isinstance(call, Call) and connects:
                came[call.pair].add(number)
                if len(came[call.pair]) < 2:
                    return
            self.host += 1

    def go_on(self) -> None:
        """The compute stream goes on until a wait's transfer is missing."""
        while self.compute < self.host:
            at = self.program[self.compute]
            if isinstance(at, Wait):
                if at.call not in self.done:
                    return
            else:
                self.queues[at.communicator].append(self.compute)
            self.compute += 1

    def heads(self) -> dict[Call, int]:
        return {_call(self.program, queue[0]): queue[0] for queue in self.queues.values() if queue}

    def finish(self, call: Call) -> None:
        self.done.add(self.queues[call.communicator].pop(0))


def ends(programs: Sequence[Program], connects: bool = True) -> bool:
    """Whether all workers come to the end of their programs.

    Args:
        connects: whether a pair's first message holds up the hosts.
    """
    workers = [Worker(program) for program in programs]
    came: dict[Any, set[int]] = defaultdict(set)
    moved = True
    while moved:
        before = [(w.host, w.compute, len(w.done)) for w in workers]
        for number, worker in enumerate(workers):
            worker.arrive(number, came, connects)
            worker.go_on()
        _transfer(workers)
        moved = before != [(w.host, w.compute, len(w.done)) for w in workers]
    return all(w.compute == len(w.program) and not any(w.queues.values()) for w in workers)


def _transfer(workers: Sequence[Worker]) -> None:
    heads = [worker.heads() for worker in workers]
    for source, calls in enumerate(heads):
        for sent in calls:
            if not sent.sends:
                continue
            # By order: the tags of what meets are seen to be equal, not looked for.
            heard = next((c for c in heads[sent.target] if c.pair == sent.pair and not c.sends), None)
            if heard is not None:
                assert heard.tag == sent.tag, "another message than was expected"
                workers[source].finish(sent)
                workers[sent.target].finish(heard)


def _call(program: Program, place: int) -> Call:
    call = program[place]
    assert isinstance(call, Call)
    return call


def main() -> None:
    """Every schedule with 2 to 8 stages, 1 to 8 micro-batches, 1 to 16 slices; a minute."""
    sizes = [*product(range(2, 9), range(1, 9), range(1, 17))]
    for schedule in (TeraPipe(), OneForwardOneBackward(), ZeroBubble()):
        stuck = [size for size in sizes if not ends(programs(schedule, *size, lambda workers, number: number))]
        print(f"{schedule}: {len(stuck)} of {len(sizes)} sizes deadlock {stuck[:3]}", flush=True)


if __name__ == "__main__":
    main()
