"""Gradients of all workers by one forward and one backward over stacked parameters, where the module allows it.

    x [workers, ...]     loss_i = training_step(x_i, batch_i)     d (sum_i loss_i) / d x_i = the gradient of worker i

It is vmap over a functional call of worker 0's module (`torch.func`). Sums are rounded in another order than in a
worker's own forward: gradients are the same to rounding. Buffers (running statistics) are stacked and written back. Who
can't be stacked: random numbers in the step (dropout), as one draw for all is no worker's own; control flow by values;
whatever vmap has no rule for. `trial` finds out.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_decentral.planner.rehearsal.loop import loss_of
from lightning_decentral.planner.rehearsal.members.member import CPU
from lightning_decentral.planner.rehearsal.turns import Meeting, OwnTurn, generators, same
from lightning_decentral.planner.rehearsal.ways import Way
from lightning_decentral.planner.rehearsal.worker import Worker, quiet

LOGGING = ("log", "log_dict")
VALUES = (bool, int, float, str, type(None))
"""What a batch may hold beside tensors, alike for all workers."""


class _Step(nn.Module):
    """training_step as a forward, which is what `functional_call` calls."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, *batch: Any) -> Tensor:
        return loss_of(self.module.training_step(*batch))


class Stacked(Way):
    """Of workers whose modules are copies of one: all meet in their step, and the last one computes for all."""

    def __init__(self, workers: Sequence[Worker], turn: OwnTurn) -> None:
        self._workers = workers
        self._step = _Step(workers[0].module)
        self._batches: list[Sequence[Any]] = [()] * len(workers)
        self._losses: list[Tensor] | None = None
        self._parameters: dict[str, Tensor] = {}
        self._all_here = Meeting(turn, len(workers), self._compute)

    def forward(self, worker: int, step: Callable[..., Any], batch: Sequence[Any]) -> Any:
        self._batches[worker] = batch
        self._all_here()
        return step(*batch) if self._losses is None else self._losses[worker]

    @torch.no_grad()
    def backward(self, worker: int, call: Callable[[], None]) -> None:
        if self._losses is None:
            with torch.enable_grad():
                call()
            return
        for name, parameter in self._workers[worker].module.named_parameters(prefix="module"):
            new = self._parameters[name].grad
            if new is not None:  # what no optimizer has grows, as in a backward
                parameter.grad = new[worker] if parameter.grad is None else parameter.grad + new[worker]

    def close(self) -> None:
        self._all_here.close()

    @torch.enable_grad()
    def _compute(self) -> None:
        """Losses and gradients of each on its batch; no losses, and nothing done, where these can't be stacked."""
        rows, shapes = zip(*map(tree_flatten, self._batches), strict=True)
        if any(shape != shapes[0] for shape in shapes) or not all(map(_alike, zip(*rows, strict=True))):
            self._losses, self.together = None, False  # a shorter last batch of some, or names that differ
            return
        parameters, buffers = self._stacked(nn.Module.named_parameters), self._stacked(nn.Module.named_buffers)
        tensors = {place: torch.stack(row) for place, row in enumerate(zip(*rows, strict=True)) if _of_tensors(row)}

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], own: dict[int, Tensor]) -> Any:
            batch = tree_unflatten([own.get(place, value) for place, value in enumerate(rows[0])], shapes[0])
            values = {**parameters, **buffers}
            loss = functional_call(self._step, values, tuple(batch))
            return loss, {name: values[name].detach() for name in buffers}

        before = generators(CPU)
        with warnings.catch_warnings(), muted(self._step.module):
            warnings.simplefilter("ignore")  # of operations without a rule, taken row by row: a trial has timed that
            losses, after = vmap(one, randomness="error")(parameters, buffers, tensors)
        if not same(before, generators(CPU)):
            name = type(self._step.module).__name__
            raise ValueError(f"{name} drew random numbers, and one draw for all is no worker's own: give stacked=False")
        losses.sum().backward()
        self._parameters, self._losses, self.together = parameters, list(losses.detach()), True
        self._keep(after)

    def _stacked(self, named: Callable[..., Iterator[tuple[str, Tensor]]]) -> dict[str, Tensor]:
        own = [dict(named(worker.module, prefix="module")) for worker in self._workers]
        return {
            name: torch.stack([row[name].detach() for row in own]).requires_grad_(first.requires_grad)
            for name, first in own[0].items()
        }

    @torch.no_grad()
    def _keep(self, buffers: dict[str, Tensor]) -> None:
        for rank, worker in enumerate(self._workers):
            for name, buffer in worker.module.named_buffers(prefix="module"):
                buffer.copy_(buffers[name][rank])


@contextmanager
def muted(module: LightningModule) -> Iterator[None]:
    """Within, `self.log` says nothing: a value of all workers is no worker's metric."""
    own: dict[str, Any] = {name: module.__dict__.pop(name) for name in LOGGING if name in module.__dict__}
    quiet(module)
    try:
        yield
    finally:
        for name in LOGGING:
            module.__dict__.pop(name)
        module.__dict__.update(own)


def _of_tensors(row: Sequence[Any]) -> bool:
    return all(isinstance(value, Tensor) for value in row)


def _alike(row: Sequence[Any]) -> bool:
    first = row[0]
    if _of_tensors(row):
        return all((t.shape, t.dtype, t.device) == (first.shape, first.dtype, first.device) for t in row)
    return all(type(value) in VALUES and value == first for value in row)
