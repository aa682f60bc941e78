"""Measures the compute time of a gossip round, without the network, on a loopback of a worker's own messages.

    seconds(sources, bytes) = round + sources message + bytes (own + sources each)    fitted to few and many sources

On a CPU the measure is processor time, of all threads and of the system's work on their sockets: workers, each a thread
of this process, take rounds together as in training, and share the time equally. Other programs don't change processor
time, and no worker waits. On a GPU the measure is the median over repeats of one stream's time, for a worker that
receives its own messages; only the part proportional to bytes counts."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from statistics import median
from threading import Barrier
from time import process_time

import torch
from torch import Tensor, nn

from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.plan.topology.static import Exponential
from lightning_decentral.gossip.plan.weights import Own
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.overlap import overlapped
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.buckets import LooseBucket, message_bytes_of
from lightning_decentral.shared.compute.codec.codec import BFloat16, Codec, Float16, Float32, Plain
from lightning_decentral.shared.compute.codec.quantize import Int4, Int8
from lightning_decentral.shared.compute.codec.topk import DifferenceCompression
from lightning_decentral.shared.compute.hardware import duration
from lightning_decentral.shared.plan.profile import RoundWork
from lightning_decentral.shared.wire.meeting.groups import loopback
from lightning_decentral.shared.wire.pending import Pending, Together
from lightning_decentral.shared.wire.transport import Message, Transport

CODECS: tuple[Codec, ...] = (Plain(), Float32(), BFloat16(), Float16(), Int8(), Int4(), DifferenceCompression(Int4()))
WARM_UP, REPEATS = 17, 14  # rounds 1, 2, 4, 8, 16, ... also measure the codec's error
ROUNDS = len(CODECS) * 4 * (WARM_UP + REPEATS)  # Largest number of rounds measured on a CPU.
ELEMENT_BYTES = 4  # float32
SMALL_BYTES = 64 * 2**10
HOST_BYTES = 4 * 2**20  # bytes of a message; larger messages cost in proportion
DEVICE_SHARE = 16  # share of a device's free memory, as launching kernels costs more than a small message
LONGEST = timedelta(seconds=60)


@dataclass(frozen=True)
class _Group:
    """Process group of worker 0 and `workers` - 1 others that don't exist."""

    workers: int

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.workers


ARRIVED = Together(())  # a transfer that has completed


class LoopbackTransport(Transport):
    """Transport on which worker 0 receives the messages that it sends; needs as many sources as targets."""

    def __init__(self, size: int) -> None:
        super().__init__(_Group(size))
        self.silent = False  # whether only headers are still copied

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        for sent, received in zip(sends, receives, strict=True):
            # Silent after the warm-up: the buffers still contain what was received, and a copy would count as
            # network time, which is measured separately.
            if not (self.silent and received.tag):
                received.tensor.copy_(sent.tensor)
        return [ARRIVED] * len(sends), [ARRIVED] * len(receives)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        """Leave the tensor unchanged: there is no other worker."""
        return ARRIVED


class HostMeter:
    """Measures processor time of workers in threads, on sockets of this host, with few and with many neighbours."""

    received = (1, 2)

    def __init__(self, parameter_bytes: int, pause: Callable[[], None]) -> None:
        large = max(ELEMENT_BYTES, min(parameter_bytes, HOST_BYTES))
        self.sizes = sorted({min(SMALL_BYTES, large), large})  # bytes of the parameters
        self._pause = pause
        # On the exponential graph of 2^k workers each has k sources.
        self._ends = {received: loopback(1 << received, LONGEST) for received in self.received}

    def seconds(self, codec: Codec, received: int, size: int) -> float:
        """Seconds of processor time that one worker's round takes."""
        ends = self._ends[received]
        meet = Barrier(len(ends))
        with ThreadPoolExecutor(len(ends)) as threads:
            taken = [*threads.map(partial(self._rounds, codec, size, meet), ends)]
        return taken[0] / REPEATS / len(ends)

    def _rounds(self, codec: Codec, size: int, meet: Barrier, end: Transport) -> float:
        """Processor seconds of all workers in the rounds after the warm-up."""
        cpu = torch.device("cpu")
        exchange = overlapped(PeerExchange(Exponential(), Own(), end, cpu, codec), cpu, 1)
        mixer = Mixer(_buckets(size, cpu), Gossip(), exchange, delay=1)
        with torch.no_grad():
            self._take(mixer, WARM_UP, end)
            meet.wait()
            begun = process_time()
            meet.wait()
            self._take(mixer, REPEATS, end)
            meet.wait()
            taken = process_time() - begun
            meet.wait()
            mixer.drain()
        return taken

    def _take(self, mixer: Mixer, rounds: int, end: Transport) -> None:
        for _ in range(rounds):
            if not end.rank:
                self._pause()
            mixer.step()


class DeviceMeter:
    """Measures, as `HostMeter`, a device stream's seconds for a worker that receives its own messages."""

    received = (1, 3)

    def __init__(self, parameter_bytes: int, device: torch.device, pause: Callable[[], None]) -> None:
        most = cuda.free_bytes(device) // DEVICE_SHARE if device.type == "cuda" else HOST_BYTES
        self.sizes = [max(ELEMENT_BYTES, min(parameter_bytes, most))]
        self._device, self._pause = device, pause

    def seconds(self, codec: Codec, received: int, size: int) -> float:
        echo, device = LoopbackTransport(1 << received), self._device
        exchange = PeerExchange(Exponential(), Own(), echo, device, codec)
        mixer = Mixer(_buckets(size, device), Gossip(), exchange, delay=1)
        taken = []
        for count in range(WARM_UP + REPEATS):
            self._pause()
            echo.silent = count >= WARM_UP
            taken.append(duration(mixer.step, device))
        return median(taken[WARM_UP:])


Meter = HostMeter | DeviceMeter


def round_works(
    parameter_bytes: int, device: torch.device, pause: Callable[[], None] = lambda: None
) -> tuple[RoundWork, ...]:
    """Measure a round's work with each of `CODECS` on float32 parameters; empty unless on a CPU or with CUDA. `pause`
    is called before each round, outside the measurement or without processor time."""
    if device.type not in ("cpu", "cuda"):
        return ()
    on_host = device.type == "cpu"
    meter = HostMeter(parameter_bytes, pause) if on_host else DeviceMeter(parameter_bytes, device, pause)
    return tuple(_work(codec, meter) for codec in CODECS)


def _work(codec: Codec, meter: Meter) -> RoundWork:
    lines = [
        _line([(size, meter.seconds(codec, received, size)) for size in meter.sizes]) for received in meter.received
    ]
    (fixed_few, few), (fixed_many, many) = lines
    fixed, message = _parts(meter.received, fixed_few, fixed_many)
    return RoundWork(repr(codec), *_parts(meter.received, few, many), fixed, message)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit (fixed seconds, seconds per byte) to one or two (bytes, seconds) points; neither is below 0."""
    (small, least), (large, most) = points[0], points[-1]
    if small == large:
        return 0.0, most / large
    per_byte = min(most / large, max(0.0, (most - least) / (large - small)))
    return max(0.0, most - per_byte * large), per_byte  # rounded, the difference may be below 0 by itself


def _parts(received: tuple[int, int], few: float, many: float) -> tuple[float, float]:
    """Split seconds into (own part, part for each neighbour). Neither noise nor rounding makes a part negative."""
    each = min(few / received[0], max(0.0, (many - few) / (received[1] - received[0])))
    return max(0.0, few - received[0] * each), each


def _buckets(size: int, device: torch.device) -> list[LooseBucket]:
    """Buckets of `size` bytes in total, split as training would split one parameter."""
    whole = torch.ones(size // ELEMENT_BYTES, device=device)
    return [LooseBucket(part) for part in whole.split(message_bytes_of([nn.Parameter(whole)]) // ELEMENT_BYTES)]
