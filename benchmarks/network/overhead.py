"""What gossip costs on one machine: seconds per step and memory, as ratios within one run.

    python benchmarks/network.py overhead

One worker under gossip against a plain single-device run; two and four workers on loopback against `ddp` with the same
model. The strategies take turns, so that a neighbour's load on the machine hits both; a ratio is that of medians over
the turns. On loopback the processes share the cores and the memory bus, so a transfer is work for the same processors:
this is the worst case for gossip and for ddp alike, and says nothing about a network.

Memory beyond the model is the resident memory of worker 0 after a step, less that of the same worker in the same run
that exchanges nothing (`Every(1000, ...)`), in units of the parameters' bytes. With one peer and delay 1 it should be
2: the message sent and the message received. ddp's own copy (its gradient buckets) is measured in the same way.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common.paths import RESULTS

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from common.hardware import description, slug
from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import Auto, Every

torch.set_num_threads(1)


class Perceptron(LightningModule):
    """Three layers of `width`, Adam; width 512 has 0.8 million parameters, width 4096 has 50 million."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)])
        self.width = width

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Seconds of each step and resident bytes of worker 0, without the first steps."""

    def __init__(self, path: Path, warm_up: int) -> None:
        self._path, self._warm_up = path, warm_up
        self._times: list[float] = []
        self._resident: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self._times.append(time.perf_counter())
        self._resident.append(psutil.Process().memory_info().rss)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 0:
            seconds = [b - a for a, b in zip(self._times[:-1], self._times[1:], strict=True)][self._warm_up :]
            record = {"seconds": seconds, "resident": max(self._resident[self._warm_up :])}
            self._path.write_text(json.dumps(record))


def measure(strategy: Strategy, workers: int, width: int, batch: int, steps: int) -> dict[str, Any]:
    """One run: median seconds per step and resident bytes of worker 0."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clock.json"
        trainer = Trainer(
            accelerator="cpu",
            devices=workers,
            strategy=strategy,
            max_steps=steps,
            callbacks=[Clock(path, warm_up=5)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        images = TensorDataset(torch.randn(batch * steps * workers, width))
        trainer.fit(Perceptron(width), DataLoader(images, batch_size=batch))
        record = json.loads(path.read_text())
    return {"seconds": statistics.median(record["seconds"]), "resident": record["resident"]}


def _plain() -> Strategy:
    return SingleDeviceStrategy(device="cpu")


def _ddp() -> Strategy:
    return DDPStrategy(start_method="fork")


def _gossip() -> Strategy:
    return GossipStrategy(start_method="fork")


def _blocking() -> Strategy:
    return GossipStrategy(start_method="fork", delay=0)


def _silent() -> Strategy:
    return GossipStrategy(start_method="fork", topology=Every(1000, Auto()))


def _forked(build: Any, *args: Any) -> dict[str, Any]:
    """Every run in a process of its own, so that resident memory begins alike."""
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=lambda: queue.put(measure(build(), *args)))
    process.start()
    result: dict[str, Any] = queue.get()
    process.join()
    return result


def compare(builders: dict[str, Any], turns: int, *args: Any) -> dict[str, list[dict[str, Any]]]:
    """Every builder `turns` times, in turn."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in builders}
    for _ in range(turns):
        for name, build in builders.items():
            rows[name].append(_forked(build, *args))
    return rows


def ratio(rows: dict[str, list[dict[str, Any]]], name: str, against: str) -> float:
    """Return the ratio of the medians over the turns."""
    seconds = {key: statistics.median(row["seconds"] for row in rows[key]) for key in (name, against)}
    return seconds[name] / seconds[against]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    one = compare({"plain": _plain, "gossip": _gossip}, 5 * options.turns, 1, 512, 64, 4 * options.steps)
    table = Table("workers", "model", "measured", "against", "ratio of seconds per step")
    results: dict[str, Any] = {"hardware": description(), "one worker": one}
    table.add_row("1", "0.8 M", "gossip", "single device", f"{ratio(one, 'gossip', 'plain'):.3f}")
    for workers in (2, 4):
        rows = compare(
            {"ddp": _ddp, "gossip": _gossip, "blocking": _blocking}, options.turns, workers, 512, 64, options.steps
        )
        results[f"{workers} workers"] = rows
        for name in ("gossip", "blocking"):
            table.add_row(str(workers), "0.8 M", name, "ddp", f"{ratio(rows, name, 'ddp'):.3f}")
    large = compare({"silent": _silent, "ddp": _ddp, "gossip": _gossip, "blocking": _blocking}, 1, 2, 4096, 2, 12)
    model_bytes = sum(p.numel() for p in Perceptron(4096).parameters()) * 4
    results["memory"] = {**large, "model_bytes": model_bytes}
    memory = Table("measured", "copies of the parameters beyond a run that exchanges nothing")
    for name in ("gossip", "blocking", "ddp"):
        copies = (large[name][0]["resident"] - large["silent"][0]["resident"]) / model_bytes
        memory.add_row(name, f"{copies:.2f}")
    for shown in (table, memory):
        Console().print(shown)
    path = RESULTS / f"overhead-{slug()}.json"
    path.write_text(json.dumps(results, indent=1))
    print(f"raw results: {path}")
