"""A device's part in its island: whom it exchanges with, what it does with its gradients, what it holds."""

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
    """One device's part in its island of `devices`; here it is alone. `meet` runs what waits for other devices."""

    shards = 1  # Devices that a worker's parameters are spread over.

    overlaps = True  # whether its exchange runs while the training goes on, where the delay allows it

    heals = True
    """True where its devices know each other's refused messages, or have nothing in common that could be poisoned."""

    def __init__(self, wire: Wire | None, devices: int, meet: Meet) -> None:
        self._wire, self.devices, self._meet = wire, devices, meet

    def peers(self, groups: Disjoint) -> Transport | None:
        """A new group of the devices at this one's place in the islands of its group, of several that share none; None
        where it is in none. Every device calls it, once for all groups."""
        assert self._wire is not None
        places = range(self.devices)
        return self._wire.group([[w * self.devices + p for w in workers] for workers in groups for p in places])

    def exchange(self, peers: Exchange[Any]) -> Exchange[Any]:
        """Exchange for a mixer of whole buckets, given an exchange between the peers."""
        return peers

    def pack(self, parameters: Sequence[nn.Parameter], bucket_bytes: int | None) -> list[Bucket]:
        return pack(parameters, bucket_bytes)

    def alike(self, parameters: Sequence[nn.Parameter], take: Callable[[Sequence[nn.Parameter]], None]) -> None:
        """Parameters that come while training, the same for all workers; `take` gets them from the first one."""
        take(parameters)

    def guard(self, scaler: Any) -> None:
        """A loss scaler may skip updates."""

    def arrange(self, module: nn.Module) -> None:
        """Prepare the module before the optimizers exist."""

    def compare(self, trained: TrainedLayout, make: MakeComparison) -> None:
        """Check from now on that its devices go on training the same; `make` makes a comparison between some ranks."""

    def replaced(self) -> None:
        """The optimizers are others than before. RuntimeError where they aren't on another of its devices."""

    def change(self, tensors: Sequence[Tensor], change: InPlace) -> None:
        """Change whole tensors in place, such as a parameter's update; no more than once in an island of shards."""
        change(tensors)

    def close(self, cut_off: bool) -> None:
        """Leave the module as it was; `cut_off`: without the other devices."""

    def mean(self, tensors: Sequence[Tensor], of_all: Mean) -> list[Tensor]:
        """Mean over the workers of what a module holds; `of_all` is over all devices."""
        return of_all(tensors)

    def mean_of_buckets(self, tensors: Sequence[Tensor], of_all: Mean) -> list[Tensor]:
        """Mean over the workers of flat tensors."""
        return of_all(tensors)

    def mean_of_sound(self, tensors: Sequence[Tensor], world: Transport) -> tuple[list[Tensor], str]:
        """`mean_of_buckets` without what is poisoned; as `health.mean_of_sound`. Collective."""
        mean_of = partial(self.mean_of_buckets, of_all=partial(mean, over=world))
        return mean_of_sound(tensors, mean_of, world, self.devices, self.shards)

    def load(self, module: nn.Module, shards: Mapping[str, Tensor]) -> None:
        """Put back this device's own part of a state_dict."""

    def progress_state(self) -> dict[str, Any]:
        """State from which averages within the island go on, as tensors and primitives."""
        return {}

    def load_progress_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `progress_state` was taken."""


class Several(IslandMember):
    """One of several devices that train the same."""

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
    """A new group of the devices of this one's island. Collective."""
    made = make([range(i, i + devices) for i in range(0, size, devices)])
    assert made is not None
    return made
