"""Islands: a gossiping worker is a single device, or an island of several (all-reduce, FSDP).

Devices island * L ... island * L + L - 1 are one worker; the topology is over islands. A device's place is its number
within its island, and devices with the same place exchange messages."""

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
from lightning_decentral.shared.compute.codec.codec import Codec, Plain
from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.wire import gradients
from lightning_decentral.shared.wire.transport import Wire


@checked
@dataclass(frozen=True)
class Island(ABC):
    """Base of islands: the devices of one worker, and how they compute together. Constructing one starts nothing."""

    devices: int

    @property
    def shards(self) -> int:
        """Number of devices over which a worker's parameters are sharded."""
        return 1

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"an island has at least 1 device, got {self.devices}: Solo() has devices=1")

    def workers(self, devices: int, per_node: int) -> int:
        """Number of workers on `devices` devices. ValueError: an island would be incomplete, or lie partly on another
        node."""
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
        """Raise ValueError for LBFGS, which calls the closure a different number of times on each device."""
        if self.devices > 1 and any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
            raise ValueError(
                "LBFGS runs the backward a number of times that depends on the loss, which differs between the devices "
                f"of {self!r}: use another optimizer, or workers of one device"
            )

    @abstractmethod
    def join(self, wire: Wire, device: torch.device, meet: Meet) -> IslandMember:
        """Join this device to its island; collective. `meet` runs calls that wait for the island's other devices."""


@checked
@dataclass(frozen=True)
class Solo(Island):
    """Island of one device: each device is a worker."""

    devices: int = 1

    def __post_init__(self) -> None:
        if self.devices != 1:
            raise ValueError(f"Solo is one device, got {self.devices}: use AllReduce({self.devices}) or no devices")

    def join(self, wire: Wire, device: torch.device, meet: Meet) -> IslandMember:
        return IslandMember(wire, 1, meet)


@checked
@dataclass(frozen=True)
class AllReduce(Island):
    """L devices with equal parameters: g = (1/L) sum of their gradients; each exchanges 1/L of the parameters.

    x_i+ = sum_j w_ij x_j + u_i(g_i) for islands i, as for one worker with the L devices' batches together. Gradients
    are all-reduced in overlapped buckets, as under DDP. Each device exchanges one part of every message with the device
    of the same place in the other island, then the island's devices all-gather the parts: every byte crosses the node's
    network card once.

    Args:
        devices: L, the number of consecutive devices; usually those of a node.
        bucket_bytes: bytes of gradients that are all-reduced together inside the island.
        codec: codec of the gradients inside an island that spans slow links (`shared.wire.compressed_mean`).

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
        from lightning_decentral.gossip.wire.hierarchical import Averaging  # named only where it isn't the default

        return Averaging(wire, self.devices, device, meet, self.bucket_bytes, self.codec)


@checked
@dataclass(frozen=True)
class FullyShard(Island):
    """L devices that each keep 1/L of every parameter, gradient and moment (FSDP2), and gossip their own shards.

    x_i[p]+ = sum_j w_ij x_j[p] + u_i[p] for island i and place p: hybrid sharding (HSDP) whose replicate dimension is
    gossip. FSDP gathers parameters before use and reduce-scatters the mean of the island's gradients. A device's peers
    are the devices with the same shards in the other islands, so every byte crosses the network card once.

    Each module of a ModuleList (a transformer's blocks) is gathered by itself, everything else together, in the
    parameters' type. Under precision="bf16-mixed" autocast then keeps its bf16 copy of every weight from the
    forward to the backward: 2 bytes per parameter on each device in addition to the shards. With param_dtype="bfloat16"
    there is no such copy, and half the bytes are gathered.

    Args:
        devices: L, the number of consecutive devices; usually those of a node.
        param_dtype: "bfloat16": type in which parameters are gathered and used, a LayerNorm's too, under
            precision="bf16-mixed"; shards, sums of gradients and updates stay float32. Not for a module with BatchNorm.
            None: the parameters' own type.

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
    """Interface of the settings of a gossip strategy, under a Trainer, Fabric or elastic."""

    topology: Topology
    combine: Rule
    weights: Weights
    codec: Codec
    states: Mapping[str, Travel]
    island: Island
    delay: int
    bucket_bytes: int | None
    heals: int
