"""`compressed` is `ddp` with `Plain()`, its formula with any codec, and keeps what works under `ddp` working."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

import lightning_decentral
from lightning_decentral import CompressedStrategy
from lightning_decentral.shared.compute.codec import (
    BFloat16,
    Codec,
    DifferenceCompression,
    Frame,
    Int8,
    Plain,
)
from lightning_decentral.shared.compute.codec.blocks import key
from tests.partial.towers import Batches, Tower, Watch, run
from tests.tiny import QUIET, Net, Quadratic, Record, SizedBatches, in_processes, recorded

SETTINGS: list[dict[str, Any]] = [
    {},
    {"accumulate_grad_batches": 3},
    {"gradient_clip_val": 0.01},
    {"precision": "bf16-mixed"},
]


def compressed(**options: Any) -> CompressedStrategy:
    return CompressedStrategy(start_method="fork", **options)


def assert_equal(rows: list[dict[str, Any]]) -> None:
    """All workers have the same bits after every step, buffers included."""
    for row in rows:
        for mine, first in zip(row["parameters"], rows[0]["parameters"], strict=True):
            assert first
            assert all(torch.equal(mine[name], value) for name, value in first.items())


@pytest.mark.parametrize("name", ["", "_spawn", "_fork", "_notebook"])
def test_names_are_registered(name: str) -> None:
    lightning_decentral._register()
    strategy = Trainer(**QUIET, devices=2, strategy=f"compressed{name}").strategy
    assert isinstance(strategy, CompressedStrategy)
    assert strategy.codec == Int8(), "the default"


@pytest.mark.sampled
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_plain_is_ddp(tmp_path: Path, settings: dict[str, Any]) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir(), theirs.mkdir()
    module = {"norm": True, "optimizer": "adamw", "schedule": True, "tied": True}
    rows = run(ours, Tower(**module), strategy=compressed(codec=Plain()), max_steps=6, **settings)
    ddp = run(theirs, Tower(**module), strategy=DDPStrategy(start_method="fork"), max_steps=6, **settings)
    # Buffers: ddp hands them out before a forward, we after the step; worker 0's are the same.
    for mine, other in zip(rows[0]["parameters"], ddp[0]["parameters"], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


class Embeds(LightningModule):
    """Rows that some workers and steps don't use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(8, 2, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = torch.tensor([batch_idx, batch_idx + 2 * self.global_rank + 1])
        return (self.table(rows) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(self.parameters(), lr=0.1)


def test_sparse_gradients_are_ddps(tmp_path: Path) -> None:
    for name, strategy in (("ours", compressed(codec=Plain())), ("theirs", DDPStrategy(start_method="fork"))):
        (tmp_path / name).mkdir()
        trainer = {**QUIET, "max_steps": 4, "devices": 2, "strategy": strategy}
        in_processes(fit_rows, Embeds(), trainer, tmp_path / name)
    torch.testing.assert_close(recorded(tmp_path / "ours", 2), recorded(tmp_path / "theirs", 2))


def fit_rows(module: LightningModule, trainer: dict[str, Any], folder: Path) -> None:
    Trainer(**trainer, callbacks=[Record(folder)]).fit(module, SizedBatches(4))


@pytest.mark.sampled
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_replicas_are_equal_after_every_step(tmp_path: Path, settings: dict[str, Any]) -> None:
    module = Tower(norm=True, optimizer="adamw", schedule=True, tied=True)
    strategy = compressed(bucket_bytes=2000)
    rows = run(tmp_path, module, strategy=strategy, size=3, batches=Batches(20), max_steps=8, **settings)
    assert_equal(rows)
    first, last = rows[0]["parameters"][0], rows[0]["parameters"][-1]
    assert all(not torch.equal(first[name], last[name]) for name in first), "everything was trained"


@pytest.mark.sampled
@pytest.mark.parametrize("orthogonal", [Plain(), Int8()], ids=str)
def test_muons_matrices_shared_out_are_ddps_and_replicas_stay_equal(tmp_path: Path, orthogonal: Codec) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir(), theirs.mkdir()
    words: dict[str, Any] = {"size": 3, "max_steps": 4, "gradient_clip_val": 0.1}
    strategy = compressed(codec=Plain(), orthogonal=orthogonal)
    rows = run(ours, Tower(optimizer="muon"), strategy=strategy, **words)
    assert_equal(rows)
    ddp = run(theirs, Tower(optimizer="muon"), strategy=DDPStrategy(start_method="fork"), **words)
    rounded = 0.0 if orthogonal == Plain() else 1e-3
    for mine, other in zip(rows[0]["parameters"], ddp[0]["parameters"], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 + rounded)


def quadratics(folder: Path, steps: int) -> None:
    options = {**QUIET, "max_steps": steps, "devices": 2}
    Trainer(strategy=compressed(codec=BFloat16()), callbacks=[Record(folder)], **options).fit(Quadratic())


def test_a_run_is_the_formula(tmp_path: Path) -> None:
    """Two workers, one bucket of 5: worker 0 owns it, so worker 1 encodes to it and it encodes back."""
    steps = 6
    in_processes(quadratics, tmp_path, steps)
    x = Quadratic().x.detach().clone()
    e, f, rows = torch.zeros_like(x), torch.zeros_like(x), []
    for step in range(steps):
        first, second = ((1 + 0.1 * rank) * (x - rank - 0.3 * step) for rank in range(2))
        q = decoded(second + e, key(1, step, 0, 0, 0))
        e = second + e - q
        s = (first + q) / 2 + f
        r = decoded(s, key(0, step, 0, 0, 1))
        f = s - r
        x = x - 0.1 * r
        rows.append(x)
    found = recorded(tmp_path, 2)
    for rank in range(2):
        torch.testing.assert_close(found[:, rank], torch.stack(rows), rtol=1e-12, atol=1e-12)


def decoded(message: Tensor, noise: int) -> Tensor:
    codec, out = BFloat16(), torch.empty_like(message)
    payload = [torch.empty(p.elements, dtype=p.dtype) for p in codec.parts(len(message), message.dtype)]
    codec.encode(message, payload, Frame(noise))
    codec.decode(payload, out, Frame())
    return out


class Overflow(Tower):
    """Worker 1's loss overflows at the third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if self.global_rank == 1 and batch_idx == 2 else loss


class Scale(Watch):
    def look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.more["scale"] = trainer.precision_plugin.scaler.get_scale()


def test_a_loss_scaler_skips_the_same_step_on_all(tmp_path: Path) -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=16.0))
    options = {"plugins": [plugin], "callbacks": [Scale(tmp_path)]}
    rows = run(tmp_path, Overflow(optimizer="adamw"), strategy=compressed(), size=3, **options)
    assert_equal(rows)
    assert [row["scale"] for row in rows] == [8.0] * 3
    second, third, *_, last = rows[0]["parameters"][1:]
    assert torch.equal(second["network.head.bias"], third["network.head.bias"]), "the step that overflowed"
    assert all(bool(torch.isfinite(v).all()) for v in last.values())


class Manual(Tower):
    """Two updates by hand for each batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


def test_manual_optimization(tmp_path: Path) -> None:
    rows = run(tmp_path, Manual(optimizer="momentum"), strategy=compressed(), max_steps=6)
    assert_equal(rows)


def test_unequal_batches_end_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"same number of batches|lost"):
        run(tmp_path, Tower(), strategy=compressed(), batches=Batches(6, lengths=(3, 6)), max_steps=-1, max_epochs=1)


def trained(folder: Path, codec: Codec, resume: Path | None, muon: bool = False) -> dict[str, Tensor]:
    seed_everything(5, workers=True, verbose=False)
    keeping = ModelCheckpoint(folder, filename="at-{step}", save_top_k=-1, every_n_train_steps=4)
    settings = {**QUIET, "max_steps": 9, "enable_checkpointing": True, "devices": 2}
    module = Net(optimizer="muon" if muon else "adamw", scheduler=True)
    strategy = compressed(codec=codec, bucket_bytes=300, orthogonal=codec if muon else None)
    trainer = Trainer(strategy=strategy, callbacks=[keeping], **settings)
    trainer.fit(module, SizedBatches(6), ckpt_path=resume)
    return module.state_dict()


@pytest.mark.sampled
@pytest.mark.parametrize("muon", [False, True])
def test_resume_is_bit_equal_to_the_uninterrupted_run(tmp_path: Path, muon: bool) -> None:
    """Within an epoch, with dropout: what was rounded away is each worker's own, and lies beside the plain file."""
    wanted = in_processes(trained, tmp_path / "whole", Int8(), None, muon)
    file = tmp_path / "whole" / "at-step=4.ckpt"
    found = in_processes(trained, tmp_path / "resumed", Int8(), file, muon)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    other = in_processes(trained, tmp_path / "other", BFloat16(), file)
    assert not torch.equal(other["head.weight"], wanted["head.weight"])
    assert all(value.isfinite().all() for value in other.values())


@pytest.mark.parametrize(("options", "text"), [
    ({"codec": DifferenceCompression(Int8())}, "give the inner codec by itself"),
    ({"orthogonal": DifferenceCompression(Int8())}, "give the inner codec by itself"),
    ({"bucket_bytes": 0}, "bucket_bytes must be positive, got 0"),
    ({"ddp_comm_hook": None}, "has no option 'ddp_comm_hook'"),
], ids=str)  # fmt: skip
def test_wrong_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CompressedStrategy(**options)


def test_only_muon_can_be_shared_out(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"ValueError: orthogonal needs Muon, and no optimizer is a Muon: leave orthogonal out"
    ):
        run(tmp_path, Tower(optimizer="adamw"), strategy=compressed(orthogonal=Int8()), max_steps=1)


class NaN(Net):
    """Worker 1's second loss is not a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if (self.global_rank, batch_idx) == (1, 1) else loss


def fit_nan(folder: Path, nonfinite: Any) -> dict[str, Tensor]:
    settings = {**QUIET, "enable_checkpointing": True, "max_steps": 4, "default_root_dir": folder}
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    module = NaN()
    strategy = compressed(nonfinite=nonfinite)
    Trainer(**settings, devices=2, strategy=strategy, callbacks=[saving]).fit(module, SizedBatches(6))
    return module.state_dict()


def test_nan_on_one_worker_ends_the_training_before_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="FloatingPointError: the gradients hold NaN or infinity on all workers"):
        in_processes(fit_nan, tmp_path, "stop")
    assert [file.name for file in tmp_path.glob("*.ckpt")] == ["step=1.ckpt"]


def test_a_step_with_nan_is_skipped_and_leaves_no_trace_in_what_was_rounded_away(tmp_path: Path) -> None:
    found = in_processes(fit_nan, tmp_path, "skip")
    assert all(bool(torch.isfinite(value).all()) for value in found.values())
