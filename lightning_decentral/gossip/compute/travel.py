"""Optimizer states that are mixed with the parameters: how a state is sent, and the buckets of its tensors."""

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
from lightning_decentral.shared.compute.codec.codec import Codec, Plain
from lightning_decentral.shared.compute.layout import Place
from lightning_decentral.shared.plan.arguments import checked


@checked
@dataclass(frozen=True, kw_only=True)
class Travel:
    """s_i <- s_i + rate (sum_j w_ij sent_j - sent_i) for an optimizer state s, as `Gossip` does for parameters.

    Mixing keeps the mean of the workers' states. Meant for states that are linear in the gradient (`momentum_buffer`,
    `exp_avg`): a mean square (`exp_avg_sq`) that a coarse codec rounds may turn negative, and its root NaN.

    All workers mix the same states, once any worker has one: a worker that hasn't updated a parameter yet (an expert
    that its batches didn't use, a step that its loss scaler skipped) sends zeros.

    Args:
        codec: how the state is encoded; `Int8()` takes a quarter of the bytes.
        every: steps between two rounds of the state; the topology's rounds follow each other in order.
        rate: mixing rate, as in `Gossip`.

    Raises:
        ValueError: `every` below 1, or a codec that only serves differences.
    """

    codec: Codec = field(default_factory=Plain)
    every: int = 1
    rate: Rate = 1.0

    def __post_init__(self) -> None:
        at_least_one("Travel's every", self.every, "1 sends the state in every step")
        check_rate(self.rate)
        if not self.codec.complete:
            raise ValueError(f"{self.codec} by itself would lose too much of an optimizer state: use Int8()")

    @property
    def combine(self) -> Gossip:
        return Gossip(rate=self.rate)

    def along(self, topology: Topology) -> Topology:
        """Communication graph of the state: `topology`, or `topology` in every `every`-th step only."""
        return topology if self.every == 1 else Every(self.every, topology)

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        """Raise ValueError if mixing would change the states' mean, or the rate is not stable with the delay."""
        self.combine.check(self.along(topology), size, weights, delay)


class StateBucket(Bucket):
    """Bucket of the current tensors `optimizer.state[p][name]` for the parameters p of `owners`. Zeros stand for states
    that the optimizer doesn't have yet, as for an expert that this worker hasn't used."""

    def __init__(
        self, tensors: Sequence[Tensor], owners: Mapping[int, nn.Parameter], optimizer: Optimizer, name: str, parts: int
    ) -> None:
        self._owners, self._optimizer, self._name = [owners[id(t)] for t in tensors], optimizer, name
        self._type, self._owner_of = tensors[0].dtype, owners
        super().__init__(cast(Sequence[nn.Parameter], tensors), parts)

    def lies(self, parameter: nn.Parameter) -> Place:
        # Strides as the parameter's: an optimizer may have made the state of a gradient, with strides of this worker.
        return replace(Place.of(self._owner_of[id(parameter)]), dtype=self._type)

    def check(self, parameter: nn.Parameter, place: Place) -> None:
        """Check nothing: the optimizer made the state."""

    def adopt(self) -> None:
        # An optimizer may have replaced its tensors and dictionaries, as `load_state_dict` does.
        pairs = zip(self._now(), self._owners, strict=True)
        now = [zeros(owner, self._type) if state is None else state for state, owner in pairs]
        self.parameters = tuple(cast(list[nn.Parameter], now))
        super().adopt()

    def release(self) -> None:
        # Some states are missing after a learning rate finder has restored an empty optimizer.
        self.parameters = tuple(cast(nn.Parameter, state) for state in self._now() if state is not None)
        super().release()

    def _now(self) -> list[Tensor | None]:
        return [_state(self._optimizer, self._name, owner) for owner in self._owners]


def zeros(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)  # in the parameter's memory order


def _state(optimizer: Optimizer, name: str, parameter: nn.Parameter) -> Tensor | None:
    found = optimizer.state.get(parameter, {}).get(name)
    return found if isinstance(found, Tensor) else None


UNKNOWN, LACKING = 0, 1
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


def kinds(optimizer: Optimizer, name: str, parameters: Sequence[nn.Parameter], stepped: bool) -> list[int]:
    """Kind of each parameter's state: `UNKNOWN` before its first update, `LACKING` if that update made no state, else
    2 + the index of its type in `TYPES`. `stepped`: the optimizer has taken a step with the present gradients, which a
    loss scaler may have skipped. ValueError: a state whose shape or type parameters can't have."""
    found = []
    for parameter in parameters:
        state, owner = _state(optimizer, name, parameter), type(optimizer).__name__
        if state is None:
            updated = optimizer.state.get(parameter) or (stepped and parameter.grad is not None)
            found.append(LACKING if updated else UNKNOWN)
            continue
        if state.shape != parameter.shape:
            raise ValueError(
                f"{owner}'s state {name!r} has the shape {tuple(state.shape)} for a parameter of shape "
                f"{tuple(parameter.shape)}: leave it out of states, only states of their parameter's shape can be mixed"
            )
        if state.dtype not in TYPES:
            raise ValueError(
                f"{owner}'s state {name!r} has type {state.dtype}, which can't be averaged: leave it out of states"
            )
        found.append(2 + TYPES.index(state.dtype))
    return found


def agreed(rows: Sequence[Sequence[int]], groups: Sequence[int]) -> list[int]:
    """Kind of each parameter's state that all workers agree on, from each worker's `kinds`: the kind on any worker that
    has the state. Else the kind of a state in the same parameter group; else `LACKING` if any worker lacks it. Workers
    may have updated different parameters: one worker uses an expert, another doesn't, a loss scaler skips a step. Rows
    are [workers, parameters]; `groups` has each parameter's group in its optimizer."""
    most = [max(column) for column in zip(*rows, strict=True)]  # by parameter, over the workers
    travels = {group: kind for kind, group in zip(most, groups, strict=True) if kind > LACKING}
    return [kind or travels.get(group, UNKNOWN) for kind, group in zip(most, groups, strict=True)]


def pack_states(
    optimizer: Optimizer, name: str, chosen: Mapping[nn.Parameter, int], bucket_bytes: int | None, parts: int
) -> list[Bucket]:
    """Pack one optimizer state into buckets, as `buckets.pack` packs the parameters. `chosen`: {parameter: the kind of
    its state, at least 2}."""
    tensors, owners = [], {}
    for parameter, kind in chosen.items():
        state = _state(optimizer, name, parameter)
        tensors.append(zeros(parameter, TYPES[kind - 2]) if state is None else state)
        owners[id(tensors[-1])] = parameter  # kept here, as a state has no reference to its parameter
    make = partial(StateBucket, owners=owners, optimizer=optimizer, name=name, parts=parts)
    return pack(cast(list[nn.Parameter], tensors), bucket_bytes, make)
