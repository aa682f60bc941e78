"""How a member's devices keep its model: one device, a copy on each, shards of it, or a pipeline stage on each.

The first device mixes whole parameters with other members, on its host. The other devices receive the result, or send
their parts before the round and receive them after it.

    every device    parts -> the first one's host      `WholeBucket.adopt`, `OwnBucket.adopt`
    the first       a gossip round                     `Mixer`
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
from lightning_decentral.gossip.wire.mixer import Flat, MeanOfSound, Mixer
from lightning_decentral.gossip.wire.optimizer_mixer import healing
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.shared.compute.buckets import Bucket, HostBucket, pack
from lightning_decentral.shared.wire.agreement import start_from_worker_0
from lightning_decentral.shared.wire.fsdp import is_sharded
from lightning_decentral.shared.wire.objects import collect_objects, gather_objects
from lightning_decentral.shared.wire.transport import Transport, Wire


class FirstMixer(Mixer):
    """Mixer of the first device. It broadcasts to the others (`over` their hosts) how often it was healed of NaN, as
    their optimizer states may have NaN, too."""

    def __init__(self, combine: Combine, exchange: Exchange[Any], delay: int, over: Transport) -> None:
        self._over = over
        super().__init__([], combine, exchange, delay)

    def step(self, learning_rate: float = 1.0, rounds: int = 1) -> None:
        super().step(learning_rate, rounds)
        self._tell()

    def restart(self, mean: MeanOfSound) -> None:
        super().restart(mean)
        self._tell()

    def _tell(self) -> None:
        self._over.broadcast(torch.tensor([self.healing.healed])).wait()  # (1,): how often it was healed so far


class OtherMixer(FirstMixer):
    """Mixer of another device, which sends its shards to the first device and mixes nothing."""

    def extend(self, buckets: Sequence[Flat]) -> None:
        self.buckets += buckets

    def step(self, learning_rate: float = 1.0, rounds: int = 1) -> None:
        for bucket in self.buckets:
            bucket.adopt()  # sends its shard to the first device's host
        healed = torch.zeros(1, dtype=torch.int64)  # (1,), on the host
        self._over.broadcast(healed).wait()
        before, self.healing.healed = self.healing.healed, int(healed)
        if self.healing.healed > before:
            self.healing.forget()  # this device's states may have NaN, too

    def restart(self, mean: MeanOfSound) -> None:
        self.step()  # the first device's host has the whole

    def mixing(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, as the first device keeps the rule's state."""


Mean = Callable[[Sequence[Tensor]], list[Tensor]]


class Holding:
    """Keeps a member's model on one device and makes its mixer."""

    mixes = True  # True if this device has mixers

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def bucket(self, parameters: Sequence[nn.Parameter]) -> Bucket:
        """Make a bucket of these parameters on the host, whose sockets send the messages."""
        return (Bucket if self._device.type == "cpu" else HostBucket)(parameters)

    def pack(self, parameters: Sequence[nn.Parameter], bucket_bytes: int | None) -> list[Bucket]:
        return pack(parameters, bucket_bytes, self.bucket)

    def restore(self, mixers: Mixers, rule: Any, optimizers: Sequence[Optimizer]) -> None:
        """Start the mixers, or restore a donor's state of the rule (None: start)."""
        if rule is None:
            for optimizer in optimizers:
                mixers.adopt(optimizer)
        else:
            mixers.load_state_dict(rule, optimizers)

    def mixer(self, combine: Combine, exchange: Exchange[Any], delay: int) -> Mixer:
        return Mixer([], combine, exchange, delay)

    def healing(self, most: int, module: nn.Module) -> Healing:
        return healing(most, module)

    def mixed(self, parameters: Sequence[nn.Parameter]) -> None:
        """Send the mixed parameters to the other devices, after a round."""

    def mean_of(self, tensors: Sequence[Tensor], of_wholes: Mean) -> list[Tensor]:
        """Return the mean over the members; `of_wholes` computes it for tensors that each device has."""
        return of_wholes(tensors)

    def sums(self, of_devices: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums over the member's devices of numbers about each device's part."""
        return list(of_devices)


class CopiedHolding(Holding):
    """Keeps the whole model on each device; the others copy the first device's parameters after its round."""

    def __init__(self, device: torch.device, member: Participant, wire: Wire) -> None:
        super().__init__(device)
        self.mixes, self._wire = member.leads, wire

    def mixed(self, parameters: Sequence[nn.Parameter]) -> None:
        start_from_worker_0(parameters, self._wire.world, self._device)  # a broadcast, as at the start of a fit


class PartHolding(Holding):
    """Keeps a part of the model on each device; the first device's host has the whole during a round or a mean. Host
    tensors are sent `over` this transport."""

    def __init__(self, device: torch.device, member: Participant, over: Transport) -> None:
        super().__init__(device)
        self._member, self._over = member, over

    def mixer(self, combine: Combine, exchange: Exchange[Any], delay: int) -> Mixer:
        return (FirstMixer if self._member.leads else OtherMixer)(combine, exchange, delay, self._over)


class ShardedHolding(PartHolding):
    """Keeps some rows of each parameter on each device (FSDP)."""

    def __init__(self, device: torch.device, member: Participant, wire: Wire) -> None:
        super().__init__(device, member, wire.flags)
        self._world, self._wholes = wire.world, Wholes(wire.world, device)
        self._buckets: list[WholeBucket] = []

    def bucket(self, parameters: Sequence[nn.Parameter]) -> Bucket:
        self._buckets.append(WholeBucket(parameters, self._wholes))
        return self._buckets[-1]

    def healing(self, most: int, module: nn.Module) -> Healing:
        def named() -> list[tuple[str, Tensor]]:
            names = {parameter: name for name, parameter in module.named_parameters()}  # buckets have no names
            return [(names[p], w) for b in self._buckets for p, w in zip(b.parameters, b.wholes(), strict=True)]

        return Healing(most, lambda: first_poisoned(named()))

    def mean_of(self, tensors: Sequence[Tensor], of_wholes: Mean) -> list[Tensor]:
        if not any(map(is_sharded, tensors)):
            return of_wholes(tensors)
        means = self._member.of_first([self._wholes.whole(tensor) for tensor in tensors], means_of)  # (all rows, ...)
        return [self._wholes.cut(mean, tensor) for mean, tensor in zip(means, tensors, strict=True)]

    def sums(self, of_devices: Sequence[Tensor]) -> list[Tensor]:
        found = [number.clone() for number in of_devices]  # scalars: the caller's aren't changed
        for number in found:
            self._world.all_reduce(number).wait()
        return found


class StagesHolding(PartHolding):
    """Keeps a pipeline stage's parameters on each device; one shared by two stages is mixed twice, to the same bits.

    Messages between the stages are host tensors."""

    def __init__(self, device: torch.device, member: Participant, wire: Wire) -> None:
        over = wire.hosts(None)  # takes tensors on the host
        assert over is not None
        super().__init__(device, member, over)
        self._packed = False

    def pack(self, parameters: Sequence[nn.Parameter], bucket_bytes: int | None) -> list[Bucket]:
        if self._packed:
            raise ValueError(
                "a parameter was unfrozen during training, but elastic pipelines mix the same parameters from their "
                "first step on: train it from the start, or use another strategy"
            )
        self._packed = True  # the stages' buckets are made once, in one order
        make: Callable[..., Bucket] = self.bucket if self._member.leads else partial(OwnBucket, over=self._over)
        own = pack(parameters, bucket_bytes, make)  # this stage's, of its own parameters
        rows = gather_objects(self._over, [(b.flat.numel(), b.flat.dtype) for b in own])  # [stages][buckets]
        sizes = [(stage, *size) for stage, row in enumerate(rows) if stage for size in row]
        others: list[Bucket] = [StageBucket(self._over, *size) for size in sizes if self._member.leads]
        for bucket in others if self._member.leads else own:
            bucket.adopt()  # a rule may keep the initial values
        return [*own, *others]

    def restore(self, mixers: Mixers, rule: Any, optimizers: Sequence[Any]) -> None:
        # The rule keeps its state for the first stage's buckets alone.
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
