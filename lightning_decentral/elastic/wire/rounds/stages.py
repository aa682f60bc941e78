"""Holding of a pipeline's model by its stages, for rounds with other members: each its part, the first one's host all.

    every stage   its parameters -> the first one's host      `StageBucket.adopt`
    the first     a round, as ever                            `Mixer`
    every stage   its parameters <- the first one's host      `StageBucket.store`

What travels is on the hosts.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.elastic.compute.gathered import means_of
from lightning_decentral.elastic.wire.participant import Participant
from lightning_decentral.elastic.wire.rounds.holding import Mean, PartHolding
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.buckets import Bucket, pack
from lightning_decentral.shared.wire.objects import collect_objects, gather_objects
from lightning_decentral.shared.wire.transport import Message, Transport, Wire


class OwnBucket(Bucket):
    """Bucket of a later stage than the first, on its device: `adopt` sends it to the first's host, `store` gets it."""

    def __init__(self, parameters: Sequence[nn.Parameter], over: Transport) -> None:
        self._over = over
        self._made = False  # the base's constructor adopts
        super().__init__(parameters)
        self._made = True

    def adopt(self) -> None:
        super().adopt()
        if self._made:  # not yet while the first one hasn't made its own
            send(self._over, 0, self.flat)

    def store(self) -> None:
        receive(self._over, 0, self.flat)


class StageBucket(Bucket):
    """The same on the first stage's host, in the order of the other's messages."""

    def __init__(self, over: Transport, stage: int, elements: int, dtype: torch.dtype) -> None:
        self.parameters, self._offsets, self.places, self._grain = (), [], [], elements
        self._over, self._stage = over, stage
        self.held = self.flat = torch.zeros(elements, dtype=dtype)  # (elements,), on the host

    def adopt(self) -> None:
        receive(self._over, self._stage, self.flat)

    def store(self) -> None:
        send(self._over, self._stage, self.flat)

    def release(self) -> None:
        """Do nothing: there are no parameters here."""


class Stages(PartHolding):
    """Each stage has some parameters; one that stands on two is mixed twice, to the same bits."""

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
                    send(self._over, stage, mean)  # the first one's own are the first of `means`
        else:
            for mean in found:
                receive(self._over, 0, mean)  # in the order in which they are sent
        return [mean.to(tensor.device) for mean, tensor in zip(found, tensors, strict=True)]

    def sums(self, of_devices: Sequence[Tensor]) -> list[Tensor]:
        found = [number.detach().cpu() for number in of_devices]  # scalars
        for number in found:
            self._over.all_reduce(number).wait()
        return found


def send(over: Transport, to: int, tensor: Tensor) -> None:
    """Send a tensor from the host."""
    if tensor.numel():
        outgoing, _ = over.exchange([Message(to, tensor.detach().cpu().contiguous(), 0)], [])
        outgoing[0].wait()


def receive(over: Transport, source: int, into: Tensor) -> None:
    """Receive into a tensor by the host."""
    if into.numel():
        host = into if into.device.type == "cpu" else cuda.host_like(into)  # as many elements, pinned
        _, incoming = over.exchange([], [Message(source, host, 0)])
        incoming[0].wait()
        if host is not into:
            into.copy_(host)
