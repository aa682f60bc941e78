"""The parts of the first hour on a GPU: each yields rows, and may fail without the others.

Predictions: bytes that must be moved over the rate of a copy, which `facts` measures; counts of the simulated device
(`gpu.passes`); for the rest an H100's data sheets.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from gpu.first_hour_runs import pytested, side_by_side, trained
from lightning_decentral.gossip import Codec, Exponential, Gossip, Int8, Own, Plain
from lightning_decentral.gossip.compute import mixing
from lightning_decentral.gossip.round_cost import LoopbackTransport
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.shared.compute import fused, health
from lightning_decentral.shared.compute.buckets import LooseBucket
from lightning_decentral.shared.compute.codec import quantize
from lightning_decentral.shared.compute.hardware import duration

CASES = ("gossip", "int8", "compressed", "allreduce", "partial_backprop", "token_pipeline")
SHARDED = ("fully_shard",)
"""By NCCL alone: gloo scatters no sums of a device."""


class Row(NamedTuple):
    """One line: a number or text, and its prediction."""

    name: str
    value: float | str
    predicted: str = ""

    def shown(self) -> str:
        return self.value if isinstance(self.value, str) else f"{self.value:.4g}"

    def line(self) -> str:
        return f"{self.name}: {self.shown()}" + (f"   (predicted {self.predicted})" if self.predicted else "")


def timed(call: Callable[[], object], device: torch.device, times: int = 12) -> float:
    """Median seconds after three that don't count."""
    return median([duration(call, device) for _ in range(times + 3)][3:])


def sizes(device: torch.device, whole: int) -> int:
    """A thousandth of it on the CPU, where the script itself is tried."""
    return whole if device.type == "cuda" else max(4096, whole // 1024)


def copy_rate(device: torch.device) -> float:
    """Bytes read and written per second."""
    x = torch.randn(sizes(device, 2**28), device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / timed(lambda: y.copy_(x), device)


def link_rates(device: torch.device) -> tuple[float, float]:
    """Bytes per second from pinned memory of the host to the device, and back."""
    host = torch.empty(sizes(device, 2**26), pin_memory=device.type == "cuda")
    there = torch.empty_like(host, device=device)
    up = timed(lambda: there.copy_(host, non_blocking=True), device)
    return host.nbytes / up, host.nbytes / timed(lambda: host.copy_(there, non_blocking=True), device)


def facts(device: torch.device) -> Iterator[Row]:
    on_device = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_device else "the host"
    yield Row("device", f"{name}, {torch.cuda.device_count()} of them")
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_device else "none"
    yield Row("torch, CUDA, NCCL", f"{torch.__version__}, {torch.version.cuda}, {nccl}")
    yield Row("Triton", "compiles" if on_device and fused.kernels(device) else "not here")
    yield Row("copy, TB/s", copy_rate(device) / 1e12, "3.0 on an H100, 4.3 on an H200")
    up, down = link_rates(device)
    yield Row("pinned to device, GB/s", up / 1e9, "50 by PCIe 5")
    yield Row("device to pinned, GB/s", down / 1e9, "50 by PCIe 5")


def tests(device: torch.device) -> Iterator[Row]:
    """The marked tests by folder, so that a hang costs one of them."""
    if device.type != "cuda":
        yield Row("tests marked gpu", "not on the CPU: they need a device")
        return
    folders = {"tests/gossip": 400, "tests/shared tests/optim": 240,
               "tests/spilled tests/sweep tests/benchmarks/test_gpu.py": 240}  # fmt: skip
    said = side_by_side([partial(pytested, where.split(), "gpu", seconds) for where, seconds in folders.items()])
    for where, words in zip(folders, said, strict=True):
        yield Row(where, words, "all pass")


def kernels(device: torch.device) -> Iterator[Row]:
    """Our own operators against torch's operations, their bits and their time."""
    n, rate = sizes(device, 2**28), copy_rate(device)
    x, sent, heard = (torch.randn(n, device=device) for _ in range(3))
    sane = torch.ones(2, dtype=torch.bool, device=device)
    out = torch.empty_like(x)
    header, other = (torch.empty(3, dtype=torch.int64, device=device) for _ in range(2))
    codes, scales = torch.empty(n, dtype=torch.int8, device=device), torch.empty(-(-n // 256), device=device)

    def same(ours: Callable[[Tensor], object], torchs: Callable[[Tensor], object]) -> str:
        one, two = x.clone(), x.clone()
        ours(one)
        torchs(two)
        return "equal bits" if torch.equal(one, two) else f"differs by {(one - two).abs().max():.2g}"

    given = sent, [heard], [0.5], sane
    pairs: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], object], float]] = {
        "correct": (
            lambda y: mixing.correct_(y, *given, 0.7), lambda y: mixing._correct(y, *given, 0.7), 4,
        ),
        "correct, and copy what leaves next": (
            lambda y: mixing.correct_and_state_(out, header, y, *given, 0.7, 1, n),
            lambda y: mixing._correct_and_state(out, other, y, *given, 0.7, 1, n), 5,
        ),
        "state": (
            lambda y: health.state_(y, header, sent, 1, n), lambda y: health._state(y, other, sent, 1, n), 2,
        ),
        "int8 encode": (
            lambda y: quantize.int8_encode_(codes, scales, y, 256, 1, True),
            lambda y: quantize._encode(codes, scales, y, 256, 1, True), 2.25,
        ),
        "int8 decode": (
            lambda y: quantize.int8_decode_(y, codes, scales, 256),
            lambda y: quantize._decode(y, codes, scales, 256), 1.25,
        ),
    }  # fmt: skip
    for name, (ours, torchs, passes) in pairs.items():
        yield Row(f"{name}: against torch's", same(ours, torchs), "equal bits")
        bound = passes * x.nbytes / rate
        yield Row(f"{name}, ms", 1e3 * timed(lambda f=ours: f(x), device), f"{1e3 * bound:.3g}, by bytes")
        yield Row(f"{name} by torch's operations, ms", 1e3 * timed(lambda f=torchs: f(x), device))


def round_(device: torch.device) -> Iterator[Row]:
    """One round of a worker without its messages: device time, launches."""
    rate = copy_rate(device)
    for codec, heard, passes in ((Plain(), 1, 5.0), (Plain(), 2, 6.0), (Int8(), 1, 10.5)):
        for whole, buckets in ((2**26, 1), (2**26, 8), (2**32, 4)):
            size = 4 * (sizes(device, whole) // 4)
            mixer = _mixer(size, heard, buckets, codec, device)
            name = f"{codec}, {heard} heard, {size / 2**20:.4g} MiB in {buckets} buckets"
            yield Row(f"{name}: ms", 1e3 * timed(mixer.step, device, 8), f"{1e3 * passes * size / rate:.3g}, by bytes")
            began = time.perf_counter()
            for _ in range(3):
                mixer.step()
            yield Row(f"{name}: host's ms", 1e3 * (time.perf_counter() - began) / 3, "under 0.15 a bucket")
    if device.type == "cuda":
        from torch.profiler import ProfilerActivity, profile

        mixer = _mixer(2**26, 1, 8, Plain(), device)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            mixer.step()
            torch.cuda.synchronize()
        names = [e.name for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        launched = [name for name in names if not name.startswith("Mem")]
        yield Row("kernels of a round with 8 buckets, the loop's copies of headers left out", len(launched) - 8, "24")


def _mixer(size: int, heard: int, buckets: int, codec: Codec, device: torch.device) -> Mixer:
    whole = torch.randn(size // 4, device=device)
    loop = LoopbackTransport(1 << heard)
    exchange = PeerExchange(Exponential(), Own(), loop, device, codec)
    mixer = Mixer([LooseBucket(part) for part in whole.chunk(buckets)], Gossip(), exchange, delay=1)
    for _ in range(17):  # the codec's error is measured in rounds 0, 1, 2, 4, 8, 16
        mixer.step()
    loop.silent = True
    return mixer


def codecs(device: torch.device) -> Iterator[Row]:
    from network import codec

    # Passes over the message: an encoding is decoded, too, as its hearers will. Of other codecs nobody counted them.
    passes = {("copy", "send"): 2.0, (repr(Int8()), "send"): 3.5, (repr(Int8()), "hear"): 1.25}
    rate = copy_rate(device) / 1e9
    found = codec.measure(sizes(device, 2**27), 5, device)
    for name, parts in found["seconds"].items():
        for part, seconds in parts.items():
            if seconds:
                bound = f"{rate / passes[name, part]:.3g}, by bytes" if (name, part) in passes else ""
                yield Row(f"{name}: {part}, GB/s of message", found["bytes plain"] / median(seconds) / 1e9, bound)


def workers(device: torch.device) -> Iterator[Row]:
    """Two real workers on one device, by gloo: NCCL refuses two ranks on a device."""
    said = side_by_side([partial(trained, case, device, 2, "gloo", one_device=True) for case in CASES])
    for case, words in zip(CASES, said, strict=True):
        yield Row(case, words, "ok")
    yield Row(", ".join(SHARDED), "by NCCL alone, which needs a device each: part devices")


def devices(device: torch.device) -> Iterator[Row]:
    """Yield the rows by NCCL, a device each."""
    count = torch.cuda.device_count() if device.type == "cuda" else 2
    if count < 2:
        yield Row("strategies by NCCL", f"needs two devices, here is {count}")
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    for case in (*CASES, *SHARDED):
        yield Row(f"{case}, {min(count, 4)} workers", trained(case, device, min(count, 4), backend), "ok")
    yield Row(
        "a worker is killed: the others end", trained("gossip", device, 2, backend, kill=True), "within 20 s, by name"
    )
    if device.type == "cuda":
        yield Row("tests marked multigpu", pytested(["tests/gossip", "tests/shared"], "multigpu", 240), "all pass")


def spilled(device: torch.device) -> Iterator[Row]:
    """A model within a part of the device's memory, compared with the plain run: seconds of a step, peak."""
    from gpu.first_hour_worker import spilled_step

    up, _ = link_rates(device)
    for update in ("plain", "on the host", "on the device"):
        seconds, peak, parameters, limit = spilled_step(device, update)
        least, most = f"at least {8 * parameters / up:.3g}: each twice up the link", f"at most {limit / 2**30:.3g}"
        if update == "plain":
            least, most = "", ""
        yield Row(f"{parameters / 1e6:.4g} million parameters, {update}: s per step", seconds, least)
        yield Row(f"{update}: peak GiB", peak / 2**30 if device.type == "cuda" else "nobody counts on the CPU", most)


def rehearsal(device: torch.device) -> Iterator[Row]:
    """Workers in one process: the same losses as on the CPU, and their seconds."""
    if not find_spec("hydra"):
        yield Row("rehearsed", "not looked at, for want of hydra")
        return
    from gpu.first_hour_worker import SMALL, rehearsed

    here, there = (rehearsed(SMALL, at, 10)[0] for at in (device.type, "cpu"))
    apart = max(abs(a - b) for a, b in zip(here, there, strict=True))
    yield Row("one after the other: largest difference of a loss", apart, "under 0.001")
    large = {**SMALL, "n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 256}
    config, steps = (large, 60) if device.type == "cuda" else (SMALL, 10)
    seconds = rehearsed(config, device.type, steps)[1]
    yield Row("one after the other: ms a step of one worker, all included", 1e3 * seconds / (steps * 4 * 3))


PARTS: dict[str, Callable[[torch.device], Iterator[Row]]] = {
    "facts": facts, "tests": tests, "kernels": kernels, "round": round_, "workers": workers, "codecs": codecs,
    "spilled": spilled, "rehearsal": rehearsal, "devices": devices,
}  # fmt: skip
