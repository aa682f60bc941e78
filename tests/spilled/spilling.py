"""Tiny configurations of the recipes and runs of them, spilled and not."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral import SpilledStrategy
from lightning_decentral.recipes.gpt import GPT
from lightning_decentral.recipes.resnet import ResNet
from lightning_decentral.recipes.schedules import cosine
from lightning_decentral.recipes.vit import ViT
from lightning_decentral.spilled.plan.shards import ShardPlan
from tests.tiny import QUIET, Net

IMAGES = {"num_channels": 1, "image_size": 8, "num_labels": 4}
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
CONFIGS: dict[str, tuple[Callable[..., LightningModule], dict[str, Any]]] = {
    "vit": (ViT, {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32,
                  "patch_size": 2, **IMAGES, **DROPOUT}),
    "gpt": (GPT, {"n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": 20, "n_positions": 8}),
    "resnet": (ResNet, {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [2, 2], "layer_type": "basic",
                        **IMAGES}),
}  # fmt: skip


def recipe(name: str, criterion: Any = nn.functional.cross_entropy) -> LightningModule:
    """Untrained, the same each time."""
    torch.manual_seed(0)
    make, config = CONFIGS[name]
    options = {"optimizer": functools.partial(torch.optim.AdamW, lr=1e-2), "scheduler": cosine}
    return make(config=config, criterion=criterion, **options)


def batches(name: str) -> DataLoader[Any]:
    """Of two examples each."""
    torch.manual_seed(1)
    if name == "gpt":
        x, y = torch.randint(0, 20, (12, 8)), torch.randint(0, 20, (12, 8))
    else:
        x, y = torch.randn(12, 1, 8, 8), torch.randint(0, 4, (12,))
    return DataLoader(TensorDataset(x, y), batch_size=2)


class Watched(SpilledStrategy):
    """Remembers its plans."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.plans: dict[str, ShardPlan] = {}

    def _announce(self, kind: str, plan: ShardPlan) -> None:
        super()._announce(kind, plan)
        self.plans[kind] = plan


def trainer(strategy: Any = "auto", **settings: Any) -> Trainer:
    """Six steps, one epoch, unless the settings say otherwise."""
    return Trainer(**{**QUIET, "max_steps": 6, "devices": 1, "limit_val_batches": 3, "strategy": strategy, **settings})


def fit(
    module: LightningModule, loader: Any, strategy: Any = "auto", checkpoint: Any = None, **settings: Any
) -> Trainer:
    """One run; its trainer."""
    seed_everything(1, verbose=False)
    run = trainer(strategy, **settings)
    run.fit(module, loader, loader, ckpt_path=checkpoint)
    return run


def finest(plan: ShardPlan) -> ShardPlan:
    """The one with the least memory: every block a shard."""
    return ShardPlan(plan.footprint, tuple((block,) for block in plan.footprint.order))


@functools.cache
def least_bytes(name: str, precision: Any = None) -> int:
    """Of the recipe: the smallest budget."""
    strategy = Watched()
    fit(recipe(name), batches(name), strategy, max_steps=2, limit_val_batches=0, precision=precision)
    return finest(strategy.plans["training"]).peak_bytes


def same_states(a: Trainer, b: Trainer) -> bool:
    """Bit for bit: parameters, buffers, the optimizers' state, the metrics that were logged."""
    metrics = [dict(run.callback_metrics) for run in (a, b)]
    states = [[run.lightning_module.state_dict(), [o.state_dict()["state"] for o in run.optimizers]] for run in (a, b)]
    return _same([states[0], metrics[0]], [states[1], metrics[1]])


def _same(a: Any, b: Any) -> bool:
    match a:
        case torch.Tensor():
            return a.dtype == b.dtype and torch.equal(a, b)
        case dict():
            return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
        case list():
            return len(a) == len(b) and all(map(_same, a, b))
        case _:
            return bool(a == b)


def dataset(module: LightningModule) -> Any:
    """Batches that fit it."""
    if not isinstance(module, Net):
        return batches("vit")
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(12, 8), torch.randint(0, 3, (12,))), batch_size=2)


WIDTH, ROWS, LAYERS = 64, 2, 6


class Chain(LightningModule):
    """y = x w_1 ... w_n, wide and with few rows: parameters are nearly all that there is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def rows() -> Any:
    """Batches of a chain."""
    return DataLoader(TensorDataset(torch.randn(12, WIDTH)), batch_size=ROWS)
