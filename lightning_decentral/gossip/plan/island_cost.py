"""Forecast of intra-node cost: what an island's devices do among themselves in a step (all-reduce, gather, scatter)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from lightning_decentral.shared.plan import data_parallel
from lightning_decentral.shared.plan.forecast import Setting, replica_bytes
from lightning_decentral.shared.plan.network import FREE, Price
from lightning_decentral.shared.plan.timeline import Task


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
class Shards(Within):
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
