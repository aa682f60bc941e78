"""Gradients of all workers by one forward and one backward over stacked parameters, where the module allows it.

    x [workers, ...]     loss_i = training_step(x_i, batch_i)     d (sum_i loss_i) / d x_i = the gradient of worker i

It is vmap over a functional call of worker 0's module (`torch.func`). Sums are rounded in another order than in a
worker's own forward: gradients are the same to rounding. Buffers (running statistics) are stacked and written back. Who
can't be stacked: random numbers in the step (dropout), as one draw for all is no worker's own; control flow by values;
whatever vmap has no rule for. `tried` finds out.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader

from lightning_decentral.planner.rehearsal.batches import shared_out
from lightning_decentral.planner.rehearsal.worker import Loop, Within, Worker, loss_of
from lightning_decentral.shared.compute import cuda

REPEATS = 3
"""Steps that `tried` times, each way."""
VALUES = (bool, int, float, str, type(None))
"""What a batch may hold beside tensors, alike for all workers."""


class _Step(nn.Module):
    """training_step as a forward, which is what `functional_call` calls."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any, index: int) -> Tensor:
        return loss_of(self.module.training_step(batch, index))


class Stack:
    """Of workers whose modules are copies of one."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._step = _Step(workers[0].module)

    def gradients(self, batches: Sequence[Any]) -> list[Tensor] | None:
        """As `Worker.gradients`, of each on its batch; None, and nothing done, where these can't be stacked."""
        rows, shapes = zip(*map(tree_flatten, batches), strict=True)
        if any(shape != shapes[0] for shape in shapes) or not all(map(_alike, zip(*rows, strict=True))):
            return None  # a shorter last batch of some, or names that differ
        parameters, buffers = self._stacked(nn.Module.named_parameters), self._stacked(nn.Module.named_buffers)
        tensors = {place: torch.stack(row) for place, row in enumerate(zip(*rows, strict=True)) if _of_tensors(row)}

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], own: dict[int, Tensor]) -> Any:
            batch = tree_unflatten([own.get(place, value) for place, value in enumerate(rows[0])], shapes[0])
            values = {**parameters, **buffers}
            loss = functional_call(self._step, values, (batch, self._workers[0].index))
            return loss, {name: values[name].detach() for name in buffers}

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of operations without a rule, taken row by row: a trial has timed that
            losses, after = vmap(one, randomness="error")(parameters, buffers, tensors)
        losses.sum().backward()
        self._hand_out(parameters, after)
        return list(losses.detach().double())

    def _stacked(self, named: Callable[..., Iterator[tuple[str, Tensor]]]) -> dict[str, Tensor]:
        own = [dict(named(worker.module, prefix="module")) for worker in self._workers]
        return {
            name: torch.stack([row[name].detach() for row in own]).requires_grad_(first.requires_grad)
            for name, first in own[0].items()
        }

    @torch.no_grad()
    def _hand_out(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        for rank, worker in enumerate(self._workers):
            worker.optimizer.zero_grad()
            for name, parameter in worker.module.named_parameters(prefix="module"):
                new = parameters[name].grad
                if new is not None:  # what no optimizer has grows, as in a backward
                    parameter.grad = new[rank] if parameter.grad is None else parameter.grad + new[rank]
            for name, buffer in worker.module.named_buffers(prefix="module"):
                buffer.copy_(buffers[name][rank])


def _of_tensors(row: Sequence[Any]) -> bool:
    return all(isinstance(value, Tensor) for value in row)


def _alike(row: Sequence[Any]) -> bool:
    first = row[0]
    if _of_tensors(row):
        return all((t.shape, t.dtype, t.device) == (first.shape, first.dtype, first.device) for t in row)
    return all(type(value) in VALUES and value == first for value in row)


def tried(module: LightningModule, loader: DataLoader[Any], workers: int, loop: Loop) -> tuple[float | None, str]:
    """(seconds of stacked gradients over those one after the other; None: they can't be stacked, and why).

    No reason where workers can't be computed at all: whoever trains them hears why.
    """
    try:
        batches, _ = shared_out(loader, workers)
        apart, together = (
            [Worker(copy.deepcopy(module), batches(rank), loop) for rank in range(workers)] for _ in range(2)
        )

        def one_by_one() -> object:
            return [worker.gradients(worker.batch(), Within()) for worker in apart]

        one_by_one()
    except Exception:  # the module's own
        return None, ""
    stack = Stack(together)

    def at_once() -> object:
        return stack.gradients([worker.batch() for worker in together])

    try:
        if at_once() is None:
            return None, "their batches differ in shape"
        if not all(map(_equal, apart, together)):
            return None, "stacked, their gradients are others"
        seconds = [[_seconds(call, loop.device) for call in (at_once, one_by_one)] for _ in range(REPEATS)]
    except Exception as error:  # whatever vmap refuses, and whatever the module does with a stacked tensor
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    stacked, after_another = map(min, zip(*seconds, strict=True))
    return stacked / after_another, ""


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    begun = monotonic()
    call()
    if device.type == "cuda":
        cuda.synchronize(device)
    return monotonic() - begun


def _equal(a: Worker, b: Worker) -> bool:
    """To rounding: the whole gradient, as some parameters' is nothing but rounding; and each buffer."""
    pairs = list(zip(a.module.parameters(), b.module.parameters(), strict=True))
    if any((p.grad is None) != (q.grad is None) for p, q in pairs):
        return False
    gradients = [(p.grad.double(), q.grad.double()) for p, q in pairs if p.grad is not None and q.grad is not None]
    off, size = (
        sum(float((x - y).square().sum()) for x, y in gradients),
        sum(float(x.square().sum()) for x, _ in gradients),
    )
    rounding = max((torch.finfo(p.dtype).eps for p, _ in pairs), default=0.0)
    buffers = zip(a.module.buffers(), b.module.buffers(), strict=True)
    return off <= rounding * size and all(torch.allclose(x, y, rtol=1e-3, atol=1e-5) for x, y in buffers)
