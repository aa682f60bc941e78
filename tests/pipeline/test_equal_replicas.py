"""Pipelines that average their gradients: equal in everything that is saved, whatever codec, NaN or resume comes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_decentral.shared.compute.codec import Int4, Plain
from lightning_decentral.shared.wire.pipeline_replicas import AverageGradients
from lightning_decentral.shared.wire.transport import GlooTransport
from tests.pipeline.compute.test_adapters import Images
from tests.pipeline.test_pipelines import Keeping
from tests.pipeline.training import Language, ddp, forked, pipeline
from tests.world import world


class Normed(Images):
    """BatchNorm in the blocks; each pipeline has other images."""

    def __init__(self) -> None:
        super().__init__("resnet")

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(super().train_dataloader().dataset, batch_size=3)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Statistics(Callback):
    """What each worker evaluates with, at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        named = {name: buffer.clone() for name, buffer in pl_module.named_buffers()}
        torch.save(named, self._folder / f"{trainer.global_rank}.pt")


def test_running_statistics_are_the_first_pipelines_as_under_ddp(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    settings = {"max_steps": 3, "limit_val_batches": 0}
    wanted, _, _ = forked(Normed(), ddp(2), tmp_path / "ddp", **settings)
    how = pipeline(4, stages=2, slicing=None, replicas=AverageGradients())
    forked(Normed(), how, tmp_path / "p", callbacks=[Statistics(tmp_path / "p")], **settings)
    for rank in range(4):
        mine = torch.load(tmp_path / "p" / f"{rank}.pt")
        assert all(torch.allclose(buffer, wanted[name], rtol=1e-9) for name, buffer in mine.items())


def run(folder: Path, checkpoint: str | None = None) -> Any:
    how = pipeline(4, stages=2, replicas=AverageGradients(codec=Int4()))
    settings = {"limit_train_batches": 3, "limit_val_batches": 0, "max_steps": 6, "enable_checkpointing": True}
    return forked(Language(ordered=False), how, folder, checkpoint, callbacks=[Keeping(folder)], **settings)


def test_what_was_rounded_away_is_in_the_files(tmp_path: Path) -> None:
    wanted, losses, _ = run(tmp_path / "a")
    found, found_losses, _ = run(tmp_path / "b", str(tmp_path / "a" / "step=3.ckpt"))
    assert found_losses == losses[3:]
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


# ---- the bond alone --------------------------------------------------------------------------------------------------

STEPS, BAD = 40, 7


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.zeros(300, dtype=torch.float64)) for _ in range(2))


class Check:
    nonfinite, skipped = "skip", 0


class Scaler:
    """Halves its scale where it skips."""

    def __init__(self) -> None:
        self.now = 1024.0

    def scale(self, one: Tensor) -> Tensor:
        return one * self.now


def gradient(rank: int, step: int, part: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + part)
    return torch.randn(300, generator=generator, dtype=torch.float64)


def summed(codec: Any, scaled: bool, bad: int | None) -> list[list[Tensor]]:
    """[worker][part]: the sum of what updates were given, but for the step that was skipped."""

    def worker(group: Any) -> list[Tensor]:
        parts, check, scaler = Parts(), Check(), Scaler() if scaled else None
        optimizer = torch.optim.SGD(parts.parameters(), lr=1.0)
        make = lambda: GlooTransport(group)  # noqa: E731
        bond = AverageGradients(codec).join(make, make, torch.device("cpu"), per_node=1)
        bond.prepare([optimizer], parts)
        bond.guard(check, scaler)
        totals = [torch.zeros(300, dtype=torch.float64) for _ in range(2)]
        for step in range(STEPS):
            own: list[Tensor | None] = [gradient(group.rank(), step, part) for part in range(2)]
            if step == bad and group.rank() == 1:
                own[0] = torch.full((300,), torch.inf, dtype=torch.float64)
            # The second part is frozen for a while, so that the first travels alone.
            chosen = [parts.one] if 3 <= step % 10 < 6 else [parts.one, parts.two]
            means = bond.gradients(own[: len(chosen)], chosen)
            if step == bad:
                check.skipped += scaler is None
                if scaler is not None:
                    scaler.now /= 2
            else:
                for total, mean in zip(totals, means, strict=False):
                    assert mean is not None
                    total += mean
            bond.updated(optimizer, epoch=0)
        bond.release()
        return totals

    return world(2, worker)


@pytest.mark.threads
@pytest.mark.parametrize("scaled", [False, True], ids=["check", "scaler"])
def test_a_skipped_update_loses_nothing_of_what_was_rounded_away(scaled: bool) -> None:
    """All that was rounded away is less than one rounding, for good."""
    one, two = summed(Int4(), scaled, BAD)
    exact, _ = summed(Plain(), scaled, BAD)
    usual, _ = summed(Int4(), scaled, None)
    whole, _ = summed(Plain(), scaled, None)
    for part in range(2):
        assert torch.equal(one[part], two[part])
        owed = float((usual[part] - whole[part]).abs().max())
        assert float((one[part] - exact[part]).abs().max()) < 1.2 * owed
