"""A device as a member of its island: its peers in other islands, its gradients, its part of the parameters."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_decentral.gossip.wire.exchange import Exchange
from lightning_decentral.shared.compute.buckets import Bucket, pack
from lightning_decentral.shared.compute.device import DeviceSteps
from lightning_decentral.shared.wire.health import mean_of_sound
from lightning_decentral.shared.wire.mean import mean
from lightning_decentral.shared.wire.meeting.comparison import TrainedLayout, TrainingComparison
from lightning_decentral.shared.wire.transport import Disjoint, Transport, Wire

Mean = Callable[[Sequence[Tensor]], list[Tensor]]
InPlace = Callable[[Sequence[Tensor]], None]
Meet = Callable[[Callable[[], Any]], Any]
Group = Callable[[Disjoint], Transport | None]
MakeComparison = Callable[[TrainedLayout, Sequence[int]], TrainingComparison]


class IslandMember(DeviceSteps):
    """Base of a device's role in an island of `devices`; here a single device. `meet` runs calls that wait for other
    devices."""

    shards = 1  # number of devices over which a worker's parameters are sharded
    overlaps = True  # whether the exchange overlaps training, if the delay allows it
    heals = True  # whether a poisoned worker can be healed: its devices know refused messages, or share nothing

    def __init__(self, wire: Wire | None, devices: int, meet: Meet) -> None:
        self._wire, self.devices, self._meet = wire, devices, meet

    def peers(self, groups: Disjoint) -> Transport | None:
        """Make a process group of the devices with this device's place in a group of islands, given disjoint `groups`;
        None if this island is in no group. Every device calls `peers`, once for all groups."""
        assert self._wire is not None
        places = range(self.devices)
        return self._wire.group([[w * self.devices + p for w in workers] for workers in groups for p in places])

    def exchange(self, peers: Exchange[Any]) -> Exchange[Any]:
        """Extend an exchange between peers to whole buckets, for a mixer."""
        return peers

    def pack(self, parameters: Sequence[nn.Parameter], bucket_bytes: int | None) -> list[Bucket]:
        return pack(parameters, bucket_bytes)

    def alike(self, parameters: Sequence[nn.Parameter], take: Callable[[Sequence[nn.Parameter]], None]) -> None:
        """Make parameters that were added during training equal on all workers; `take` copies the first worker's."""
        take(parameters)

    def guard(self, scaler: Any) -> None:
        """Check the loss scaler, which may skip updates."""

    def arrange(self, module: nn.Module) -> None:
        """Prepare the module, before the optimizers exist."""

    def compare(self, trained: TrainedLayout, make: MakeComparison) -> None:
        """Check from now on that the island's devices train the same parameters; `make` compares some ranks."""

    def replaced(self) -> None:
        """Note that the optimizers were replaced. RuntimeError: not on another device of the island."""

    def change(self, tensors: Sequence[Tensor], change: InPlace) -> None:
        """Change whole tensors in place, such as a parameter's update; an island of shards does so on one device."""
        change(tensors)

    def close(self, cut_off: bool) -> None:
        """Restore the module to its form before `arrange`; `cut_off`: without the other devices."""

    def mean(self, tensors: Sequence[Tensor], of_all: Mean) -> list[Tensor]:
        """Mean over the workers of a module's tensors; `of_all` is a mean over all devices."""
        return of_all(tensors)

    def mean_of_buckets(self, tensors: Sequence[Tensor], of_all: Mean) -> list[Tensor]:
        return of_all(tensors)

    def mean_of_sound(self, tensors: Sequence[Tensor], world: Transport) -> tuple[list[Tensor], str]:
        """Mean over the workers without poisoned tensors, as `health.mean_of_sound`. Collective."""
        mean_of = partial(self.mean_of_buckets, of_all=partial(mean, over=world))
        return mean_of_sound(tensors, mean_of, world, self.devices, self.shards)

    def load(self, module: nn.Module, shards: Mapping[str, Tensor]) -> None:
        """Load this device's own part of a state_dict into the module."""

    def progress_state(self) -> dict[str, Any]:
        """State of the averages within the island to save, as tensors and primitives."""
        return {}

    def load_progress_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `progress_state` returned."""


class Several(IslandMember):
    """Base of a device in an island of several devices, which train the same parameters."""

    layouts = TrainingComparison()

    def compare(self, trained: TrainedLayout, make: MakeComparison) -> None:
        assert self._wire is not None
        first = self._wire.world.rank // self.devices * self.devices
        self.layouts = make(trained, range(first, first + self.devices))

    def replaced(self) -> None:
        self.rest()
        self.layouts.changed()

    def close(self, cut_off: bool) -> None:
        self.layouts.close()


def inside(make: Group, size: int, devices: int) -> Transport:
    """Make a process group of the devices of this device's island. Collective."""
    made = make([range(i, i + devices) for i in range(0, size, devices)])
    assert made is not None
    return made
