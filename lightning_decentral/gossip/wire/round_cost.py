"""Round cost: what a round of gossip takes a device beside the wire, measured on a loopback of its own messages.

    seconds(heard) = median over repeats of one round: correct by the last one's mixture, copy or encode, decode, mix
    heard_seconds_per_byte = (seconds(3) - seconds(1)) / 2 bytes        own_seconds_per_byte = seconds(1) / bytes - that

The rounds are those of training, in as many buckets. On the host one thread of Python does it all, where training does
the most part beside the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.plan.topology.static import Exponential
from lightning_decentral.gossip.plan.weights import Own
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.buckets import message_bytes_of
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.compute.codec.difference import DifferenceCompression
from lightning_decentral.shared.compute.codec.packed import Int4
from lightning_decentral.shared.compute.codec.quantize import BFloat16, Float16, Float32, Int8, Plain
from lightning_decentral.shared.compute.hardware import duration
from lightning_decentral.shared.plan.profile import RoundWork
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Message, Transport

CODECS: tuple[Codec, ...] = (Plain(), Float32(), BFloat16(), Float16(), Int8(), Int4(), DifferenceCompression(Int4()))
FEW, MANY = 1, 3
WARM_UP, REPEATS = 9, 5  # rounds 1, 2, 4, 8, 16, ... also measure the codec's error
ROUNDS = len(CODECS) * 2 * (WARM_UP + REPEATS)
ELEMENT_BYTES = 4  # float32
HOST_BYTES = 64 * 2**20  # of a message; larger ones cost in proportion
DEVICE_SHARE = 16  # of the free memory of a device, where launching costs more than a small message


@dataclass(frozen=True)
class _Group:
    """Of one worker and others who aren't there."""

    workers: int

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.workers


class _Here:
    """What has arrived."""

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True


@dataclass
class _Bucket:
    """Parameters that nobody else holds."""

    flat: Tensor

    def adopt(self) -> None:
        return


class LoopbackTransport(Transport):
    """Of worker 0, on any device; it must hear as many as hear it.

    Attributes:
        silent: whether only headers still come.
    """

    def __init__(self, size: int) -> None:
        super().__init__(_Group(size))
        self.silent = False

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        for sent, heard in zip(sends, receives, strict=True):
            # Silent after the warm-up: what was heard then is still there, and no copy stands for the
            # wire, which is measured by itself.
            if not (self.silent and heard.tag):
                heard.tensor.copy_(sent.tensor)
        return [_Here() for _ in sends], [_Here() for _ in receives]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        """This worker's is everyone's."""
        return _Here()


def round_works(
    parameter_bytes: int, device: torch.device, pause: Callable[[], None] = lambda: None
) -> tuple[RoundWork, ...]:
    """Of `CODECS`, for so many bytes of float32 parameters; of none where no stopwatch sees what the device does.

    Args:
        pause: before each of `ROUNDS` rounds, outside the measurement.
    """
    if device.type not in ("cpu", "cuda"):
        return ()
    most = HOST_BYTES if device.type == "cpu" else cuda.free_bytes(device) // DEVICE_SHARE
    size = max(ELEMENT_BYTES, min(parameter_bytes, most))
    return tuple(_work(codec, size, device, pause) for codec in CODECS)


def _work(codec: Codec, size: int, device: torch.device, pause: Callable[[], None]) -> RoundWork:
    few, many = (_seconds(codec, heard, size, device, pause) / size for heard in (FEW, MANY))
    # Noise mustn't make either of the two costs negative.
    heard = min(few / FEW, max(0.0, (many - few) / (MANY - FEW)))
    return RoundWork(repr(codec), few - FEW * heard, heard)


def _seconds(codec: Codec, heard: int, size: int, device: torch.device, pause: Callable[[], None]) -> float:
    # On the exponential graph of 2^k workers each hears k.
    echo = LoopbackTransport(1 << heard)
    mixer = Mixer(_buckets(size, device), Gossip(), PeerExchange(Exponential(), Own(), echo, device, codec), delay=1)
    taken = []
    for count in range(WARM_UP + REPEATS):
        pause()
        echo.silent = count >= WARM_UP
        taken.append(duration(mixer.step, device))
    return median(taken[WARM_UP:])


def _buckets(size: int, device: torch.device) -> list[_Bucket]:
    """As many as training would make of one parameter's rows."""
    whole = torch.ones(size // ELEMENT_BYTES, device=device)
    return [_Bucket(part) for part in whole.split(message_bytes_of([nn.Parameter(whole)]) // ELEMENT_BYTES)]
