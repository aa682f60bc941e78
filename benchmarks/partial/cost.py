"""What partial backprop saves against `ddp`: compute, saved activations and traffic of every depth.

    python benchmarks/partial.py cost     # ratios within one run

A chain of twelve equal blocks; every depth in turn with ddp, in processes of their own. Seconds are the processors'
(user and system time of worker 0's step), the least over steps and turns, so that a neighbour's load counts less. Saved
activations are counted by torch's hooks, bytes by the kernel's counters of the loopback device, in a network namespace
of the run's own where the system grants one (`unshare`), otherwise they are left out. What it loses is
`partial/accuracy.py`'s question.
"""

import argparse
import itertools
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from common.paths import RESULTS, command

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.markdown import Markdown
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from common.hardware import description, sentence, slug
from lightning_decentral import PartialBackpropStrategy
from lightning_decentral.partial import Blocks, Cyclic, Temporal
from lightning_decentral.partial.compute.cut import Cutter

torch.set_num_threads(1)

WORKERS = 2
BLOCKS, WIDTH, BATCH, STEPS, WARM_UP = 12, 256, 512, 16, 4


class Block(nn.Module):
    """x + V relu(U x)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Network(nn.Module):
    """Equal blocks and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Chain(LightningModule):
    """Trained by SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.network(batch[0]).mean()  # keeps nothing for its own backward

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Meter(Callback):
    """Processor seconds and loopback bytes of worker 0's steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: list[float] = []
        self._sent: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self._seconds.append(time.process_time())
        self._sent.append(loopback_bytes())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == 0:
            steps = [b - a for a, b in itertools.pairwise(self._seconds[WARM_UP:])]
            sent = (self._sent[-1] - self._sent[WARM_UP]) / len(steps)
            self._path.write_text(json.dumps({"seconds": min(steps), "bytes": sent}))


def loopback_bytes() -> int:
    """Bytes that this network namespace's loopback device has sent."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if "lo:" in line)
    return int(line.split(":")[1].split()[8])


def measure(depth: int | None, path: Path) -> None:
    """One run of two workers: processor seconds and loopback bytes of a step into `path`; no depth is ddp."""
    order = Cyclic(fractions=((depth or BLOCKS) / BLOCKS,))
    options: dict[str, Any] = {"cuts": BLOCKS - 1, "balance": Blocks(), "depth": Temporal(order=order, warm_up=1)}
    strategy = DDPStrategy() if depth is None else PartialBackpropStrategy(**options)
    strategy._start_method = "fork"
    images = TensorDataset(torch.randn(BATCH * STEPS * WORKERS, WIDTH))
    Trainer(
        accelerator="cpu",
        devices=WORKERS,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[Meter(path)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Chain(), DataLoader(images, batch_size=BATCH))


def saved_bytes(depth: int) -> int:
    """Distinct storages that the graph of a cut step keeps, parameters left out."""
    module = Chain()
    cutter = Cutter(module, [f"network.blocks.{i}" for i in range(1, BLOCKS)])
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    cut = BLOCKS - 1 - depth if depth < BLOCKS else None
    with cutter.at(cut), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module.training_step([torch.randn(BATCH, WIDTH)], 0)
    assert loss.requires_grad
    return sum(found.values())


def isolated() -> list[str]:
    """Return what puts a command into a network namespace of its own, or nothing where that isn't granted."""
    words = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    try:
        granted = subprocess.run([*words, "true"], capture_output=True, timeout=20).returncode == 0
    except FileNotFoundError:
        granted = False
    return words if granted else []


def cost(turns: int) -> None:
    before = isolated()
    rows: dict[str, list[dict[str, float]]] = {}
    for _ in range(turns):
        for depth in (None, 12, 9, 6, 3, 1):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "row.json"
                words = [*before, *command("partial", "cost"), "step", "--path", str(path), "--depth", str(depth or 0)]
                environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"} if before else dict(os.environ)
                subprocess.run(words, check=True, capture_output=True, timeout=600, env=environment)
                rows.setdefault("ddp" if depth is None else str(depth), []).append(json.loads(path.read_text()))
    path = RESULTS / f"partial-cost-{slug()}.json"
    results = {"hardware": description(), "turns": turns, "isolated": bool(before), "rows": rows}
    path.write_text(json.dumps(results, indent=1))
    Console().print(Markdown(page(results)))


def page(results: dict[str, Any]) -> str:
    """Markdown: the best of all turns; bytes where a network of its own counted nobody else's."""
    best = {name: {k: min(row[k] for row in found) for k in found[0]} for name, found in results["rows"].items()}
    heads = ["depth", "step time / ddp", "(1 + 2f) / 3", "saved / full", "d / L", "bytes / ddp", "trained share"]
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for depth in (12, 9, 6, 3, 1):
        f, own = depth / BLOCKS, best[str(depth)]
        sent = f"{own['bytes'] / best['ddp']['bytes']:.3f}" if results.get("isolated", True) else "not measured"
        saved = saved_bytes(depth) / saved_bytes(BLOCKS)
        seconds = own["seconds"] / best["ddp"]["seconds"]
        cells = [str(depth), f"{seconds:.3f}", f"{(1 + 2 * f) / 3:.3f}", f"{saved:.4f}", f"{f:.4f}", sent, f"{f:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    about = f"{WORKERS} CPU workers: {sentence(results['hardware'])}"
    return f"`python benchmarks/partial.py cost --turns {results['turns']}`, {about}.\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["cost", "step"], default="cost")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--depth", type=int, default=0, help="of one run of `step`, which `cost` starts; 0 is ddp")
    parser.add_argument("--path", type=Path, default=Path("row.json"))
    options = parser.parse_args()
    if options.what == "cost":
        cost(options.turns)
    if options.what == "step":
        measure(options.depth or None, options.path)
