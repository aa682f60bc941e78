"""What gossip costs on one CUDA device: the binding, the codecs, the staging of messages, their memory.

    python benchmarks/gpu.py

Binding: seconds per step of a GPT and a ResNet recipe in bf16, one worker under gossip against a plain single device,
in turns within one run; a ratio is that of medians over the turns. A single worker has nobody to talk to, so this is
what the strategy itself adds to a step.

Codecs: gigabytes of message encoded and decoded per second, compared with a copy on the device.

Staging: two workers as threads share the device and exchange through pinned host memory, as gossip does over gloo.
Device seconds of computing alone, of the exchange alone, and of an exchange that is launched before the computation and
landed behind it.

    hidden = (computing + exchange - both) / min(computing, exchange)      1 is all of it, 0 none

Memory: bytes that one message in flight holds on the device, in units of the message.

Needs one CUDA device, and without one says so and writes nothing. Writes results/gpu-<device>.json.
"""

import argparse
import gc
import json
import os
import statistics
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from common.paths import RESULTS

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from common.hardware import description, slug
from gpu.report import page
from gpu.work import WORKS, Repeated, Work
from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import MetropolisHastings, Ring
from lightning_decentral.gossip.wire.exchange import Copied, MessageInFlight
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.shared.compute.hardware import duration, laps
from lightning_decentral.shared.wire.transport import transport
from network import codec

WARM_UP = 5
BINDINGS = {"plain": lambda device: SingleDeviceStrategy(device=str(device)), "gossip": lambda device: GossipStrategy()}


class Clock(Callback):
    """Seconds per step behind the first ones; the host runs ahead of the device as it does in training."""

    def __init__(self, device: torch.device) -> None:
        self._laps = laps(device)
        self._steps = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self._steps += 1
        if self._steps >= WARM_UP:
            self._laps.lap()

    def seconds(self) -> float:
        """Mean."""
        stamps = self._laps.seconds()
        return stamps[-1] / (len(stamps) - 1)


def step_seconds(strategy: Strategy, work: Work, steps: int, device: torch.device) -> float:
    """Return the seconds of a step, from one run."""
    clock = Clock(device)
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=WARM_UP + steps,
        callbacks=[clock],
        logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = Repeated(work.examples(device), WARM_UP + steps)
    trainer.fit(work.model(), DataLoader(batches, batch_size=None))
    return clock.seconds()


def binding(work: Work, turns: int, steps: int, device: torch.device) -> dict[str, Any]:
    """Both strategies in turn, after one run that doesn't count; the ratio of medians."""
    step_seconds(BINDINGS["plain"](device), work, 1, device)
    rows: dict[str, list[float]] = {name: [] for name in BINDINGS}
    for _ in range(turns):
        for name, build in BINDINGS.items():
            rows[name].append(step_seconds(build(device), work, steps, device))
    medians = {name: statistics.median(values) for name, values in rows.items()}
    return {"seconds": rows, "ratio": medians["gossip"] / medians["plain"]}


def codecs(elements: int, turns: int, device: torch.device) -> dict[str, Any]:
    """Gigabytes of message per second, encoded (`send`) and decoded (`hear`); `copy` reads and writes bytes once."""
    found = codec.measure(elements, turns, device)
    gigabytes = found["bytes plain"] / 1e9
    rates = {
        name: {part: gigabytes / statistics.median(values) for part, values in parts.items() if values}
        for name, parts in found["seconds"].items()
    }
    return {"message bytes": found["bytes plain"], "GB/s": rates}


def two_workers(worker: Callable[[Any], Any], seconds: float = 120.0) -> list[Any]:
    """[worker(group of rank 0), worker(group of rank 1)], threads on one device."""
    store, results, errors = dist.HashStore(), [None, None], []

    def run(rank: int) -> None:
        try:
            results[rank] = worker(
                dist.ProcessGroupGloo(dist.PrefixStore("gpu", store), rank, 2, timedelta(seconds=seconds))
            )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors or any(thread.is_alive() for thread in threads):
        raise RuntimeError("the exchange between two threads failed") from (errors[0] if errors else None)
    return results


def allocated(device: torch.device) -> int:
    """Bytes of tensors on the device now; on the CPU nobody counts."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def stream(device: torch.device) -> AbstractContextManager[Any]:
    """A stream of this thread's own, where the device has streams."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def launched(exchange: PeerExchange, message: Tensor, step: int) -> MessageInFlight:
    """A round under way, whose message isn't copied."""
    flight = exchange.launch(message, step, 0, Copied(message))
    exchange.depart([flight], step)
    return flight


def staging(elements: int, turns: int, side: int, device: torch.device) -> dict[str, Any]:
    """Both workers' medians; `side` of the matrices that the computation multiplies, as often as it takes about as long
    as an exchange."""

    def worker(group: Any) -> dict[str, Any]:
        exchange = PeerExchange(Ring(), MetropolisHastings(), transport(group, device), device)
        message, square = torch.zeros(elements, device=device), torch.zeros(side, side, device=device)
        steps = iter(range(10**6))
        meet = torch.zeros(1)

        def timed(call: Callable[[], object]) -> float:
            group.allreduce([meet]).wait()
            return duration(call, device)

        def exchanged() -> None:
            exchange.pool.give([launched(exchange, message, next(steps)).land()])

        def computed(times: int) -> None:
            for _ in range(times):
                torch.mm(square, square)

        def both(times: int) -> None:
            under_way = launched(exchange, message, next(steps))
            computed(times)
            exchange.pool.give([under_way.land()])

        timed(exchanged)
        timed(lambda: computed(1))
        once = max(timed(lambda: computed(4)) / 4, 1e-6)
        wanted = torch.tensor([timed(exchanged) / once])
        group.allreduce([wanted]).wait()
        times = max(1, round(float(wanted) / 2))
        calls = {"computing": lambda: computed(times), "exchange": exchanged, "both": lambda: both(times)}
        rows = {name: [timed(call) for _ in range(turns)] for name, call in calls.items()}
        return rows | {"copies": _copies(message, group, device)}

    def on_a_stream(group: Any) -> dict[str, Any]:
        with stream(device):  # one worker's work doesn't queue behind the other's
            return worker(group)

    rows = two_workers(on_a_stream)
    medians = {
        name: statistics.median([s for row in rows for s in row[name]]) for name in ("computing", "exchange", "both")
    }
    return {"message bytes": 4 * elements, **medians, "hidden": hidden(**medians), "copies": rows[0]["copies"]}


def _copies(message: Tensor, group: Any, device: torch.device) -> float:
    """Device memory of one message in flight, over the message's; both workers launch before either is asked."""
    exchange = PeerExchange(Ring(), MetropolisHastings(), transport(group, device), device)  # whose pool is empty
    meet = torch.zeros(1)
    group.allreduce([meet]).wait()
    before = allocated(device)
    group.allreduce([meet]).wait()
    under_way = launched(exchange, message, 0)
    group.allreduce([meet]).wait()
    held = (allocated(device) - before) / 2 / message.nbytes
    group.allreduce([meet]).wait()
    under_way.land()
    return held


def hidden(computing: float, exchange: float, both: float) -> float:
    """The share of the shorter one that the other one hid."""
    return (computing + exchange - both) / min(computing, exchange)


def measure(
    works: dict[str, Work], turns: int, steps: int, elements: int, side: int, device: torch.device
) -> dict[str, Any]:
    """All parts."""
    bindings = {name: binding(work, turns, steps, device) for name, work in works.items()}
    gc.collect()  # models that are gone would count as memory that a message gave back
    return {
        "hardware": description(),
        "binding": bindings,
        "codecs": codecs(elements, turns, device),
        "staging": staging(elements, turns, side, device),
    }


def main(arguments: Sequence[str] | None = None, results: Path = RESULTS) -> int:
    """The command line; 0 also where there is no device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--elements", type=int, default=2**25, help="of a message")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return 0
    device = torch.device("cuda", 0)
    result = measure(WORKS, options.turns, options.steps, options.elements, 4096, device)
    (results / f"gpu-{slug()}.json").write_text(json.dumps(result, indent=1))
    print(page(result))
    return 0
