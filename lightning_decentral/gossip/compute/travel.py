"""States of an optimizer that travel with the parameters: how each does, and the buckets that hold one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.gossip.compute.combine.gossip import Gossip, Rate, check_rate
from lightning_decentral.gossip.plan.topology.combined import Every
from lightning_decentral.gossip.plan.topology.topology import Topology, at_least_one
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.shared.compute.buckets import Bucket, pack
from lightning_decentral.shared.compute.codec.casts import Plain
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.compute.layout import Place
from lightning_decentral.shared.plan.arguments import checked


@checked
@dataclass(frozen=True, kw_only=True)
class Travel:
    """s_i <- s_i + rate (sum_j w_ij sent_j - sent_i), for a state s of the optimizer, as `Gossip` does for parameters.

    The mean of the workers' states is kept; each one's own part of it still is its own gradients'. For states that are
    linear in the gradient (`momentum_buffer`, `exp_avg`). A mean square (`exp_avg_sq`) that a coarse codec rounds may
    turn negative, and its root NaN.

    All workers take in the same states, once any has one: a worker that hasn't updated a parameter yet (an expert that
    it didn't use, a step that its loss scaler skipped) sends zeros.

    Args:
        codec: how it is encoded; `Int8()` takes a quarter of the bytes.
        every: so many steps of the topology; each of its rounds comes in its turn.
        rate: as `Gossip`'s.

    Raises:
        ValueError: `every` below 1, or a codec that only serves differences.
    """

    codec: Codec = field(default_factory=Plain)
    every: int = 1
    rate: Rate = 1.0

    def __post_init__(self) -> None:
        at_least_one("Travel's every", self.every, "1 sends a state in every step")
        check_rate(self.rate)
        if not self.codec.complete:
            raise ValueError(f"{self.codec} by itself would lose too much of a state: use Int8()")

    @property
    def combine(self) -> Gossip:
        return Gossip(rate=self.rate)

    def along(self, topology: Topology) -> Topology:
        """Topology by which it travels: `topology`, or that in every `every`-th step."""
        return topology if self.every == 1 else Every(self.every, topology)

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        """ValueError where the mean of the states would not be kept, or the rate is not stable with the delay."""
        self.combine.check(self.along(topology), size, weights, delay)


class StateBucket(Bucket):
    """A bucket over `optimizer.state[p][name]` for the parameters p of `owners`, whichever tensors these are now.

    Zeros stand for what the optimizer doesn't have yet: of an expert that this worker hasn't used, say.
    """

    def __init__(
        self, tensors: Sequence[Tensor], owners: Mapping[int, nn.Parameter], optimizer: Optimizer, name: str, parts: int
    ) -> None:
        self._owners, self._optimizer, self._name = [owners[id(t)] for t in tensors], optimizer, name
        self._type, self._owner_of = tensors[0].dtype, owners
        super().__init__(cast(Sequence[nn.Parameter], tensors), parts)

    def lies(self, parameter: nn.Parameter) -> Place:
        # As its parameter: an optimizer may have made it of a gradient, which lies otherwise on every worker.
        return replace(Place.of(self._owner_of[id(parameter)]), dtype=self._type)

    def check(self, parameter: nn.Parameter, place: Place) -> None:
        """The optimizer's own."""

    def adopt(self) -> None:
        # An optimizer may have put other tensors there, in another dictionary, as `load_state_dict` does.
        pairs = zip(self._now(), self._owners, strict=True)
        now = [zeros(owner, self._type) if state is None else state for state, owner in pairs]
        self.parameters = tuple(cast(list[nn.Parameter], now))
        super().adopt()

    def release(self) -> None:
        # Not all of them where a learning rate finder has put an empty optimizer back.
        self.parameters = tuple(cast(nn.Parameter, state) for state in self._now() if state is not None)
        super().release()

    def _now(self) -> list[Tensor | None]:
        return [_state(self._optimizer, self._name, owner) for owner in self._owners]


def zeros(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)  # as the parameter lies


def _state(optimizer: Optimizer, name: str, parameter: nn.Parameter) -> Tensor | None:
    found = optimizer.state.get(parameter, {}).get(name)
    return found if isinstance(found, Tensor) else None


UNKNOWN, LACKING = 0, 1
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


def kinds(optimizer: Optimizer, name: str, parameters: Sequence[nn.Parameter], stepped: bool) -> list[int]:
    """Kind of each parameter's state: `UNKNOWN` before its first update, `LACKING` where that made none, else its place
    in `TYPES`, from 2 on. `stepped`: the optimizer has taken a step with the gradients as they are, which a loss scaler
    may have skipped. ValueError: a state of another shape or type than parameters have."""
    found = []
    for parameter in parameters:
        state, of = _state(optimizer, name, parameter), type(optimizer).__name__
        if state is None:
            updated = optimizer.state.get(parameter) or (stepped and parameter.grad is not None)
            found.append(LACKING if updated else UNKNOWN)
            continue
        if state.shape != parameter.shape:
            raise ValueError(
                f"{of}'s state {name!r} has the shape {tuple(state.shape)} for a parameter of shape "
                f"{tuple(parameter.shape)}: only states of their parameter's shape can travel, leave it out of states"
            )
        if state.dtype not in TYPES:
            raise ValueError(
                f"{of}'s state {name!r} is of {state.dtype}, which can't be averaged: leave it out of states"
            )
        found.append(2 + TYPES.index(state.dtype))
    return found


def agreed(rows: Sequence[Sequence[int]], groups: Sequence[int]) -> list[int]:
    """Kind of each parameter's state for all workers, from each one's `kinds`. It is the state that any has. Else, in a
    group where one travels, it is as that; else whether any lacks it.

    Workers may have updated different ones: an expert is used here and not there, a loss scaler skips a step. Rows are
    [workers, parameters], `groups` of each parameter its optimizer's group.
    """
    most = [max(column) for column in zip(*rows, strict=True)]  # by parameter, over the workers
    travels = {group: kind for kind, group in zip(most, groups, strict=True) if kind > LACKING}
    return [kind or travels.get(group, UNKNOWN) for kind, group in zip(most, groups, strict=True)]


def pack_states(
    optimizer: Optimizer, name: str, chosen: Mapping[nn.Parameter, int], bucket_bytes: int | None, parts: int
) -> list[Bucket]:
    """Buckets over one state of these parameters, as `buckets.pack` packs the parameters themselves. `chosen`:
    {parameter: its state's kind, 2 and on}."""
    tensors, owners = [], {}
    for parameter, kind in chosen.items():
        state = _state(optimizer, name, parameter)
        tensors.append(zeros(parameter, TYPES[kind - 2]) if state is None else state)
        owners[id(tensors[-1])] = parameter  # a state knows no parameter
    make = partial(StateBucket, owners=owners, optimizer=optimizer, name=name, parts=parts)
    return pack(cast(list[nn.Parameter], tensors), bucket_bytes, make)
