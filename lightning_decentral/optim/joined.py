"""An update of many small parameters as one: elementwise optimizers over flat copies, with the bits of each by itself.

    x = cat(x_1 ... x_k)    g = cat(g_1 ... g_k)    x <- update(x, clip(g))    x_i <- its part of x

An operation on a few numbers takes as long as its call: for `gpt` AdamW's update takes half the time so. In float32 and
float64 a number's place in a tensor doesn't change what becomes of it; in bfloat16 it may, by torch's kernels.
Parameters that lie one behind the other, as in a bucket of gossip, are x where they lie: nothing is copied.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

ELEMENTWISE = (SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop)
EXACT = (torch.float32, torch.float64)
MOST_ELEMENTS = 2**16
"""Most elements of a small parameter: more fill a cache, and a copy of them costs more than a call."""


def parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of what lies one behind the other."""
    rows = flat.split([other.numel() for other in like])
    return [row.view(other.shape) for row, other in zip(rows, like, strict=True)]


def memory_of(members: Sequence[nn.Parameter]) -> Tensor | None:
    """Flat view of the memory of all parameters, if they lie one behind the other with nothing between; else None."""
    first, *_ = members
    storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
    place = start
    for p in members:
        if not p.is_contiguous() or (p.untyped_storage().data_ptr(), p.storage_offset()) != (storage, place):
            return None
        place += p.numel()
    return first.detach().as_strided((place - start,), (1,), start)


class Joined:
    """The small parameters of one group that have a gradient, as one."""

    def __init__(self, group: dict[str, Any], members: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> None:
        self.group, self.members, self._others = group, members, others
        memory = memory_of(members)
        self._copied = memory is None
        # What the optimizer sees in their place, with `state`, of which theirs are views.
        self.flat = nn.Parameter(members[0].new_zeros(sum(p.numel() for p in members)) if memory is None else memory)
        self.flat.grad = torch.zeros_like(self.flat)
        self._rows, self._gradients = parts(self.flat.detach(), members), parts(self.flat.grad, members)
        self._lie = [row.data_ptr() for row in self._rows]
        self.state: dict[str, Any] = {}
        self._states: list[dict[str, Any]] = []
        self._places: list[tuple[Tensor, int]] = []

    def stands(self, states: Mapping[Tensor, Any]) -> bool:
        """Return whether the same parameters have a gradient, and they and their states are where they were."""
        return (
            all(p.grad is not None for p in self.members)
            and all(p.grad is None or p.numel() > MOST_ELEMENTS for p in self._others)
            and all(states.get(p) is own for p, own in zip(self.members, self._states, strict=True))
            and (self._copied or [p.data_ptr() for p in self.members] == self._lie)
            and all(tensor.data_ptr() == place for tensor, place in self._places)
        )

    @torch.no_grad()
    def take(self) -> list[nn.Parameter]:
        """Take the parameters' values and gradients, views from now on; return what the group holds meanwhile."""
        if self._copied:
            torch._foreach_copy_(self._rows, [*self.members])
        torch._foreach_copy_(self._gradients, [p.grad for p in self.members if p.grad is not None])
        for p, gradient in zip(self.members, self._gradients, strict=True):
            p.grad = gradient
        return [self.flat, *self._others]

    @torch.no_grad()
    def give(self, states: dict[Tensor, Any]) -> None:
        """Give the parameters their new values, and in the first step their states."""
        if self._copied:
            torch._foreach_copy_([*self.members], self._rows)
        self.state = states.pop(self.flat, {})
        if not self._states:
            self._states = [states[p] for p in self.members]
            for key, value in self.state.items():
                split = isinstance(value, Tensor) and value.shape == self.flat.shape
                rows = parts(value, self.members) if split else [value for _ in self.members]
                for state, row in zip(self._states, rows, strict=True):
                    state[key] = row
                self._places += [(row, row.data_ptr()) for row in rows if isinstance(row, Tensor)]

    def part(self) -> None:
        """Give each parameter a state of its own from now on, a count of steps, too."""
        for state in self._states:
            state.update({key: value.clone() for key, value in state.items() if isinstance(value, Tensor)})


def joined(group: dict[str, Any], states: Mapping[Tensor, Any]) -> Joined | None:
    """None: there is nothing to gain, or bits might differ."""
    members = [p for p in group["params"] if p.grad is not None and p.numel() <= MOST_ELEMENTS]
    kinds = {(p.dtype, p.device.type, p.grad.layout) for p in members if p.grad is not None}
    if len(members) < 2 or len(kinds) > 1 or any(states.get(p) for p in members):
        return None
    ((dtype, device, layout),) = kinds
    if dtype not in EXACT or device != "cpu" or layout != torch.strided or group.get("fused"):
        return None
    inside = set(members)
    return Joined(group, members, [p for p in group["params"] if p not in inside])


class JoinedUpdate:
    """Steps an optimizer. From the first step on in which other parameters have a gradient, or somebody has moved a
    state, it steps as it does by itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._joined: list[Joined] | None = None if type(optimizer) in ELEMENTWISE else []

    def step(self, clip: float | None = None) -> None:
        """Step with gradients whose total norm is at most `clip`: `torch.nn.utils.clip_grad_norm_`, in place."""
        groups, states = self._optimizer.param_groups, self._optimizer.state
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        norm = get_total_norm(gradients) if clip else None
        if self._joined is None:
            self._joined = [found for group in groups if (found := joined(group, states))]
        elif not all(one.stands(states) for one in self._joined):
            for one in self._joined:
                one.part()
            self._joined = []
        with self._as_one(self._joined):
            if clip and norm is not None:
                clip_grads_with_norm_([p for group in groups for p in group["params"]], clip, norm)
            self._optimizer.step()

    @contextmanager
    def _as_one(self, some: Sequence[Joined]) -> Iterator[None]:
        """The optimizer sees flat parameters meanwhile."""
        states, own = self._optimizer.state, [one.group["params"] for one in some]
        for one in some:
            one.group["params"] = one.take()
            if one.state:
                states[one.flat] = one.state
        try:
            yield
        finally:
            for one, parameters in zip(some, own, strict=True):
                one.group["params"] = parameters
                one.give(states)
