"""Averaged gradients in a rehearsal, as `ddp` and `compressed` have them: by the strategies' own averages.

One worker's update serves all (`Member.drifts`), so worker 0 alone takes what all give. Codes are made and reduced
where they are asked for, and not beside the backward: their messages take no time.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_decentral.compressed.strategy import of_all
from lightning_decentral.planner.rehearsal.members.member import Member, Place
from lightning_decentral.planner.rehearsal.worker import CPU
from lightning_decentral.shared.compute.buckets import bucket_bytes_of
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.wire.averaging.gradient_average import GradientAverage
from lightning_decentral.shared.wire.compressed_mean import CompressedMean, ExactMean, InFlight, Mean
from lightning_decentral.shared.wire.pending import Pending, Together
from lightning_decentral.shared.wire.running_buffers import RunningBuffers
from lightning_decentral.shared.wire.transport import Wire


class TotalOfFirst(ExactMean):
    """A sum that worker 0 takes; the others' gradients are its own to read from then on."""

    def total(self, flat: Tensor) -> Pending:
        summed = self.over.reduce(flat, target=0)
        return Together([]) if self.over.rank else summed


class NotTaken(InFlight):
    """Codes of the others' parts, which come and are read by nobody."""

    def take(self, owner: int, codes: list[Tensor]) -> None:
        """They are worker 0's to decode."""


class WhenAsked:
    """A call that is done when its result is asked for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._calls = [call]

    def result(self) -> Any:
        with torch.no_grad():
            while self._calls:
                self._calls.pop()()

    def done(self) -> bool:
        return not self._calls


class Lazily:
    """A stage that begins nothing by itself."""

    def send(self, call: Callable[[], Any]) -> WhenAsked:
        return WhenAsked(call)


class Eagerly:
    """A stage that has done what was sent to it."""

    def send(self, call: Callable[[], Any]) -> WhenAsked:
        sent = WhenAsked(call)
        sent.result()
        return sent


class CodedOfFirst(CompressedMean):
    """Codes that leave when they are started, and are reduced when somebody waits for it."""

    def __init__(self, codec: Codec, wire: Wire) -> None:
        super().__init__(codec, of_all(wire), of_all(wire), CPU)
        self.leaving, self.owning = Eagerly(), Lazily()
        self.flight = NotTaken if self.over.rank else InFlight


class Averaging(Member):
    """Gradients averaged by all, in a codec's payloads; worker 0's running statistics for all."""

    drifts: ClassVar[bool] = False

    def __init__(self, module: LightningModule, place: Place, codec: Codec, bucket_bytes: int | None) -> None:
        self._module, self._place, self._codec = module, place, codec
        self._parameters = list(module.parameters())  # to walk through the module takes longer than to average them
        self._bucket_bytes = bucket_bytes or bucket_bytes_of(self._parameters)
        self._looked, self._after_backward = False, ExitStack()

    def begin(self) -> None:
        wire = self._place.wire
        buffers, hosts = wire.group(None), wire.hosts(None)
        assert buffers is not None
        assert hosts is not None
        self._buffers = RunningBuffers(self._module, buffers)
        self._mean: Mean = CodedOfFirst(self._codec, wire) if self._codec.encodes else TotalOfFirst(of_all(wire))
        self._gradients = GradientAverage(self._mean, hosts, lambda call: call(), self._bucket_bytes)
        # Nothing is sent while a backward runs, which would wait for workers whose turn comes later.
        self._after_backward.enter_context(self._gradients.blocked())

    def average(self) -> None:
        self._gradients.watch(self._parameters)
        self._gradients.begin()
        self._gradients.finish()

    def mix(self) -> None:
        self._buffers.share(look=not self._looked)
        self._looked = True

    def release(self) -> None:
        self._after_backward.close()
        self._gradients.close()

    @property
    def sent_bytes(self) -> float:
        return self._mean.sent_bytes
