"""Measures blocks by hooks at their inputs: seconds of forward and backward, bytes saved for the backward pass.

    seconds(block) = time between its boundaries, in the forward and in the backward pass

A boundary is the input of a module: the forward pass enters the next block there, and when the gradient of that input
is complete the backward pass leaves it."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_decentral.shared.compute.hardware import laps
from lightning_decentral.shared.plan.profile import BlockCost

TIMED_RUNS = 3

Run = Callable[[], Tensor]
Seconds = list[float]


class BlockPass:
    """Times one forward pass, and a backward pass if there is one, with a lap at each boundary."""

    def __init__(self, root: nn.Module, names: Sequence[str], device: torch.device) -> None:
        # Blocks that the forward has come to, in order, but for what runs before the first boundary, 0.
        self.entered: list[int] = []
        self.block = len(names)  # the block whose backward pass runs
        self.output_bytes = [0] * (len(names) + 1)  # bytes of each block's input; the first block's aren't counted
        self._names = names
        self._parameters = {p.untyped_storage().data_ptr() for p in root.parameters()}
        self._saved: dict[int, tuple[int, int]] = {}
        self._back: dict[int, int] = {}
        self._hooks = [
            root.get_submodule(name).register_forward_pre_hook(partial(self._enter, block), with_kwargs=True)
            for block, name in enumerate(names, start=1)
        ]
        self._laps = laps(device)
        self._there = [self._laps.lap()]

    def run_forward(self, run: Run) -> Tensor:
        try:
            return run()
        finally:
            for hook in self._hooks:
                hook.remove()  # a forward pass that activation checkpointing repeats counts as backward
            self._there.append(self._laps.lap())

    def run(self, run: Run) -> None:
        self.run_forward(run).backward()
        self._end = self._laps.lap()

    def watch_saved(self, run: Run) -> None:
        """Run the forward pass and record the tensors that it saves for the backward pass."""
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            loss = self.run_forward(run)  # kept alive: the address of a freed storage might be given to another one
        del loss

    def forward(self) -> Seconds:
        at = self._laps.seconds()
        stamps = [at[lap] for lap in self._there]
        found = [0.0] * (len(self._names) + 1)
        # Where the network runs again in a step, seconds before its first boundary count to the block that ran last.
        for block, (before, after) in zip([0, *self.entered], pairwise(stamps), strict=True):
            found[block] += after - before
        return found

    def backward(self) -> Seconds:
        """Return backward seconds by block; a boundary that no gradient crosses ends with the backward pass."""
        at = self._laps.seconds()
        before, found = at[self._there[-1]], []
        for block in range(len(self._there) - 2, -1, -1):
            after = max(before, at[self._back.get(block, self._end)])
            found.append(after - before)
            before = after
        return found[::-1]

    def saved_bytes(self) -> list[int]:
        """Return bytes saved for the backward pass by block: distinct storages, without parameters."""
        blocks = range(len(self._names) + 1)
        return [sum(size for owner, size in self._saved.values() if owner == block) for block in blocks]

    @property
    def passes(self) -> int:
        """Return how many times the network ran in the step."""
        return len(self.entered) // max(1, len(self._names))

    def refuse_another_order(self) -> None:
        """Raise ValueError where the forward pass doesn't cross the boundaries in order, each once in a pass."""
        if self.entered != list(range(1, len(self._names) + 1)) * self.passes or (self._names and not self.passes):
            passed = ", ".join(self._names[block - 1] for block in self.entered) or "none of them"
            wanted = ", ".join(self._names)
            raise ValueError(f"the forward doesn't pass {wanted} in this order, each once: it passes {passed}")

    def _enter(self, block: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.entered.append(block)
        self._there.append(self._laps.lap())
        distinct = dict.fromkeys(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        # Tensors through which a gradient flows on to the block before.
        for tensor in (t for t in distinct if t.requires_grad and not isinstance(t, nn.Parameter)):
            self.output_bytes[block] += tensor.nbytes
            tensor.register_hook(partial(self._leave, block))

    def _leave(self, block: int, _: Tensor) -> None:
        self.block = min(self.block, block - 1)
        self._back[block] = self._laps.lap()

    def _save(self, tensor: Tensor) -> Tensor:
        # What several operations save counts once, for the highest block that needs it; parameters are there anyway.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._saved[storage.data_ptr()] = self.entered[-1] if self.entered else 0, storage.nbytes()
        return tensor


def measure(root: nn.Module, names: Sequence[str], parameter_bytes: Sequence[int], run: Run) -> tuple[BlockCost, ...]:
    """Measure blocks: before the first named module's input, from each named module to the next, behind the last. Runs
    the forward pass a few times; each block's seconds are its shortest. ValueError: the forward pass doesn't enter the
    modules in this order, each once in a pass."""
    device = next((p.device for p in root.parameters()), torch.device("cpu"))
    passes: list[BlockPass] = []
    for _ in range(1 + TIMED_RUNS):
        passes.append(BlockPass(root, names, device))
        passes[-1].watch_saved(run)
        passes[-1].refuse_another_order()
    # The first pass warms up and is left out.
    seconds = [min(times) for times in zip(*(p.forward() for p in passes[1:]), strict=True)]
    titles = ["inputs", *names] if names else ["all"]
    rows = zip(titles, seconds, parameter_bytes, passes[-1].saved_bytes(), strict=True)
    return tuple(BlockCost(n, forward_seconds=s, parameter_bytes=p, saved_bytes=b) for n, s, p, b in rows)


def parameter_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of the distinct parameters."""
    return sum(p.numel() * p.element_size() for p in dict.fromkeys(parameters))
