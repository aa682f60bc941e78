"""Holding of a member's model by its devices: it is on one, each has the whole, or each has a shard of it.

The first device mixes whole parameters with other members, on its host. What the others do is here: take them, or give
shards of them and get shards back.

    every device    shards -> the first one's host      `WholeBucket.adopt`
    the first       a round, as ever                    `Mixer`
    every device    shards <- the first one's host      `WholeBucket.store`
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.elastic.compute.gathered import means_of
from lightning_decentral.elastic.wire.participant import Participant
from lightning_decentral.elastic.wire.rounds.wholes import WholeBucket, Wholes
from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.healing import Healing, first_poisoned
from lightning_decentral.gossip.island import Island
from lightning_decentral.gossip.wire.exchange import Exchange
from lightning_decentral.gossip.wire.mixer import Flat, Mixer
from lightning_decentral.gossip.wire.optimizer_mixer import healing
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.shared.compute.buckets import Bucket, HostBucket, pack
from lightning_decentral.shared.wire.agreement import start_from_worker_0
from lightning_decentral.shared.wire.fsdp import is_sharded
from lightning_decentral.shared.wire.transport import Transport, Wire


class FirstMixer(Mixer):
    """Mixer of the first device, which notifies the others where it was healed: what they keep may be poisoned, too.

    Args:
        over: the devices of the member, for a number on the host.
    """

    def __init__(self, combine: Combine, exchange: Exchange[Any], delay: int, over: Transport) -> None:
        self._over = over
        super().__init__([], combine, exchange, delay)

    def step(self, learning_rate: float = 1.0, rounds: int = 1) -> None:
        super().step(learning_rate, rounds)
        self._over.broadcast(torch.tensor([self.healing.healed])).wait()  # (1,): how often it was healed so far


class OtherMixer(FirstMixer):
    """Mixer of another device: it gives its shards to the first one and mixes nothing."""

    def extend(self, buckets: Sequence[Flat]) -> None:
        self.buckets += buckets

    def step(self, learning_rate: float = 1.0, rounds: int = 1) -> None:
        for bucket in self.buckets:
            bucket.adopt()  # its shard goes to the first one's host
        healed = torch.zeros(1, dtype=torch.int64)  # (1,), on the host
        self._over.broadcast(healed).wait()
        before, self.healing.healed = self.healing.healed, int(healed)
        if self.healing.healed > before:
            self.healing.forget()  # what this device keeps may be poisoned, too

    def mixing(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the state is the first device's."""


Mean = Callable[[Sequence[Tensor]], list[Tensor]]


class Holding:
    """Model of a member and its mixing, on one device.

    Args:
        device: this one.

    Attributes:
        mixes: whether this device has mixers.
    """

    mixes = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def bucket(self, parameters: Sequence[nn.Parameter]) -> Bucket:
        """Rounds are the host's: what others receive comes from its sockets."""
        return (Bucket if self._device.type == "cpu" else HostBucket)(parameters)

    def pack(self, parameters: Sequence[nn.Parameter], bucket_bytes: int | None) -> list[Bucket]:
        return pack(parameters, bucket_bytes, self.bucket)

    def restore(self, mixers: Mixers, rule: Any, optimizers: Sequence[Optimizer]) -> None:
        """Mixers begin, or go on as a donor's rule; None: there is none."""
        if rule is None:
            mixers.adopt(optimizers[0])
        else:
            mixers.load_state_dict(rule, optimizers)

    def mixer(self, combine: Combine, exchange: Exchange[Any], delay: int) -> Mixer:
        return Mixer([], combine, exchange, delay)

    def healing(self, most: int, module: nn.Module) -> Healing:
        return healing(most, module)

    def mixed(self, parameters: Sequence[nn.Parameter]) -> None:
        """Share what was mixed, after a round of these."""

    def mean_of(self, tensors: Sequence[Tensor], of_wholes: Mean) -> list[Tensor]:
        """Mean over the members; `of_wholes` is of tensors that each device has."""
        return of_wholes(tensors)

    def sums(self, of_devices: Sequence[Tensor]) -> list[Tensor]:
        """Sums over the member's devices, of numbers about what each has."""
        return list(of_devices)


class CopiedHolding(Holding):
    """Each device has the whole: the others take the first one's parameters after its round."""

    def __init__(self, device: torch.device, member: Participant, wire: Wire) -> None:
        super().__init__(device)
        self.mixes, self._wire = member.leads, wire

    def mixed(self, parameters: Sequence[nn.Parameter]) -> None:
        start_from_worker_0(parameters, self._wire.world, self._device)  # a broadcast, as at the start of a fit


class PartHolding(Holding):
    """Each device has a part of the model: the first one's host has all of it during a round or a mean.

    Args:
        over: the devices, for what is on their hosts.
    """

    def __init__(self, device: torch.device, member: Participant, over: Transport) -> None:
        super().__init__(device)
        self._member, self._over = member, over

    def mixer(self, combine: Combine, exchange: Exchange[Any], delay: int) -> Mixer:
        return (FirstMixer if self._member.leads else OtherMixer)(combine, exchange, delay, self._over)


class ShardedHolding(PartHolding):
    """Each device has some rows of each parameter."""

    def __init__(self, device: torch.device, member: Participant, wire: Wire) -> None:
        super().__init__(device, member, wire.flags)
        self._world, self._wholes = wire.world, Wholes(wire.world, device)
        self._buckets: list[WholeBucket] = []

    def bucket(self, parameters: Sequence[nn.Parameter]) -> Bucket:
        self._buckets.append(WholeBucket(parameters, self._wholes))
        return self._buckets[-1]

    def healing(self, most: int, module: nn.Module) -> Healing:
        def named() -> list[tuple[str, Tensor]]:
            names = {parameter: name for name, parameter in module.named_parameters()}  # buckets know no names
            return [(names[p], w) for b in self._buckets for p, w in zip(b.parameters, b.wholes(), strict=True)]

        return Healing(most, lambda: first_poisoned(named()))

    def mean_of(self, tensors: Sequence[Tensor], of_wholes: Mean) -> list[Tensor]:
        if not any(map(is_sharded, tensors)):
            return of_wholes(tensors)
        means = self._member.of_first([self._wholes.whole(tensor) for tensor in tensors], means_of)  # (all rows, ...)
        return [self._wholes.cut(mean, tensor) for mean, tensor in zip(means, tensors, strict=True)]

    def sums(self, of_devices: Sequence[Tensor]) -> list[Tensor]:
        found = [number.clone() for number in of_devices]  # scalars: the caller's stay what they are
        for number in found:
            self._world.all_reduce(number).wait()
        return found


def holding(island: Island, device: torch.device, member: Participant, wire: Wire | None) -> Holding:
    """Make the `Holding` of this device.

    Args:
        wire: among the devices of the member; None: it is the only one.
    """
    if wire is None:
        return Holding(device)
    return (ShardedHolding if island.shards > 1 else CopiedHolding)(device, member, wire)


def mean_and_bytes(mean_of: Mean, tensors: Sequence[Tensor], carried: Sequence[Tensor]) -> list[Tensor]:
    """The means of `tensors`, then `carried`, which have no mean: as bytes they are the oldest's."""
    as_bytes = [t.detach().contiguous().view(-1).view(torch.uint8) for t in carried]  # integers have no mean
    found = mean_of([*tensors, *as_bytes])  # one meeting for both
    values = zip(found[len(tensors) :], carried, strict=True)  # (bytes,) each
    return [*found[: len(tensors)], *(value.view(t.dtype).view(t.shape) for value, t in values)]
