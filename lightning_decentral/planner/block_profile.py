"""What each block of a network costs in one training step.

    seconds(block) = median over passes of the lap between its boundaries, on the way there and on the way back
    update(block)  = seconds of the whole update * (its update alone) / (sum over blocks of theirs alone)

A boundary is the input of a module: there a forward goes from one block to the next, and the gradient of that input is
complete when the backward comes back. A parameter belongs to the block in whose backward its gradient is complete, so
a tied one to the lower: when that block is done the gradient may travel.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_decentral.partial.compute.block_cost import measure, parameter_bytes
from lightning_decentral.partial.compute.verify import Run
from lightning_decentral.shared.compute.device import duration, laps
from lightning_decentral.shared.plan.profile import BlockCost

WARM_UP = 2
REPEATS = 7

Seconds = list[float]


def measure_blocks(
    root: nn.Module,
    names: Sequence[str],
    run: Run,
    optimizers: Sequence[Optimizer],
    device: torch.device,
    done: Callable[[], None] = lambda: None,
) -> tuple[BlockCost, ...]:
    """The blocks of a step, from the inputs to the loss; one where there are no names.

    Args:
        names: modules at whose inputs a block ends and the next begins (`partial.joints`).
        run: one forward; its loss.
        optimizers: of the parameters. Their moments take part in the measurement, the weights stay.
        done: called after each of `WARM_UP + REPEATS` passes.
    """
    members = _members(root, names, run, device)
    sizes = [parameter_bytes(parameters) for parameters in members]
    saved = [cost.saved_bytes for cost in measure(root, names, sizes, run)]
    passes = [_pass(root, names, run, device, done) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
    forward = _medians([p.forward() for p in passes])
    backward = _medians([p.backward() for p in passes])
    update = _update(optimizers, members, device)
    root.zero_grad(set_to_none=True)
    titles = ["inputs", *names] if names else ["all"]
    outputs = [*passes[-1].output_bytes[1:], 0]
    rows = zip(titles, forward, backward, update, sizes, saved, outputs, strict=True)
    return tuple(BlockCost(*row) for row in rows)


def _followed(*values: Any) -> list[Tensor]:
    """Distinct tensors, parameters aside, through which a gradient flows."""
    tensors = dict.fromkeys(leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return [t for t in tensors if t.requires_grad and not isinstance(t, nn.Parameter)]


class _Pass:
    """One forward and backward with a lap at each boundary.

    Attributes:
        block: whose backward runs.
        output_bytes: of what enters each block, by block; the first one's aren't counted.
    """

    def __init__(self, root: nn.Module, names: Sequence[str], device: torch.device) -> None:
        self.block = len(names)
        self.output_bytes = [0] * (len(names) + 1)
        self._laps = laps(device)
        self._there = [self._laps.lap()]
        self._back: dict[int, int] = {}
        self._hooks = [
            root.get_submodule(name).register_forward_pre_hook(partial(self._enter, block), with_kwargs=True)
            for block, name in enumerate(names, start=1)
        ]

    def turn(self) -> None:
        """The forward is over."""
        for hook in self._hooks:
            hook.remove()  # what activation checkpointing runs again is backward
        self._hooks = []
        self._there.append(self._laps.lap())

    def finish(self) -> None:
        """So is the backward."""
        self._end = self._laps.lap()
        for hook in self._hooks:
            hook.remove()

    def forward(self) -> Seconds:
        """By block."""
        at = self._laps.seconds()
        stamps = [at[lap] for lap in self._there]
        return [after - before for before, after in pairwise(stamps)]

    def backward(self) -> Seconds:
        """By block; a boundary that no gradient crosses ends with the whole."""
        at = self._laps.seconds()
        before, found = at[self._there[-1]], []
        for block in range(len(self._there) - 2, -1, -1):
            after = max(before, at[self._back.get(block, self._end)])
            found.append(after - before)
            before = after
        return found[::-1]

    def _enter(self, block: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._there.append(self._laps.lap())
        for tensor in _followed(args, kwargs):
            self.output_bytes[block] += tensor.nbytes
            tensor.register_hook(partial(self._leave, block))

    def _leave(self, block: int, _: Tensor) -> None:
        self.block = min(self.block, block - 1)
        self._back[block] = self._laps.lap()


def _pass(root: nn.Module, names: Sequence[str], run: Run, device: torch.device, done: Callable[[], None]) -> _Pass:
    root.zero_grad(set_to_none=True)
    found = _Pass(root, names, device)
    loss = run()
    found.turn()
    loss.backward()
    found.finish()
    done()
    return found


def _members(root: nn.Module, names: Sequence[str], run: Run, device: torch.device) -> list[list[nn.Parameter]]:
    """Parameters by block; one that no gradient reached isn't trained and is nowhere."""
    members: list[list[nn.Parameter]] = [[] for _ in range(len(names) + 1)]
    found = _Pass(root, names, device)
    trained = [p for p in root.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(lambda p: members[found.block].append(p)) for p in trained]
    try:
        loss = run()
        found.turn()
        loss.backward()
    finally:
        found.finish()
        for hook in hooks:
            hook.remove()
    root.zero_grad(set_to_none=True)
    return members


def _medians(rows: Sequence[Seconds]) -> Seconds:
    return [median(column) for column in zip(*rows, strict=True)]


def _update(optimizers: Sequence[Optimizer], members: Sequence[list[nn.Parameter]], device: torch.device) -> Seconds:
    """With the gradients that are there, at a learning rate of 0."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    rates = [group["lr"] for group in groups]

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def alone(block: int) -> float:
        kept = {p: p.grad for other in members if other is not members[block] for p in other}
        for parameter in kept:
            parameter.grad = None
        seconds = duration(step, device)
        for parameter, gradient in kept.items():
            parameter.grad = gradient
        return seconds if members[block] else 0.0

    try:
        for group in groups:
            group["lr"] = 0.0
        times = [(duration(step, device), [alone(b) for b in range(len(members))]) for _ in range(1 + REPEATS)][1:]
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
    parts = _medians([part for _, part in times])
    return [median(whole for whole, _ in times) * part / (sum(parts) or 1.0) for part in parts]
