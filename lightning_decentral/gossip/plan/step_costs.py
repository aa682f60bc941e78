"""Costs of a gossip step, for forecasts: messages, and communication among the devices of an island.

message(parameters) = bytes of the parameters / fragments of the topology     in each step with messages
message(state)      = bytes of the state                                      in every n-th step
wire                = bytes of the encoded message

An island's devices all-reduce gradients and gather mixed parameters, or gather and scatter shards (`Within`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from lightning_decentral.gossip.plan.planned_traffic import Cliques, Round
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.shared.plan import data_parallel
from lightning_decentral.shared.plan.forecast import Floats, Setting, replica_bytes
from lightning_decentral.shared.plan.network import FREE, Price
from lightning_decentral.shared.plan.profile import Model, RoundWork
from lightning_decentral.shared.plan.timeline import Task

AS_THEY_ARE = "Plain()"
UNMEASURED = RoundWork(AS_THEY_ARE)


@dataclass(frozen=True)
class Encoding:
    """Costs of encoding messages with a codec: bytes on the wire, and compute time."""

    codec: str = AS_THEY_ARE  # repr of the codec, its key in the profile
    # Bytes of the payload, given the bytes to encode; without padding (up to 128 bytes a parameter) and headers (16
    # bytes a bucket).
    wire_bytes: Callable[[float], float] = float
    assumed: RoundWork = UNMEASURED  # work in addition to that of `Plain()`, if the profile doesn't have the codec
    copies: float = 1.0  # model-sized messages that are encoded for one message of the rule
    cliques: Cliques = Cliques.RING  # how workers exchange messages if all of a group receive from all

    def work(self, model: Model) -> RoundWork:
        """Measured work of a round with this codec, or the work for unencoded messages plus the assumed work."""
        known = {work.codec: work for work in model.rounds}
        plain, more = known.get(AS_THEY_ARE, UNMEASURED), self.assumed
        own = plain.own_seconds_per_byte + more.own_seconds_per_byte
        each = plain.heard_seconds_per_byte + more.heard_seconds_per_byte
        return known.get(self.codec, RoundWork(self.codec, own, each, plain.round_seconds, plain.message_seconds))


PLAIN = Encoding()


@dataclass(frozen=True)
class StateMessage:
    """Optimizer state that is mixed with the parameters, for a forecast."""

    name: str  # name of the state in the profile's `states`
    topology: Topology  # says in which steps, and to which workers, the state is sent
    encoding: Encoding = PLAIN


@dataclass(frozen=True)
class Talk:
    """Message of one step: `bytes` of it before encoding, over all devices of a worker."""

    topology: Topology
    encoding: Encoding
    bytes: float

    @property
    def wire_bytes(self) -> float:
        return self.encoding.wire_bytes(self.bytes)


def joined(plans: Sequence[tuple[Sequence[Floats], Sequence[Round]]]) -> tuple[list[Floats], tuple[Round, ...]]:
    """Join the (exchange seconds, rounds) of several messages: a worker waits for its sources in all plans, whose
    messages share the links, one after the other. The joint period is the least common multiple of the periods."""
    if len(plans) == 1:
        return list(plans[0][0]), tuple(plans[0][1])
    period = lcm(*(len(rounds) for _, rounds in plans))
    seconds, steps = [], []
    for step in range(period):
        seconds.append(np.sum([exchange[step % len(exchange)] for exchange, _ in plans], axis=0))
        each = [rounds[step % len(rounds)] for _, rounds in plans]
        steps.append(Round(np.concatenate([one.sources for one in each], axis=1), each[0].loads))
    return seconds, tuple(steps)


@dataclass(frozen=True)
class Within(ABC):
    """Costs inside an island: the devices of one worker, each of which exchanges 1 / devices of the parameters."""

    devices: int = 1

    @abstractmethod
    def prices(self, setting: Setting) -> tuple[Price, ...]:
        """Prices of the communication between the island's devices."""

    @abstractmethod
    def step(self, setting: Setting, factor: float) -> list[Task[str]]:
        """Tasks of a training step: forward, backward, update."""

    @abstractmethod
    def memory_bytes(self, setting: Setting) -> float:
        """Bytes of memory on one device, without messages."""

    def gathering(self, setting: Setting) -> Price:
        """Price of all-gathering the mixed parameters after every exchange."""
        return FREE

    def kept_bytes(self, setting: Setting) -> float:
        """Bytes of the parameters that one device keeps, copies and corrects."""
        return setting.model.parameter_bytes

    def _price(self, operation: str, setting: Setting) -> Price:
        cluster, devices = setting.cluster, self.devices
        return setting.network.price(operation, cluster.reach(devices), devices, 1, min(devices, cluster.per_node))


@dataclass(frozen=True)
class Alone(Within):
    """Costs of a worker of one device: no communication inside."""

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        return ()

    def step(self, setting: Setting, factor: float) -> list[Task[str]]:
        return data_parallel.step(setting.model.step_blocks, FREE, factor)

    def memory_bytes(self, setting: Setting) -> float:
        return replica_bytes(setting.model)


@dataclass(frozen=True)
class ReplicatedCost(Within):
    """Costs of an island of replicas: gradients are all-reduced in buckets, mixed parameters are all-gathered."""

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        return self._price("all_reduce", setting), self.gathering(setting)

    def step(self, setting: Setting, factor: float) -> list[Task[str]]:
        return data_parallel.step(setting.model.step_blocks, self.prices(setting)[0], factor)

    def memory_bytes(self, setting: Setting) -> float:
        # Plus the buckets of gradients.
        return replica_bytes(setting.model) + setting.model.parameter_bytes

    def gathering(self, setting: Setting) -> Price:
        # Every device has mixed only its part.
        return self._price("all_gather", setting)


@dataclass(frozen=True)
class ShardedCost(Within):
    """Costs of a sharded island (FSDP): parameters are gathered block by block, gradients reduce-scattered."""

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        return self._price("all_gather", setting), self._price("reduce_scatter", setting)

    def step(self, setting: Setting, factor: float) -> list[Task[str]]:
        gather, scatter = self.prices(setting)
        whole = data_parallel.whole_matrices(setting, self.devices)
        return data_parallel.sharded_step(setting.model.step_blocks, gather, scatter, self.devices, factor, whole)

    def kept_bytes(self, setting: Setting) -> float:
        return setting.model.parameter_bytes / self.devices

    def memory_bytes(self, setting: Setting) -> float:
        return data_parallel.sharded_bytes(setting.model, self.devices)
