"""Costs of a gossip step, as a forecast sees them: messages, and what the devices of an island do among themselves.

talk(parameters) = bytes of the parameters / fragments of the topology        in each step in which anybody talks
talk(state)      = bytes of the state                                         at its own cadence
wire             = what the codec makes of a talk

An island's devices all-reduce gradients and gather what was mixed, or gather and scatter shards (`Within`).
"""

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
    """Encoding of messages by a codec: bytes on the wire, and work."""

    codec: str = AS_THEY_ARE  # its repr, by which the profile knows it
    # Of the payload, by the bytes of what is encoded; padding (up to 128 bytes a parameter) and headers (16 bytes a
    # bucket) aside.
    wire_bytes: Callable[[float], float] = float
    assumed: RoundWork = UNMEASURED  # what it takes more than `Plain()`, where the profile doesn't have the codec
    copies: float = 1.0  # messages of the model's size that are encoded for one, as a rule may want
    cliques: Cliques = Cliques.RING  # how workers exchange it where all of a group receive from all

    def work(self, model: Model) -> RoundWork:
        """Work of a round as measured, or that of messages as they are plus what is assumed."""
        known = {work.codec: work for work in model.rounds}
        plain, more = known.get(AS_THEY_ARE, UNMEASURED), self.assumed
        own = plain.own_seconds_per_byte + more.own_seconds_per_byte
        heard = plain.heard_seconds_per_byte + more.heard_seconds_per_byte
        return known.get(self.codec, RoundWork(self.codec, own, heard, plain.round_seconds, plain.message_seconds))


PLAIN = Encoding()


@dataclass(frozen=True)
class StateMessage:
    """A state of the optimizer that travels with the parameters."""

    name: str  # as the profile's `states` have it
    topology: Topology  # when it travels, and to whom
    encoding: Encoding = PLAIN


@dataclass(frozen=True)
class Talk:
    """Message of one step: so many bytes before they are encoded, of a whole worker."""

    topology: Topology
    encoding: Encoding
    bytes: float

    @property
    def wire_bytes(self) -> float:
        return self.encoding.wire_bytes(self.bytes)


def joined(plans: Sequence[tuple[Sequence[Floats], Sequence[Round]]]) -> tuple[list[Floats], tuple[Round, ...]]:
    """Several talks' (exchange seconds, rounds) as one plan: a worker waits for its sources in all of them, and
    their messages share the links, one behind the other. Its period is their least common multiple."""
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
    """Devices that are one worker; each of them exchanges 1 / devices of the parameters."""

    devices: int = 1

    @abstractmethod
    def prices(self, setting: Setting) -> tuple[Price, ...]:
        """Prices of what the devices send each other."""

    @abstractmethod
    def step(self, setting: Setting, factor: float) -> list[Task[str]]:
        """Tasks of a step: forward, backward, update."""

    @abstractmethod
    def memory_bytes(self, setting: Setting) -> float:
        """Bytes of memory on one device, without messages."""

    def gathering(self, setting: Setting) -> Price:
        """Price of gathering all that was mixed, after every exchange."""
        return FREE

    def kept_bytes(self, setting: Setting) -> float:
        """Bytes of the parameters that one device has, copies and corrects."""
        return setting.model.parameter_bytes

    def _price(self, operation: str, setting: Setting) -> Price:
        cluster, devices = setting.cluster, self.devices
        return setting.network.price(operation, cluster.reach(devices), devices, 1, min(devices, cluster.per_node))


@dataclass(frozen=True)
class Alone(Within):
    """Worker of one device."""

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        return ()

    def step(self, setting: Setting, factor: float) -> list[Task[str]]:
        return data_parallel.step(setting.model.step_blocks, FREE, factor)

    def memory_bytes(self, setting: Setting) -> float:
        return replica_bytes(setting.model)


@dataclass(frozen=True)
class ReplicatedCost(Within):
    """Equal parameters: gradients are all-reduced in buckets, what was mixed is gathered."""

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        return self._price("all_reduce", setting), self.gathering(setting)

    def step(self, setting: Setting, factor: float) -> list[Task[str]]:
        return data_parallel.step(setting.model.step_blocks, self.prices(setting)[0], factor)

    def memory_bytes(self, setting: Setting) -> float:
        # And the buckets of gradients.
        return replica_bytes(setting.model) + setting.model.parameter_bytes

    def gathering(self, setting: Setting) -> Price:
        # Every device has mixed its part only.
        return self._price("all_gather", setting)


@dataclass(frozen=True)
class ShardedCost(Within):
    """1 / devices of everything: parameters are gathered block by block, gradients scattered."""

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
