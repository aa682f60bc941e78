"""Runner of a stage, step after step: its channel, message shapes, tied weights, and sums over stages after a step."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_decentral.pipeline.compute.kv_cache import KVCache
from lightning_decentral.pipeline.compute.model import Call, Pipelined, Shape, StagePlace
from lightning_decentral.pipeline.compute.stage import Activations, Stage, put_back, unchanged
from lightning_decentral.pipeline.compute.weight_grad import SplitWeights
from lightning_decentral.pipeline.plan.schedule import Action, Kind, Posts, Schedule, in_step, two_ahead
from lightning_decentral.pipeline.wire.executor import Boundary, Channel, Clock, Edges, Executor, LossOf, joined
from lightning_decentral.shared.compute.modules import evaluating
from lightning_decentral.shared.wire.objects import gather_objects, gather_rows
from lightning_decentral.shared.wire.transport import Message, Transport

T = TypeVar("T")
TIED = (1 << 24) - 1  # a tag that no chunk has
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Program = tuple[Sequence[Action], Posts]  # Actions of a stage in a step, and when it posts its receives.


class StageRunner:
    """Runs one stage of one pipeline."""

    def __init__(
        self,
        model: Pipelined,  # after `keep(place)`
        place: StagePlace,
        over: Transport | None,  # the stages, for small messages; None: a single stage
        edges: Edges,  # to the neighbours, for hidden states and gradients
        *,
        schedule: Schedule,
        activations: Activations,
        boundary: Boundary,
        device: torch.device,
        hosts: Transport | None = None,  # the same over CPU tensors, for what a step reports; None: a single stage
    ) -> None:
        self.model, self.place, self.over, self.hosts = model, place, over, hosts
        self._edges, self.schedule, self._activations = edges, schedule, activations
        self._boundary, self.device = boundary, device
        self._shapes: dict[torch.Size, list[Shape]] = {}
        self._programs: dict[tuple[int, int], Program] = {}
        self._known_repeatable = False
        self.rank = 0 if over is None else over.rank
        self.size = 1 if over is None else over.size

    def train(
        self, calls: Sequence[Call], slices: Sequence[int], loss_of: LossOf, own: Clock = time.thread_time
    ) -> Executor:
        """Run forward and backward of all micro-batches; gradients are added to `.grad`. Collective."""
        return self._run(calls, slices, loss_of, self.program(len(calls), len(slices)), own)

    def program(self, microbatches: int, slices: int) -> Program:
        """Actions and receives of a training step; the same object for the same numbers."""
        if (microbatches, slices) not in self._programs:
            stages = self.schedule.actions(self.size, microbatches, slices)
            self._programs[microbatches, slices] = self._posting(stages, slices)
        return self._programs[microbatches, slices]

    def _posting(self, stages: Sequence[Sequence[Action]], slices: int) -> Program:
        own = stages[self.rank]
        queued = self.over is not None and self.over.queued
        return own, in_step(stages, slices)[self.rank] if queued else two_ahead(own)

    def evaluate(self, call: Call, slices: Sequence[int]) -> Tensor:
        """Return the model's output on every stage. Collective. ValueError: its inputs differ from the last stage's."""
        stages = self.schedule.actions(self.size, 1, len(slices))
        forward = [[action for action in actions if action.kind is Kind.FORWARD] for actions in stages]
        with torch.no_grad():
            executor = self._run([call], slices, lambda _, output: output, self._posting(forward, len(slices)))
        output = joined(executor.stage.outputs[0]) if self.place.last else None
        if self.over is None:
            assert output is not None
            return output
        # Only the last stage knows dtype and shape: they are sent first, with a checksum of the inputs.
        head = torch.zeros(11, dtype=torch.int64, device=self.device)
        mine = torch.tensor(checksum([call.inputs.cpu()]), dtype=torch.float64).view(torch.int64)
        if output is not None:
            head[: 2 + output.dim()] = torch.tensor([DTYPES.index(output.dtype), output.dim(), *output.shape])
            head[-1] = mine
        self.over.broadcast(head, self.size - 1).wait()
        kind, dims, *shape, theirs = head.tolist()
        if theirs != int(mine):
            raise ValueError(
                f"an evaluation gives {type(self.model.module).__name__} different inputs on stage {self.rank} and on "
                "the last stage: give every stage the same batches, and draw from generators that all stages seed alike"
            )
        values = torch.empty(shape[:dims], dtype=DTYPES[kind], device=self.device)
        if output is not None:
            values.copy_(output)
        self.over.broadcast(values, self.size - 1).wait()
        return values

    def _run(
        self,
        calls: Sequence[Call],
        slices: Sequence[int],
        loss_of: LossOf,
        program: Program,
        own: Clock = time.thread_time,
    ) -> Executor:
        weights = SplitWeights() if self.schedule.splits else None
        stage = Stage(self.model, self.place, calls, slices, self._activations, weights)
        executor = Executor(stage, self.channel(calls, stage.bounds), loss_of, own)
        repeated = self._activations.repeats and torch.is_grad_enabled()
        # Checked the first time: ValueError if this model can't run in slices, or run again.
        first = not self._known_repeatable and (len(slices) > 1 or repeated)
        sliced = "slices of a sequence", "train with slicing=Uniform(1)"
        again = "a forward and its recomputation", "train with activations=Keep()"
        with unchanged(self.model.module, *(again if repeated else sliced)) if first else nullcontext():
            executor.run(*program)
        self._known_repeatable |= first
        return executor

    def channel(self, calls: Sequence[Call], bounds: Sequence[tuple[int, int]]) -> Channel:
        """Make the channel to the neighbours for one step with these calls and slice bounds."""
        shapes: dict[tuple[int, int, int], Shape] = {}  # computed once a step: each is used twice a message
        places = [(m, s, call, ends) for m, call in enumerate(calls) for s, ends in enumerate(bounds)]
        for microbatch, index, call, ends in places if self.over is not None else ():
            known = self.model.shape(call, *ends)
            if known is None and call.inputs.shape not in self._shapes:
                self._learn(call)
            rows = self._shapes[call.inputs.shape] if known is None else [known] * self.size
            shapes.update({(microbatch, index, sender): shape for sender, shape in enumerate(rows)})
        return Channel(self._edges, shapes, self.device, self._boundary)

    @torch.no_grad()
    def _learn(self, call: Call) -> None:
        """Learn unknown shapes: run zeros once through all stages, one after the other. Collective."""
        shapes: list[Shape] = []
        # In evaluation mode: dropout draws no numbers, and running statistics don't change.
        with evaluating(self.model.module), put_back(self.model.module):
            for r in range(self.size):
                mine: Shape | None = None
                if r == self.rank:
                    shape, dtype = shapes[-1] if shapes else ((), torch.float32)
                    hidden = None if self.place.first else torch.zeros(shape, dtype=dtype, device=self.device)
                    output = self.model.forward(self.place, call, hidden, KVCache(1), 0, 1)
                    mine = tuple(output.shape), output.dtype
                found = self.gather(mine)[r]
                assert found is not None
                shapes.append(found)
        self._shapes[call.inputs.shape] = shapes

    def gather(self, value: T) -> list[T]:
        """Gather a small value from every stage. Collective."""
        return [value] if self.over is None else gather_objects(self.over, value)

    def total(self, number: Tensor) -> Tensor:  # (..), in place
        """Sum a number over the stages, in place. Collective."""
        if self.over is None:
            return number
        self.over.all_reduce(number).wait()
        return number

    def tie(self, tied: Mapping[nn.Parameter, Sequence[int]], outside: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of trained parameters that stand on several stages. Collective."""
        if self.over is None:
            return
        for parameter, stages in ((p, stages) for p, stages in tied.items() if p.requires_grad):
            mine = _gradient(parameter)
            rows = {r: mine if r == self.rank else torch.empty_like(mine) for r in stages}
            sends = [Message(r, mine, TIED) for r in stages if r != self.rank]
            kept, landing = self.over.exchange(sends, [Message(m.peer, rows[m.peer], TIED) for m in sends])
            for pending in (*landing, *kept):
                pending.wait()
            # In one order, to the same bits: all holders make the same update.
            parameter.grad = reduce(torch.add, [rows[r] for r in stages])
        for parameter in (p for p in outside if p.requires_grad):
            parameter.grad = self.total(_gradient(parameter))


def checksum(inputs: Sequence[Tensor]) -> float:
    """Checksum of the inputs of all calls, on the host."""
    result = 0.0
    for tensor in inputs:
        flat = tensor.flatten().double()
        # Weighted by position: the same tokens in another order are another batch.
        result += float((flat * (torch.arange(flat.numel(), dtype=torch.float64) % 1009 + 1)).sum())
    return result


def rows_of(row: Tensor, over: Transport | None) -> Tensor:  # (n,)
    """Gather every stage's row on its device: [stages, n]. Collective."""
    return row[None] if over is None else gather_rows(over, row)


def _gradient(parameter: nn.Parameter) -> Tensor:
    # Zeros if there is no gradient: the other stages wait for a message.
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
