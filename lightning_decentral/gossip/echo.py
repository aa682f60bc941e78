"""What a round of gossip takes a device beside the wire, measured: a worker whose neighbours are its own echo.

    seconds(heard) = median over repeats of one round: correct by the last one's mixture, copy or encode, decode, mix
    heard_seconds_per_byte = (seconds(3) - seconds(1)) / 2 bytes        own_seconds_per_byte = seconds(1) / bytes - that

From each neighbour comes what went to another, copied: on the host in place of the copy out of the network's buffers.
On the host one thread does it all, where training does a part beside the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from lightning_decentral.buckets import BUCKETS, MOST_BUCKET_BYTES
from lightning_decentral.gossip.codec import BFloat16, Float16, Int8, Plain
from lightning_decentral.gossip.coding import Coding
from lightning_decentral.gossip.combine.gossip import Gossip
from lightning_decentral.gossip.exchange import PeerExchange
from lightning_decentral.gossip.mixer import Mixer
from lightning_decentral.gossip.topology import Exponential
from lightning_decentral.gossip.weights import Own
from lightning_decentral.hardware import RoundWork
from lightning_decentral.pending import Pending
from lightning_decentral.stopwatch import duration
from lightning_decentral.transport import Message, Transport

CODECS: tuple[Coding, ...] = (Plain(), BFloat16(), Float16(), Int8())
FEW, MANY = 1, 3
WARM_UP, REPEATS = 2, 7
ELEMENT_BYTES = 4  # float32


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


class Echo(Transport):
    """Of worker 0, on any device; it must hear as many as hear it."""

    def __init__(self, size: int) -> None:
        super().__init__(_Group(size))

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        """See `Transport.exchange`; done at once."""
        for sent, heard in zip(sends, receives, strict=True):
            heard.tensor.copy_(sent.tensor)
        return [_Here() for _ in sends], [_Here() for _ in receives]


def round_works(
    parameter_bytes: int, device: torch.device, pause: Callable[[], None] = lambda: None
) -> tuple[RoundWork, ...]:
    """Of every codec without state, for so many bytes of float32 parameters.

    Args:
        pause: before each round, outside the measurement.
    """
    return tuple(_work(codec, parameter_bytes, device, pause) for codec in CODECS)


def _work(codec: Coding, parameter_bytes: int, device: torch.device, pause: Callable[[], None]) -> RoundWork:
    size = max(ELEMENT_BYTES, min(parameter_bytes, MOST_BUCKET_BYTES))
    few, many = (_seconds(codec, heard, size, device, pause) / size for heard in (FEW, MANY))
    heard = min(few / FEW, max(0.0, (many - few) / (MANY - FEW)))
    return RoundWork(type(codec).__name__, few - FEW * heard, heard)


def _seconds(codec: Coding, heard: int, size: int, device: torch.device, pause: Callable[[], None]) -> float:
    exchange = PeerExchange(Exponential(), Own(), Echo(1 << heard), device, codec)
    buckets = [_Bucket(part) for part in torch.ones(size // ELEMENT_BYTES, device=device).tensor_split(BUCKETS)]
    mixer = Mixer([bucket for bucket in buckets if len(bucket.flat)], Gossip(), exchange, delay=1)
    taken = []
    for _ in range(WARM_UP + REPEATS):
        pause()
        taken.append(duration(mixer.step, device))
    return median(taken[WARM_UP:])
