"""What encoding costs and what it saves: seconds per megabyte, and the link rate up to which a codec pays.

    python benchmarks/network.py codec            # one thread
    python benchmarks/network.py codec --device cuda

Timed is what a worker does in a round with one neighbour: `send`, encode and decode its own message, and `hear`,
decode the neighbour's, in a message of float32 weights. The codecs take turns, so that a neighbour's load on the
machine hits all; medians over the turns. On the CPU the seconds are those that the one thread
computed, so other processes on the machine don't count (but for the caches they share); on a device they are wall
seconds. A megabyte is 10^6 bytes of the message as it is.

    break-even rate = 8 (bytes plain - bytes encoded) / (seconds to send + seconds to hear)

On a link slower than that, encoding saves more than it costs even where nothing overlaps; above, plain messages arrive
earlier. Writes `results/codec-<hardware>.json`, which holds every turn.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from common.paths import RESULTS

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from common.hardware import description, slug
from lightning_decentral.gossip import (
    BFloat16,
    Codec,
    DifferenceCompression,
    Float16,
    Gossip,
    Int2,
    Int4,
    Int8,
    Plain,
    TopK,
)
from lightning_decentral.gossip.compute.error_feedback import Coded
from lightning_decentral.shared.compute.buckets import Pool

torch.set_num_threads(1)
CODECS = [
    BFloat16(),
    Float16(),
    Int8(),
    DifferenceCompression(Int8()),
    DifferenceCompression(Int4()),
    DifferenceCompression(Int2()),
    DifferenceCompression(TopK(fraction=0.1)),
    DifferenceCompression(TopK(fraction=0.01)),
]


class Round:
    """One worker's part of a round with one neighbour, as the exchange does it."""

    def __init__(self, codec: Codec, weights: Tensor) -> None:
        self._weights, self._message = weights, weights.clone()
        self._coder = Coded(codec, 0, {1: 0}, Pool())
        self._coder.admit([torch.zeros_like(weights)], Gossip(rate=0.01))
        self._pool, self._healthy = Pool(), torch.ones((), dtype=torch.bool, device=weights.device)
        self._received: dict[int, Tensor] = {}
        self._step = 0

    def prepare(self) -> None:
        """A message that differs a little from the last one, as after an update; not timed."""
        self._step += 1
        self._message.copy_(self._weights).mul_(1 + 0.001 * self._step)

    def send(self) -> None:
        self._sent = self._coder.encode(self._message, {1: 0.5}, self._step, 0)

    def arrive(self) -> None:
        """The neighbour's message, which is the same, in the buffers that wait for it; not timed."""
        self._arrived = self._coder.buffers([1], self._message, 0)
        for buffer, part in zip(self._arrived[1], self._sent[1], strict=True):
            buffer.copy_(part)

    def hear(self) -> None:
        self._received = self._coder.decode(self._arrived, self._message, 0)
        self._coder.remember(self._received, [self._healthy], 0)

    def finish(self) -> None:
        """Buffers go back, as at the end of a round; not timed."""
        self._coder._pool.give([*self._sent[1], self._received[1]])


def seconds(call: Callable[[], None], device: torch.device) -> float:
    """Computed by this thread in one call, or until the device is done."""
    if device.type == "cpu":
        started = time.thread_time()
        call()
        return time.thread_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(elements: int, turns: int, device: torch.device) -> dict[str, Any]:
    """Every codec `turns` times, in turn, after two that don't count; and a copy of the message."""
    weights = torch.randn(elements, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(device)
    rounds = {repr(codec): Round(codec, weights) for codec in CODECS}
    rows: dict[str, dict[str, list[float]]] = {name: {"send": [], "hear": []} for name in [*rounds, "copy"]}
    out = torch.empty_like(weights)
    for turn in range(turns + 2):
        for name, one in rounds.items():
            one.prepare()
            timed = {"send": seconds(one.send, device)}
            one.arrive()
            timed["hear"] = seconds(one.hear, device)
            one.finish()
            for part, value in timed.items() if turn >= 2 else ():
                rows[name][part].append(value)
        rows["copy"]["send"].append(seconds(lambda: out.copy_(weights), device))
    plain = Plain().bytes(elements, weights.dtype)
    sizes = {repr(codec): codec.bytes(elements, weights.dtype) for codec in CODECS}
    return {"elements": elements, "bytes plain": plain, "bytes": sizes, "seconds": rows}


def summary(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each codec."""
    rows, megabytes = [], result["bytes plain"] / 1e6
    for name, encoded in result["bytes"].items():
        send, hear = (statistics.median(result["seconds"][name][part]) for part in ("send", "hear"))
        rows.append({
            "codec": name,
            "times smaller": round(result["bytes plain"] / encoded, 2),
            "send ms per MB": round(1e3 * send / megabytes, 3),
            "hear ms per MB": round(1e3 * hear / megabytes, 3),
            "break-even Gb/s": round(8e-9 * (result["bytes plain"] - encoded) / (send + hear), 2),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--elements", type=int, default=2**22, help="of the message")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--name", default="codec", help="of the file of results")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    result = measure(options.elements, options.turns, torch.device(options.device))
    rows = summary(result)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=140).print(table)
    about = {
        "hardware": description(),
        "threads": 1,
        "clock": "thread" if options.device == "cpu" else "wall",
        "load of the machine when it began": round(load, 1),
    }
    path = RESULTS / f"{options.name}-{slug()}.json"
    path.write_text(json.dumps({**about, "summary": rows, **result}, indent=1))
    print(f"raw results: {path}")
