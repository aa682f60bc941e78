"""Norms that hooks read are those of the whole model; what reads one stage's parameters by hand is told so."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_norm_, get_total_norm

from lightning_decentral.pipeline.totals import StageTotals
from tests.pipeline.training import Language, alone, fit, forked, pipeline

SHORT: dict[str, Any] = {"max_steps": 2, "limit_val_batches": 0}


class Norms(Callback):
    """What each utility says of the same gradients, on each worker."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.rows: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, _: Any) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        network: Any = pl_module
        head = list(network.model.lm_head.parameters())
        self.rows = {
            "clip": float(clip_grad_norm_(pl_module.parameters(), 0.5)),
            "clipped": float(get_total_norm(gradients)),
            "largest": float(get_total_norm(gradients, float("inf"))),
            "one layer": float(get_total_norm([p.grad for p in head if p.grad is not None])),
            "foreign": float(get_total_norm([torch.ones(4)])),
            **{f"{p} {name}": float(value) for p in (2, "inf") for name, value in grad_norm(pl_module, p).items()},
        }

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._folder.mkdir(exist_ok=True)
        torch.save(self.rows, self._folder / f"norms.{trainer.global_rank}")


@pytest.mark.parametrize("name", ["llama", "gpt2, tied"])
def test_norms_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    """Tied embeddings stand on two stages and count once."""
    fit(Language(name), alone(), tmp_path / "alone", callbacks=[Norms(tmp_path / "alone")], **SHORT)
    forked(Language(name), pipeline(2), tmp_path / "p", callbacks=[Norms(tmp_path / "p")], **SHORT)
    wanted, *found = (torch.load(tmp_path / file) for file in ("alone/norms.0", "p/norms.0", "p/norms.1"))
    assert wanted["foreign"] == 2
    assert all(row == pytest.approx(wanted, rel=1e-6) for row in found)


class ByHand(Callback):
    """Sums itself, by the strategy's total where it is told to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        next(pl_module.parameters())
        mine = torch.tensor(sum(p.numel() for p in pl_module.parameters()))
        torch.save(int(trainer.strategy.total(mine)), self._folder / f"sum.{trainer.global_rank}")


def test_a_sum_by_hand_is_said_to_be_one_stages(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    module = Language("llama")
    whole = sum(p.numel() for p in module.parameters())
    forked(module, pipeline(2), tmp_path, callbacks=[ByHand(tmp_path)], **SHORT)
    assert [torch.load(tmp_path / f"sum.{rank}") for rank in range(2)] == [whole, whole]
    said = [line for line in capfd.readouterr().err.splitlines() if "reads all parameters" in line]
    assert len(said) == 2, "once on each stage"
    assert any("tests.pipeline.test_totals, line" in line and "stage 0 of 2 has only its own" in line for line in said)


def test_functions_are_themselves_again() -> None:
    layer, pipe = (
        torch.nn.Linear(2, 2),
        SimpleNamespace(size=2, over=None, device=None, model=SimpleNamespace(module=None)),
    )
    before = get_total_norm([torch.ones(4)]), [name for name, _ in layer.named_parameters()]
    precision: Any = SimpleNamespace()
    holdings: Any = SimpleNamespace(order={}, tied={}, outside=[])
    StageTotals(pipe, holdings, layer, precision).close()  # type: ignore[arg-type]
    assert (get_total_norm([torch.ones(4)]), [name for name, _ in layer.named_parameters()]) == before
