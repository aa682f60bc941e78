"""What a training_step leaves beside the model: on all stages where they validate, save and end, as in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests.pipeline.causal import VOCABULARY, token_mean
from tests.pipeline.training import Language, alone, distance, fit, forked, pipeline


class Beside(Language):
    """Counts before and after its call of the model, normalizes what comes, keeps a mean of its loss."""

    def __init__(self) -> None:
        super().__init__("llama", sgd=True)
        self.norm = nn.BatchNorm1d(VOCABULARY, dtype=torch.float64)
        self.frozen = nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=False)
        for name in ("before", "after", "mean"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        self.register_buffer("turned", torch.zeros(2, 3).t(), persistent=False)

    def _loss(self, batch: Any) -> Tensor:
        ids, mask, labels = batch
        logits = self.model(input_ids=ids, attention_mask=mask).logits
        return token_mean(self.norm(logits.transpose(1, 2)).transpose(1, 2), labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.before += 1
        loss = self._loss(batch)
        self.after += batch[0].numel()
        self.frozen += 1
        self.turned += 1
        self.mean.lerp_(loss.detach(), 0.5)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self._loss(batch) + self.mean, sync_dist=True)


class Made(Beside):
    """With a buffer that the step makes."""

    last: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = batch[0].double().mean(0)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        assert self.last is not None
        self.log("last", self.last.sum(), sync_dist=True)


class Rows(Callback):
    """This worker's buffers once a checkpoint is saved."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self._folder / "file.ckpt")
        rows = {name: b.clone() for name, b in pl_module.named_buffers() if not name.startswith("model.")}
        torch.save(rows, self._folder / f"{trainer.global_rank}.pt")


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return distance(*({name: tensor.double() for name, tensor in state.items()} for state in (found, wanted)))


def test_it_is_that_of_one_process(tmp_path: Path) -> None:
    wanted, _, metrics = fit(Made(), alone(), tmp_path / "alone", callbacks=[Rows(tmp_path / "alone")])
    found, _, found_metrics = forked(Made(), pipeline(3), tmp_path / "p", callbacks=[Rows(tmp_path / "p")])
    assert float(wanted["after"]) == 6 * 39
    assert apart(found, {name: wanted[name] for name in found}) < 1e-8  # `fit` doesn't hand over what was made
    assert found_metrics == pytest.approx(metrics, rel=1e-6)
    saved = torch.load(tmp_path / "p" / "file.ckpt", weights_only=True)["state_dict"]
    assert apart(saved, wanted) < 1e-8
    buffers, *stages = (torch.load(tmp_path / name) for name in ("alone/0.pt", "p/0.pt", "p/1.pt", "p/2.pt"))
    assert all(apart(stage, buffers) < 1e-8 for stage in stages)


def test_a_resumed_run_goes_on_with_it(tmp_path: Path) -> None:
    save = ModelCheckpoint(dirpath=tmp_path / "a", filename="{step}", every_n_train_steps=3, save_top_k=-1)
    short: dict[str, Any] = {"max_steps": 4, "limit_val_batches": 0}
    how = {"enable_checkpointing": True, "callbacks": [save], **short}
    wanted, losses, _ = forked(Beside(), pipeline(2), tmp_path / "a", **how)
    found, found_losses, _ = forked(Beside(), pipeline(2), tmp_path / "b", str(tmp_path / "a" / "step=3.ckpt"), **short)
    assert found_losses == losses[3:]
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
