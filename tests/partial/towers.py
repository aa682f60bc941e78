"""Small networks with a chain of blocks, trained under partial backprop by forked workers, and what an honest reference
makes of the same batches."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from lightning_decentral import PartialBackpropStrategy
from lightning_decentral.optim import Muon, muon_groups
from lightning_decentral.partial import Order
from tests.tiny import QUIET, in_processes

WIDTH, LABELS, BLOCKS = 8, 6, 4


class Block(nn.Module):
    """x + f(x), with BatchNorm or without."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.norm(self.first(x)).tanh())


class Network(nn.Module):
    """Symbols in, symbols out; the embedding is the last layer's weight, too, where `tied`."""

    def __init__(self, tied: bool, norm: bool, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LABELS, WIDTH)
        self.blocks = nn.ModuleList([Block(norm) for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, LABELS)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Tower(LightningModule):
    """A classifier of symbols; its batches depend on (worker, index)."""

    def __init__(self, tied: bool = False, norm: bool = False, optimizer: str = "sgd", schedule: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = Network(tied, norm)
        self.optimizer_name, self.schedule = optimizer, schedule

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.network(x).float(), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer: torch.optim.Optimizer = {
            "sgd": lambda: torch.optim.SGD(parameters, lr=0.1),
            "momentum": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
            "adamw": lambda: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
            "muon": lambda: Muon(muon_groups(self), lr=0.01, weight_decay=0.1),
        }[self.optimizer_name]()
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def batch_of(rank: int, index: int, rows: int = 6) -> list[Tensor]:
    """The batch that this worker gets at this place, the same in every epoch."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    return [torch.randint(0, LABELS, (rows,), generator=generator) for _ in range(2)]


class Batches:
    """`length` batches in every epoch, or as many as `lengths` says for the worker."""

    def __init__(self, length: int = 6, lengths: tuple[int, ...] = ()) -> None:
        self.length, self.lengths = length, lengths

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[list[Tensor]]:
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        length = self.lengths[rank] if self.lengths else self.length
        return iter([batch_of(rank, index) for index in range(length)])


class Scripted(Order):
    """The given depths in turn."""

    def __init__(self, *depths: int) -> None:
        self.depths = depths

    def __repr__(self) -> str:
        return f"Scripted{self.depths}"

    def depth(self, step: int, segments: int) -> int:
        return self.depths[step % len(self.depths)]

    def reach(self, segments: int) -> int:
        return max(self.depths)


class Watch(Callback):
    """Writes, on every worker, gradients and parameters of every step to `folder/rank.pt`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gradients: list[dict[str, Tensor]] = []
        self.parameters: list[dict[str, Tensor]] = []
        self.more: dict[str, Any] = {}
        self.first = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first = trainer.global_step

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        rows = {n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None}
        self.gradients.append(rows)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step > len(self.parameters) + self.first:  # not while gradients are only accumulated
            self.parameters.append({k: v.clone() for k, v in pl_module.state_dict().items()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.look(trainer, pl_module)
        rows = {"gradients": self.gradients, "parameters": self.parameters, **self.more}
        torch.save(rows, self.folder / f"{trainer.global_rank}.pt")

    def look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """More to keep."""
        strategy = trainer.strategy
        if isinstance(strategy, PartialBackpropStrategy) and strategy.driver is not None:
            plan = strategy.driver.plan
            self.more |= {"boundaries": plan.boundaries, "segment_of": plan.segment_of, "sent": strategy.sent_bytes}


def fit(folder: Path, module: LightningModule, options: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """One run in this process; workers are forked from it."""
    seed_everything(1, workers=True, verbose=False)
    extra = {"batches": Batches(), "validation": None, "callbacks": [], "size": 2, "checkpoint": None, **settings}
    own = {k: extra.pop(k) for k in ("batches", "validation", "callbacks", "size", "checkpoint")}
    strategy = extra.pop("strategy", None) or PartialBackpropStrategy(**{"start_method": "fork", **options})
    watch = [] if any(isinstance(c, Watch) for c in own["callbacks"]) else [Watch(folder)]
    trainer = Trainer(
        **{**QUIET, "max_steps": 4, "use_distributed_sampler": False, **extra},
        devices=own["size"],
        strategy=strategy,
        callbacks=[*own["callbacks"], *watch],
    )
    trainer.fit(module, own["batches"], own["validation"], ckpt_path=own["checkpoint"])
    return {"state": module.state_dict(), "metrics": dict(trainer.callback_metrics)}


def run(folder: Path, module: LightningModule, seconds: float = 90.0, **words: Any) -> list[dict[str, Any]]:
    """Every worker's rows; `options` are the strategy's, other words the trainer's."""
    size = words.get("size", 2)
    in_processes(fit, folder, module, words.pop("options", {}), words, seconds=seconds)
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


def plain_gradients(module: Tower, batch: Any) -> dict[str, Tensor]:
    """Of one batch by one process, full depth; a tied weight's two parts under `embedding` and `head`."""
    tied = module.network.head.weight is module.network.embedding.weight
    if tied:
        module.network.head.weight = nn.Parameter(module.network.embedding.weight.detach().clone())
    module.zero_grad()
    module.loss(batch).backward()
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    if tied:
        module.network.head.weight = module.network.embedding.weight
    return found
