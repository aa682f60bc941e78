"""A LightningModule that knows no pipeline, and trainings of it with and without one."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_decentral import TokenPipelineStrategy
from lightning_decentral.pipeline import Given
from lightning_decentral.pipeline.compute.causal.trial import adapted
from tests.pipeline.causal import VOCABULARY, built, token_mean
from tests.tiny import QUIET, in_processes

LENGTH = 13


class Language(LightningModule):
    """Next-token prediction with a causal model of `transformers`; targets are padded by another number in each row."""

    def __init__(
        self,
        name: str = "gpt2, tied",
        dtype: torch.dtype = torch.float64,
        *,
        batch: int = 3,
        length: int = LENGTH,
        scheduler: bool = False,
        ordered: bool = True,
        sgd: bool = False,
    ) -> None:
        super().__init__()
        self.model = built(name, dtype)
        self._length, self._sgd = length, sgd
        self._batch, self._scheduler, self._ordered = batch, scheduler, ordered

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, mask, labels = batch
        loss = token_mean(self.model(input_ids=ids, attention_mask=mask).logits, labels)
        self.log("train/loss", loss, prog_bar=True)
        self.log("train/epoch_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids, mask, labels = batch
        loss = token_mean(self.model(input_ids=ids, attention_mask=mask).logits, labels)
        self.log("val/loss", loss, sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        ids, mask, labels = batch
        self.log("test/loss", token_mean(self.model(ids, attention_mask=mask).logits, labels), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], attention_mask=batch[1]).logits.argmax(dim=-1)

    def configure_optimizers(self) -> Any:
        if self._sgd:  # rounding noise stays as small as it is; Adam divides by the gradient's size
            return torch.optim.SGD(self.parameters(), lr=0.1)
        decayed = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        if not self._scheduler:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _loader(self, count: int = 24) -> DataLoader[Any]:
        ids = torch.randint(0, VOCABULARY, (count, self._length), generator=torch.Generator().manual_seed(2))
        mask = torch.ones_like(ids)
        for row in range(count):
            mask[row, self._length - row % 5 :] = 0
        dataset = TensorDataset(ids, mask, ids.masked_fill(mask == 0, -100))
        # One of its own for the comparison with a single process; otherwise Lightning places (and shuffles) one.
        sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=False) if self._ordered else None
        return DataLoader(dataset, batch_size=self._batch, sampler=sampler)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader()

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(count=6)

    test_dataloader = predict_dataloader = val_dataloader


with torch.random.fork_rng(devices=[]):
    for _name in ("gpt2, tied", "llama"):
        adapted(built(_name))  # tried in slices now, and not in every forked process anew


class Losses(Callback):
    """What each step's loss was, on this worker."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.values.append(float(outputs["loss"]))


def pipeline(devices: int, **options: Any) -> dict[str, Any]:
    """Arguments of a trainer with processes by fork."""
    strategy = TokenPipelineStrategy(
        **{"slicing": Given((5, 1, 4, 3)), "process_group_backend": "gloo", "start_method": "fork", **options}
    )
    return {"strategy": strategy, "devices": devices}


def alone() -> dict[str, Any]:
    """Arguments of a trainer with one device and no strategy of ours."""
    return {"strategy": "auto", "devices": 1}


def ddp(devices: int) -> dict[str, Any]:
    """Arguments of a trainer with replicas that all-reduce."""
    return {"strategy": DDPStrategy(start_method="fork", process_group_backend="gloo"), "devices": devices}


def fit(
    module: LightningModule, how: dict[str, Any], folder: Path, ckpt_path: str | None = None, **options: Any
) -> Any:
    """(parameters afterwards, losses of rank 0, logged metrics); a forked world hands over through the folder."""
    losses = _Saved(folder)
    torch.manual_seed(5)
    callbacks = [losses, *options.pop("callbacks", [])]
    trainer = Trainer(**{**QUIET, "max_steps": 6, "limit_train_batches": 3, **how, **options}, callbacks=callbacks)
    trainer.fit(module, ckpt_path=ckpt_path)
    saved = torch.load(folder / "losses.pt")
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return state, saved, {name: float(value) for name, value in trainer.callback_metrics.items()}


def forked(*args: Any, seconds: float = 90.0, **options: Any) -> Any:
    """`fit` in a process of its own, with a hard kill."""
    return in_processes(partial(fit, **options), *args, seconds=seconds)


class _Saved(Losses):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.values, self._folder / "losses.pt")


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """max over tensors of ||found - wanted|| / ||wanted||."""
    assert found.keys() == wanted.keys()
    return max(float((found[n] - t).norm() / t.norm().clamp(min=1e-3)) for n, t in wanted.items())
