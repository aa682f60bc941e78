"""States of an optimizer that travel beside the parameters: how each does, and the buckets that hold one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.gossip.compute.combine.combine import Rate
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.compute.combine.rate import check_rate
from lightning_decentral.gossip.plan.topology.combined import Every
from lightning_decentral.gossip.plan.topology.topology import Topology, at_least_one
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.shared.compute.buckets import Bucket, pack
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.compute.codec.quantize import Plain
from lightning_decentral.shared.plan.arguments import checked


@checked
@dataclass(frozen=True, kw_only=True)
class Travel:
    """s_i <- s_i + rate (sum_j w_ij sent_j - sent_i), for a state s of the optimizer, as `Gossip` does for parameters.

    The mean of the workers' states is kept; each one's own part of it still is its own gradients'. For states that are
    linear in the gradient (`momentum_buffer`, `exp_avg`). A mean square (`exp_avg_sq`) that a coarse codec rounds may
    turn negative, and its root NaN.

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
        """When it travels, and to whom."""
        return topology if self.every == 1 else Every(self.every, topology)

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        """ValueError where the mean of the states would not be kept, or the rate is not stable with the delay."""
        self.combine.check(self.along(topology), size, weights, delay)


class StateBucket(Bucket):
    """A bucket over `optimizer.state[p][name]` for the parameters p of `owners`, whichever tensors these are now."""

    def __init__(
        self, tensors: Sequence[Tensor], owners: Mapping[int, nn.Parameter], optimizer: Optimizer, name: str, parts: int
    ) -> None:
        self._owners, self._optimizer, self._name = [owners[id(t)] for t in tensors], optimizer, name
        super().__init__(cast(Sequence[nn.Parameter], tensors), parts)

    def adopt(self) -> None:
        # An optimizer may have put other tensors there, in another dictionary, as `load_state_dict` does.
        self._look()
        super().adopt()

    def release(self) -> None:
        self._look()
        super().release()

    def _look(self) -> None:
        self.parameters = tuple(self._optimizer.state[owner][self._name] for owner in self._owners)


def having(optimizer: Optimizer, name: str, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Of these parameters, those for which the optimizer has the state by now.

    Raises:
        ValueError: it is of another shape; or the optimizer has updated some and keeps no such state.
    """
    states = optimizer.state
    found = [p for p in parameters if isinstance(states.get(p, {}).get(name), Tensor)]
    for parameter in found:
        shape = tuple(states[parameter][name].shape)
        if shape != tuple(parameter.shape):
            raise ValueError(
                f"{type(optimizer).__name__}'s state {name!r} has the shape {shape} for a parameter of shape "
                f"{tuple(parameter.shape)}: only states of their parameter's shape can travel, leave it out of states"
            )
    if not found and any(p.grad is not None or states.get(p) for p in parameters):
        kept = sorted({key for p in parameters for key in states.get(p, {})})
        raise ValueError(
            f"{type(optimizer).__name__} keeps no state {name!r} that could travel: "
            + (f"name one of {', '.join(kept)}, or leave it out of states" if kept else "leave it out of states")
        )
    return found


def pack_states(
    optimizer: Optimizer, name: str, parameters: Sequence[nn.Parameter], bucket_bytes: int | None, parts: int
) -> list[Bucket]:
    """Buckets over one state of these parameters, as `buckets.pack` packs the parameters themselves."""
    tensors = {id(optimizer.state[p][name]): (optimizer.state[p][name], p) for p in parameters}
    owners = {key: owner for key, (_, owner) in tensors.items()}
    make = partial(StateBucket, owners=owners, optimizer=optimizer, name=name, parts=parts)
    return pack([tensor for tensor, _ in tensors.values()], bucket_bytes, make)
