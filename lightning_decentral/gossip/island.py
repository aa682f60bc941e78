"""Islands: a gossiping worker is a single device, or an island of several (all-reduce, FSDP).

Devices island * L ... island * L + L - 1 are one worker; the topology is over islands. A device's place is its number
within its island, and devices of one place exchange.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.optim import LBFGS, Optimizer

from lightning_decentral.gossip.compute.combine.combine import Rule
from lightning_decentral.gossip.compute.travel import Travel
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.gossip.wire.island_member import IslandMember, Meet
from lightning_decentral.shared.compute.codec.casts import Plain
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.wire import gradients
from lightning_decentral.shared.wire.transport import Wire


@checked
@dataclass(frozen=True)
class Island(ABC):
    """Devices that are one worker, and what they do together. A value: constructing it starts nothing."""

    devices: int

    @property
    def shards(self) -> int:
        """Devices that a worker's parameters are spread over."""
        return 1

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"an island has at least 1 device, got {self.devices}: Solo() has devices=1")

    def workers(self, devices: int, per_node: int) -> int:
        """Number of workers that so many devices are. ValueError: islands would be cut, by the end of the world or by a
        node's."""
        if devices % self.devices:
            fitting = ", ".join(str(d) for d in range(1, devices + 1) if devices % d == 0)
            raise ValueError(f"{self!r} doesn't divide {devices} devices into islands: give devices one of {fitting}")
        if per_node % self.devices and self.devices % per_node:
            raise ValueError(
                f"{self!r} would lie across the border of nodes with {per_node} devices: "
                f"give devices a divisor or a multiple of {per_node}"
            )
        return devices // self.devices

    def refuse(self, optimizers: Sequence[Optimizer]) -> None:
        """ValueError for an optimizer that calls the closure as often as a device's own loss asks."""
        if self.devices > 1 and any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
            raise ValueError(
                "LBFGS calls the backward as often as its loss asks, which differs between the devices of "
                f"{self!r}: use another optimizer, or workers of one device"
            )

    @abstractmethod
    def join(self, wire: Wire, device: torch.device, meet: Meet) -> IslandMember:
        """This device's part; collective. `meet` runs what waits for the other devices of an island."""


@checked
@dataclass(frozen=True)
class Solo(Island):
    """Worker of one device."""

    devices: int = 1

    def __post_init__(self) -> None:
        if self.devices != 1:
            raise ValueError(f"Solo is one device, got {self.devices}: use AllReduce({self.devices}) or no devices")

    def join(self, wire: Wire, device: torch.device, meet: Meet) -> IslandMember:
        return IslandMember(wire, 1, meet)


@checked
@dataclass(frozen=True)
class AllReduce(Island):
    """L devices with equal parameters: g = (1/L) sum of their gradients, and each exchanges 1/L of the parameters.

    x_i+ = sum_j w_ij x_j + u_i(g_i) for islands i, as for one worker with the L devices' batches together. The
    gradients travel in overlapped buckets, as under DDP. Of every message each device sends the part of its place to
    its peer in the other island and receives that part, then the devices gather: every byte crosses the network card of
    the node once.

    Args:
        devices: L, consecutive ones; usually those of a node.
        bucket_bytes: gradients that travel together inside the island.
        codec: of the gradients inside the island, for one that spans slow links (`shared.wire.compressed_mean`).

    Raises:
        ValueError: fewer than one device or byte.

    Source: Wang et al. 2410.11998.
    """

    bucket_bytes: int = gradients.BUCKET_BYTES
    codec: Codec = Plain()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codec.encodes:
            from lightning_decentral.shared.wire.compressed_mean import refuse_estimates  # few islands encode

            refuse_estimates(self.codec)
        if self.bucket_bytes < 1:
            raise ValueError(
                f"bucket_bytes must be positive, got {self.bucket_bytes}: {gradients.BUCKET_BYTES} is DDP's"
            )

    def join(self, wire: Wire, device: torch.device, meet: Meet) -> IslandMember:
        from lightning_decentral.gossip.wire.hierarchical import Averaging  # no other run reads it

        return Averaging(wire, self.devices, device, meet, self.bucket_bytes, self.codec)


@checked
@dataclass(frozen=True)
class FullyShard(Island):
    """L devices that hold 1/L of every parameter, gradient and moment each (FSDP2), and gossip their own shards.

    x_i[p]+ = sum_j w_ij x_j[p] + u_i[p] for island i and place p: hybrid sharding (HSDP) whose replicate dimension is
    gossip. FSDP gathers parameters before they are used and scatters the mean of the island's gradients; a device's
    peers are the devices with the same shards in the other islands, so every byte crosses the network card once.

    Each module that a ModuleList holds (a transformer's blocks) is gathered by itself, everything else together, in the
    type that parameters have. Under precision="bf16-mixed" autocast then keeps its bf16 copy of every weight from the
    forward to the backward: 2 bytes a parameter on each device next to the shards. With param_dtype="bfloat16" there is
    none, and half the bytes are gathered.

    Args:
        devices: L, consecutive ones; usually those of a node.
        param_dtype: "bfloat16": what parameters are gathered and used in, a LayerNorm's too, under
            precision="bf16-mixed"; shards, sums of gradients and updates stay float32. Not for a module with BatchNorm.
            None: their own type.

    Raises:
        ValueError: fewer than one device; another type.

    Source: Zhao et al. 2304.11277 (FSDP, hybrid sharding); Wang et al. 2410.11998.
    """

    param_dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.param_dtype not in (None, "bfloat16"):
            raise ValueError(f'param_dtype must be "bfloat16" or None, got {self.param_dtype!r}: leave it out')

    @property
    def shards(self) -> int:
        return self.devices

    def join(self, wire: Wire, device: torch.device, meet: Meet) -> IslandMember:
        from lightning_decentral.gossip.wire.island_shards import Sharding  # no other run reads it

        return Sharding(wire, self.devices, device, meet, torch.bfloat16 if self.param_dtype else None)


class GossipPlan(Protocol):
    """The constructor's values of a strategy, whichever way its workers are placed."""

    topology: Topology
    combine: Rule
    weights: Weights
    codec: Codec
    states: Mapping[str, Travel]
    island: Island
    delay: int
    bucket_bytes: int | None
    heals: int
