"""Memory of fine-tuning policies: what a step holds in addition to the parameters, for depths, LISA and block
coordinates.

    python benchmarks/partial.py memory     # seconds

A chain of blocks between an embedding and a head, trained by AdamW for a few changes of block. Bytes are counted, not
sampled: tensors that the graph keeps (torch's hooks, parameters left out), gradients and optimizer state at the end of
each step, each the most over all steps. They are the same on every machine.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from common.hardware import description, sentence, slug
from common.paths import RESULTS
from lightning_decentral import PartialBackpropStrategy
from lightning_decentral.partial import BlockCoordinate, Cyclic, Forget, Full, Lisa, Skip, Temporal

torch.set_num_threads(1)

BLOCKS, WIDTH, WORDS, BATCH, STEPS = 12, 128, 256, 64, 56
POLICIES: dict[str, tuple[Any, Any]] = {
    "full": (Full(), Skip()),
    "top half": (Temporal(order=Cyclic(fractions=(0.5,)), warm_up=1), Skip()),
    "LISA, states kept": (Lisa(every=4, blocks=2), Skip()),
    "LISA": (Lisa(every=4, blocks=2), Forget()),
    "block coordinates, states kept": (BlockCoordinate(every=4), Skip()),
    "block coordinates (BAdam)": (BlockCoordinate(every=4), Forget()),
}


class Block(nn.Module):
    """x + V relu(U x)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Network(nn.Module):
    """Words in, words out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Chain(LightningModule):
    """Trained by AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Ledger(Callback):
    """Bytes that a step's graph keeps, of gradients before the update, of the optimizer's state behind it."""

    def __init__(self) -> None:
        self.saved: list[int] = []
        self.gradients: list[int] = []
        self.states: list[int] = []
        self._kept: dict[int, int] = {}
        self._hooks: Any = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        parameters = {p.untyped_storage().data_ptr() for p in pl_module.parameters()}
        self._kept = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                self._kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        self._hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        self._hooks.__enter__()

    def on_before_backward(self, *_: Any) -> None:
        self._hooks.__exit__(None, None, None)
        self.saved.append(sum(self._kept.values()))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.gradients.append(sum(p.grad.nbytes for p in pl_module.parameters() if p.grad is not None))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        states = trainer.optimizers[0].state.values()
        self.states.append(sum(t.nbytes for state in states for t in state.values() if t.ndim))


def measure(depth: Any, absent: Any) -> dict[str, int]:
    """The most over all steps but the first two, in which a warm-up trains all and leaves its states."""
    torch.manual_seed(0)
    module, ledger = Chain(), Ledger()
    words = torch.randint(0, WORDS, (BATCH * STEPS,))
    Trainer(
        accelerator="cpu",
        devices=1,
        strategy=PartialBackpropStrategy(depth=depth, absent=absent, cuts="blocks"),
        max_steps=STEPS,
        callbacks=[ledger],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(TensorDataset(words, words.roll(1)), batch_size=BATCH))
    rows = {"saved": ledger.saved, "gradients": ledger.gradients, "states": ledger.states}
    return {name: max(row[2:]) for name, row in rows.items()}


def lines(rows: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the lines of a page: shares of full training."""
    full = rows["full"]
    head = ["| policy | saved activations | gradients | optimizer state | sum |", "| --- | --- | --- | --- | --- |"]
    for name, row in rows.items():
        shares = [f"{row[kind] / full[kind]:.3f}" for kind in full]
        head.append(f"| {name} | {' | '.join(shares)} | {sum(row.values()) / sum(full.values()):.3f} |")
    return head


def page(results: dict[str, Any]) -> str:
    """Markdown of all policies."""
    text = "\n".join(lines(results["rows"]))
    return f"`python benchmarks/partial.py memory`, one worker: {sentence(results['hardware'])}.\n\n{text}\n"


def main() -> None:
    rows = {name: measure(*policy) for name, policy in POLICIES.items()}
    path = RESULTS / f"partial-memory-{slug()}.json"
    results = {"hardware": description(), "rows": rows}
    path.write_text(json.dumps(results, indent=1))
    print(page(results))
