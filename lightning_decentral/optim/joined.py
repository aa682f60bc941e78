"""Update of many small parameters as one flat tensor by elementwise optimizers, with the bits of separate updates.

    x = cat(x_1 ... x_k)    g = cat(g_1 ... g_k)    x <- update(x, clip(g))    x_i <- its part of x

An operation on a few numbers takes as long as its call: joined, AdamW's update of `gpt` takes half the time. In float32
and float64 a number's position in a tensor doesn't change its result; in bfloat16 it may, by torch's kernels.
Parameters that are adjacent in memory, as in a bucket of gossip, are x without a copy."""

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
"""Largest number of elements of a small parameter: more fill a cache, and copying them costs more than a call."""


def parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a flat tensor into views of the shapes of `like`."""
    rows = flat.split([other.numel() for other in like])
    return [row.view(other.shape) for row, other in zip(rows, like, strict=True)]


def memory_of(members: Sequence[nn.Parameter]) -> Tensor | None:
    """Flat view of the memory of all parameters if they are adjacent without gaps; else None."""
    first, *_ = members
    storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
    place = start
    for p in members:
        if not p.is_contiguous() or (p.untyped_storage().data_ptr(), p.storage_offset()) != (storage, place):
            return None
        place += p.numel()
    return first.detach().as_strided((place - start,), (1,), start)


class Joined:
    """Joins the small parameters of a group that have a gradient into one flat parameter."""

    def __init__(self, group: dict[str, Any], members: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> None:
        self.group, self.members, self._others = group, members, others
        memory = memory_of(members)
        self._copied = memory is None
        # The flat parameter that the optimizer updates, with `state`; the parameters' states are views of it.
        self.flat = nn.Parameter(members[0].new_zeros(sum(p.numel() for p in members)) if memory is None else memory)
        self.flat.grad = torch.zeros_like(self.flat)
        self._rows, self._gradients = parts(self.flat.detach(), members), parts(self.flat.grad, members)
        self._lie = [row.data_ptr() for row in self._rows]
        self.state: dict[str, Any] = {}
        self._states: list[dict[str, Any]] = []
        self._places: list[tuple[Tensor, int]] = []

    def stands(self, states: Mapping[Tensor, Any]) -> bool:
        """Return whether the same parameters have gradients, and parameters and states haven't been replaced."""
        return (
            all(p.grad is not None for p in self.members)
            and all(p.grad is None or p.numel() > MOST_ELEMENTS for p in self._others)
            and all(states.get(p) is own for p, own in zip(self.members, self._states, strict=True))
            and (self._copied or [p.data_ptr() for p in self.members] == self._lie)
            and all(tensor.data_ptr() == place for tensor, place in self._places)
        )

    @torch.no_grad()
    def take(self) -> list[nn.Parameter]:
        """Join the parameters' values and gradients; return the parameters that the group has meanwhile."""
        if self._copied:
            torch._foreach_copy_(self._rows, [*self.members])
        torch._foreach_copy_(self._gradients, [p.grad for p in self.members if p.grad is not None])
        for p, gradient in zip(self.members, self._gradients, strict=True):
            p.grad = gradient
        return [self.flat, *self._others]

    @torch.no_grad()
    def give(self, states: dict[Tensor, Any]) -> None:
        """Copy the new values to the parameters, and in the first step give them their states."""
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
        """Give each parameter its own state from now on, its own count of steps included."""
        for state in self._states:
            state.update({key: value.clone() for key, value in state.items() if isinstance(value, Tensor)})


def joined(group: dict[str, Any], states: Mapping[Tensor, Any]) -> Joined | None:
    """Join a group's small parameters; None if that gains nothing, or bits might differ."""
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
    """Steps an optimizer with joined parameters, until other parameters have a gradient or a state has been replaced:
    from then on the optimizer steps separately."""

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
        """Replace the optimizer's small parameters by flat ones meanwhile."""
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
