"""Small models without attention or embeddings: what the optimizer does to the loss, and what gossip does.

    python benchmarks/quality.py small_models          # about 10 minutes on two cores

A perceptron and a convolutional network on scikit-learn's digits, at a constant rate, on four CPU workers, each run
in a Trainer with the optimizer as the hint of a strategy's start has it to paste: heads without a known name count as
hidden layers. In the end, loss and accuracy of the mean model on the 597 images that nobody trains on. Writes
`results/small-models-<hardware>.json`; finished runs are kept in it, so that a broken-off benchmark goes on.
"""

import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import lightning_decentral  # noqa: F401  registers the strategies
from common.hardware import description, sentence, slug
from common.paths import RESULTS
from lightning_decentral.optim import AccumAdamW, Muon, muon_groups

WORKERS, BATCH, EPOCHS, TRAINED = 4, 16, 15, 1200
SEEDS = (0, 1)
BETAS = (0.9**WORKERS, 0.999**WORKERS)
Made = Callable[[nn.Module], Optimizer]


def adamw(rate: float) -> Made:
    return lambda module: AdamW(module.parameters(), lr=rate)


def accum(rate: float) -> Made:
    return lambda module: AccumAdamW(module.parameters(), lr=rate, betas=BETAS, window=WORKERS)


def muon(rate: float) -> Made:
    return lambda module: Muon(muon_groups(module), lr=rate, momentum=0.9)


OPTIMIZERS: dict[str, Made] = {
    "AdamW at 1e-3": adamw(1e-3),
    "AdamW at 2e-3": adamw(2e-3),
    "AccumAdamW at 5e-4": accum(5e-4),
    "AccumAdamW at 1e-3": accum(1e-3),
    "Muon at 2e-2": muon(2e-2),
    "Muon at 6e-3": muon(6e-3),
    "Muon at 2e-3": muon(2e-3),
}
STRATEGIES = ("ddp", "gossip")


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


MODELS = {"perceptron": perceptron, "convolutions": convolutions}


class Classifier(LightningModule):
    def __init__(self, net: nn.Module, make: Made) -> None:
        super().__init__()
        self.net, self._make = net, make

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        scores = self.net(batch[0])
        self.log("loss", cross_entropy(scores, batch[1]), sync_dist=True)
        self.log("accuracy", (scores.argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Optimizer:
        return self._make(self)


def run(model: str, strategy: str, optimizer: str, seed: int) -> dict[str, float]:
    seed_everything(seed, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    own, held = order[:TRAINED], order[TRAINED:]
    trainer = Trainer(
        strategy=f"{strategy}_fork", accelerator="cpu", devices=WORKERS, max_epochs=EPOCHS, logger=False,
        check_val_every_n_epoch=EPOCHS, num_sanity_val_steps=0, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(
        Classifier(MODELS[model](), OPTIMIZERS[optimizer]),
        DataLoader(TensorDataset(images[own], labels[own]), batch_size=BATCH, shuffle=True),
        DataLoader(TensorDataset(images[held], labels[held]), batch_size=len(held)),
    )
    return {key: round(float(trainer.callback_metrics[key]), 4) for key in ("loss", "accuracy")}


def table(runs: dict[str, dict[str, float]]) -> str:
    """Markdown: mean loss over the seeds that have run, and their standard deviation."""
    heads = [f"{model}, {strategy}" for model in MODELS for strategy in STRATEGIES]
    lines = [f"| optimizer | {' | '.join(heads)} |", "| --- " * (1 + len(heads)) + "|"]
    for optimizer in OPTIMIZERS:
        cells = []
        for head in heads:
            losses = [runs[key]["loss"] for seed in SEEDS if (key := f"{head}, {optimizer}, {seed}") in runs]
            spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
            cells.append(f"{statistics.mean(losses):.3f}{spread}" if losses else "")
        lines.append(f"| {optimizer} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(results: dict[str, Any]) -> str:
    """Markdown of what has run."""
    command = f"`python benchmarks/quality.py small_models`, {WORKERS} CPU workers, seeds {list(SEEDS)}"
    return f"{command}: {sentence(results['hardware'])}.\n\n{table(results['runs'])}\n"


def main() -> None:
    path = RESULTS / f"small-models-{slug()}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    runs = results.setdefault("runs", {})
    results["hardware"] = description()
    every = [(m, s, o, seed) for seed in SEEDS for m in MODELS for o in OPTIMIZERS for s in STRATEGIES]
    todo = [one for one in every if "{}, {}, {}, {}".format(*one) not in runs]
    for one in track(todo, "runs"):
        runs["{}, {}, {}, {}".format(*one)] = run(*one)
        path.write_text(json.dumps(results, indent=1))
    print(page(results))
