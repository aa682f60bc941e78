"""Holding of a member's model by its devices: it is on one, each has the whole, a shard of it, or a stage's parameters.

The first device mixes whole parameters with other members, on its host. What the others do is here: take them, or give
parts of them and get parts back.

    every device    parts -> the first one's host      `WholeBucket.adopt`, `OwnBucket.adopt`
    the first       a round, as ever                   `Mixer`
    every device    parts <- the first one's host      `WholeBucket.store`, `OwnBucket.store`
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.elastic.compute.gathered import means_of
from lightning_decentral.elastic.wire.participant import Participant
from lightning_decentral.elastic.wire.rounds.wholes import OwnBucket, StageBucket, WholeBucket, Wholes, receive, send
from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.healing import Healing, first_poisoned
from lightning_decentral.gossip.wire.exchange import Exchange
from lightning_decentral.gossip.wire.mixer import Flat, Mixer
from lightning_decentral.gossip.wire.optimizer_mixer import healing
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.shared.compute.buckets import Bucket, HostBucket, pack
from lightning_decentral.shared.wire.agreement import start_from_worker_0
from lightning_decentral.shared.wire.fsdp import is_sharded
from lightning_decentral.shared.wire.objects import collect_objects, gather_objects
from lightning_decentral.shared.wire.transport import Transport, Wire


class FirstMixer(Mixer):
    """Mixer of the first device, which notifies the others where it was healed, by a number on the hosts (`over`): what
    they keep may be poisoned, too."""

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
    """Model of a member and its mixing, on one device."""

    mixes = True  # True where this device has mixers

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
    """Each device has a part of the model: the first one's host has all of it during a round or a mean. What is on
    their hosts travels `over` these."""

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


class StagesHolding(PartHolding):
    """Each stage of a pipeline has some parameters; one that stands on two is mixed twice, to the same bits.

    What travels is on the hosts.
    """

    def __init__(self, device: torch.device, member: Participant, wire: Wire) -> None:
        over = wire.hosts(None)  # takes tensors on the host
        assert over is not None
        super().__init__(device, member, over)
        self._packed = False

    def pack(self, parameters: Sequence[nn.Parameter], bucket_bytes: int | None) -> list[Bucket]:
        if self._packed:
            raise ValueError(
                "a parameter was unfrozen while training, and elastic pipelines mix the same ones from their first "
                "step on: train it from the start, or with another strategy"
            )
        self._packed = True  # the stages' buckets are made once, in one order
        make: Callable[..., Bucket] = self.bucket if self._member.leads else partial(OwnBucket, over=self._over)
        own = pack(parameters, bucket_bytes, make)  # this stage's, of its own parameters
        rows = gather_objects(self._over, [(b.flat.numel(), b.flat.dtype) for b in own])  # [stages][buckets]
        sizes = [(stage, *of) for stage, row in enumerate(rows) if stage for of in row]
        others: list[Bucket] = [StageBucket(self._over, *of) for of in sizes if self._member.leads]
        for bucket in others if self._member.leads else own:
            bucket.adopt()  # a rule may keep what it begins with
        return [*own, *others]

    def restore(self, mixers: Mixers, rule: Any, optimizers: Sequence[Any]) -> None:
        # It is of the first one's buckets: the others keep nothing.
        super().restore(mixers, rule if self._member.leads else None, optimizers)

    def mean_of(self, tensors: Sequence[Tensor], of_wholes: Mean) -> list[Tensor]:
        rows = collect_objects(self._over, [tensor.detach().cpu() for tensor in tensors])  # [stages][tensors]
        means = self._member.of_first([tensor for row in rows for tensor in row], means_of)  # of all stages, in order
        found = means[: len(tensors)] if self._member.leads else [torch.empty_like(t, device="cpu") for t in tensors]
        if self._member.leads:
            places = [stage for stage, row in enumerate(rows) for _ in row]
            for stage, mean in zip(places, means, strict=True):
                if stage:
                    send(self._over, stage, mean.contiguous())  # the first one's own are the first of `means`
        else:
            for mean in found:
                receive(self._over, 0, mean)  # in the order in which they are sent
        return [mean.to(tensor.device) for mean, tensor in zip(found, tensors, strict=True)]

    def sums(self, of_devices: Sequence[Tensor]) -> list[Tensor]:
        found = [number.detach().cpu() for number in of_devices]  # scalars
        for number in found:
            self._over.all_reduce(number).wait()
        return found
