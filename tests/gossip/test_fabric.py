"""A loop with Fabric gossips as a Trainer does, bit for bit, is ddp where it should be, and resumes where it was."""

import os
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import (
    Complete,
    DifferenceCompression,
    FabricGossipStrategy,
    Int8,
    OnePeerExponential,
    PushSum,
    Ring,
)
from tests.loops import STEPS, Loop, equal, run
from tests.partial.towers import Batches, Network
from tests.tiny import QUIET, in_processes

SIZE = 3
MOMENTUM = partial(torch.optim.SGD, momentum=0.9)


def gossip(**options: Any) -> FabricGossipStrategy:
    return FabricGossipStrategy(start_method="fork", **options)


# ---- the Trainer's -----------------------------------------------------------------------------------------------


class Trained(LightningModule):
    """What the loop trains, for a Trainer."""

    def __init__(self, loop: Loop, folder: Path) -> None:
        super().__init__()
        self.loop, self.folder = loop, folder
        self.rows: list[dict[str, Tensor]] = []
        self.module = self._built()

    def _built(self) -> nn.Module:
        return nn.Sequential(Network(tied=True, norm=self.loop.norm), nn.Dropout(self.loop.dropout))

    def configure_model(self) -> None:
        seed_everything(7 + self.global_rank, verbose=False)
        self.module = self._built()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.module(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.loop.optimizer(self.module.parameters(), lr=0.05)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step > len(self.rows):
            self.rows.append({name: value.clone() for name, value in self.module.state_dict().items()})

    def on_train_end(self) -> None:
        torch.save(self.rows, self.folder / f"{self.global_rank}.pt")


def by_trainer(folder: Path, loop: Loop, options: dict[str, Any]) -> None:
    strategy = GossipStrategy(start_method="fork", **options)
    settings = {"accumulate_grad_batches": loop.accumulate, "gradient_clip_val": loop.clip, "max_steps": STEPS}
    module = Trained(loop, folder)
    Trainer(**QUIET, **settings, devices=SIZE, strategy=strategy).fit(module, Batches(50))
    torch.save(module.state_dict(), folder / "end.pt")


@pytest.mark.sampled
@pytest.mark.parametrize(("options", "loop"), [
    ({}, Loop(norm=True, dropout=0.2)),
    ({"delay": 0, "topology": Ring()}, Loop(accumulate=2, clip=0.1, optimizer=torch.optim.AdamW)),
    ({"combine": PushSum(), "topology": OnePeerExponential(), "bucket_bytes": 600}, Loop(optimizer=MOMENTUM)),
], ids=["default", "blocking", "push-sum"])  # fmt: skip
def test_it_is_the_trainers_gossip_bit_for_bit(options: dict[str, Any], loop: Loop, tmp_path: Path) -> None:
    rows = [worker["rows"] for worker in run(tmp_path, gossip(**options), replace(loop, finish=True))]
    in_processes(by_trainer, tmp_path, loop, options)
    for rank, row in enumerate(rows):
        assert equal(row[:-1], torch.load(tmp_path / f"{rank}.pt"))
    assert not equal(rows[0][:-1], rows[1][:-1]), "workers drift"
    end = torch.load(tmp_path / "end.pt")  # the mean of the workers, by shares of push-sum
    assert equal([{f"module.{name}": value for name, value in rows[0][-1].items()}], [end])


def test_at_consensus_it_is_ddp(tmp_path: Path) -> None:
    """x_i+ = mean of x - u_i: the mean of the updates, which momentum is linear in."""
    loop = Loop(optimizer=MOMENTUM, accumulate=2)
    ours = run(tmp_path, gossip(topology=Complete(), delay=0), loop)
    theirs = run(tmp_path, DDPStrategy(start_method="fork"), loop, name="ddp")
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine["rows"], other["rows"], rtol=1e-5, atol=1e-6)


def test_one_worker_trains_as_alone(tmp_path: Path) -> None:
    ours, alone = run(tmp_path, gossip(), Loop(), size=1), run(tmp_path, "auto", Loop(), size=1, name="alone")
    assert equal(ours[0]["rows"], alone[0]["rows"])


# ---- the mean ----------------------------------------------------------------------------------------------------


def shown(fabric: Fabric, model: nn.Module) -> dict[str, Any]:
    """The model before, within and after `mean`."""
    rows = {"before": _copy(model)}
    with fabric.strategy.mean():
        rows["within"] = _copy(model)
        parameter = next(iter(model.parameters()))
        stepped = torch.optim.SGD([parameter], lr=1.0)
        with pytest.raises(RuntimeError, match=r"after the block `with strategy.mean"):
            fabric.strategy.optimizer_step(stepped)
        with pytest.raises(RuntimeError, match="in the model's place already"), fabric.strategy.mean():
            pass
    return {**rows, "after": _copy(model), "apart": fabric.strategy.consensus().absolute}


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_the_mean_stands_for_a_while_and_at_the_end(tmp_path: Path) -> None:
    workers = run(tmp_path, gossip(), Loop(norm=True, look=shown, finish=True))
    plain = run(tmp_path, gossip(), Loop(norm=True), name="plain")
    for step in range(STEPS):
        rows = [worker["seen"][step] for worker in workers]
        for name, value in rows[0]["within"].items():
            if value.is_floating_point():
                torch.testing.assert_close(value, torch.stack([row["before"][name] for row in rows]).mean(0))
                assert all(torch.equal(row["within"][name], value) for row in rows)
        assert all(equal([row["before"]], [row["after"]]) for row in rows)
        assert rows[0]["apart"] == rows[1]["apart"] > 0
    for worker, undisturbed in zip(workers, plain, strict=True):
        assert equal(worker["rows"][:-1], undisturbed["rows"]), "looking at the mean changes nothing"
    last = [worker["rows"][-1] for worker in workers]
    assert all(torch.equal(row[name], last[0][name]) for row in last for name in row if "num" not in name)


def poisoned(fabric: Fabric, model: nn.Module) -> Any:
    """Worker 1's running statistics, which no neighbour sends, become NaN, then a parameter."""
    buffer = next(b for name, b in model.named_buffers() if name.endswith("running_mean"))
    if fabric.global_rank == 1 and fabric.strategy.steps == 2:
        buffer[0] = torch.nan
    with fabric.strategy.mean():
        finite = all(bool(value.isfinite().all()) for value in model.state_dict().values())
    if fabric.global_rank == 1 and fabric.strategy.steps == 3:
        with torch.no_grad():  # behind the mean, which would heal it at once: the next round does
            next(model.parameters())[0, 0] = torch.nan
    return finite, fabric.strategy.traffic().healed


def test_a_poisoned_worker_is_left_out_of_the_mean_and_healed(tmp_path: Path) -> None:
    workers = run(tmp_path, gossip(), Loop(norm=True, look=poisoned))
    assert all(finite for worker in workers for finite, _ in worker["seen"])
    assert [worker["seen"][-1][1] > 0 for worker in workers] == [False, True, False]
    assert all(bool(value.isfinite().all()) for worker in workers for value in worker["rows"][-1].values())


# ---- checkpoints -------------------------------------------------------------------------------------------------

SAVED = {"optimizer": MOMENTUM, "norm": True, "dropout": 0.2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A checkpoint after the third step, and every worker's steps."""
    folder = tmp_path_factory.mktemp("whole")
    rows = run(folder, gossip(), Loop(**SAVED, save_at=3))
    return folder / "loop" / "step.ckpt", rows


def test_every_worker_goes_on_bit_for_bit(whole: Any, tmp_path: Path) -> None:
    rest = run(tmp_path, gossip(), Loop(**SAVED, resume=whole[0]))
    for before, after in zip(whole[1], rest, strict=True):
        assert equal(before["rows"][3:], after["rows"])


def test_a_codec_that_remembers_goes_on_from_a_save_in_which_the_mean_stood(tmp_path: Path) -> None:
    options = {"codec": DifferenceCompression(Int8()), "topology": Ring()}
    loop = {"optimizer": torch.optim.AdamW, "norm": True}
    before = run(tmp_path, gossip(**options), Loop(**loop, save_at=3, shown=True))
    after = run(tmp_path, gossip(**options), Loop(**loop, resume=tmp_path / "loop" / "step.ckpt"), name="rest")
    assert all(equal(a["rows"][3:], b["rows"]) for a, b in zip(before, after, strict=True))


def test_the_plain_file_is_the_mean_and_loads_anywhere(whole: Any, tmp_path: Path) -> None:
    file, rows = whole
    mean = torch.load(file, weights_only=True)
    assert mean["step"] == 3
    for name, value in mean["model"].items():
        if value.is_floating_point():
            torch.testing.assert_close(value, torch.stack([row["rows"][2][name] for row in rows]).mean(0))
    # Under ddp, and on another number of workers, all go on from it: their next steps are those of equal workers.
    two = run(tmp_path, gossip(topology=Complete(), delay=0), Loop(**SAVED, resume=file), size=2)
    ddp = run(tmp_path, DDPStrategy(start_method="fork"), Loop(**SAVED, resume=file), size=2, name="ddp")
    for mine, other in zip(two, ddp, strict=True):
        for row, reference in zip(mine["rows"], other["rows"], strict=True):
            for name, _ in Network(tied=True, norm=True).named_parameters():
                torch.testing.assert_close(row[f"0.{name}"], reference[f"0.{name}"], rtol=1e-5, atol=1e-6)


# ---- what goes wrong ---------------------------------------------------------------------------------------------


class Other(FabricGossipStrategy):
    """Worker 1 was given other buckets, or changes what this says."""

    zero: ClassVar[dict[str, Any]] = {}
    one: ClassVar[dict[str, Any]] = {"bucket_bytes": 600}

    def setup_environment(self) -> None:
        vars(self).update({0: self.zero, 1: self.one}.get(self.local_rank, self.zero))
        super().setup_environment()


class OtherTime(Other):
    one: ClassVar[dict[str, Any]] = {"_timeout": timedelta(seconds=50)}


class OtherPrecision(Other):
    """Of one class."""

    zero: ClassVar[dict[str, Any]] = {"_precision": MixedPrecision("bf16-mixed", "cpu")}
    one: ClassVar[dict[str, Any]] = {"_precision": MixedPrecision("16-mixed", "cpu")}


class OtherFormat(Other):
    one: ClassVar[dict[str, Any]] = {}

    def setup_module(self, module: nn.Module) -> nn.Module:
        if self.local_rank == 1:
            weight = next(p for p in module.parameters() if p.dim() == 2)
            weight.data = weight.detach().t().contiguous().t()
        return super().setup_module(module)


OTHERS = [
    (Other, "worker 1 has bucket_bytes=600, worker 0 has bucket_bytes=None: give every"),
    (OtherTime, r"worker 1 has timeout=datetime.timedelta\(seconds=50\), worker 0 has timeout="),
    (OtherPrecision, "worker 1 has precision_plugin.precision='16-mixed', worker 0 has precision_plugin.precision='bf"),
    (OtherFormat, r"worker 1 has .* strides \(1, .*: every worker must build the same model"),
]


@pytest.mark.parametrize(("kind", "told"), OTHERS, ids=lambda of: getattr(of, "__name__", ""))
def test_workers_with_other_settings_are_told(tmp_path: Path, kind: type[Other], told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        run(tmp_path, kind(start_method="fork"), Loop())


def dies(fabric: Fabric, model: nn.Module) -> None:
    if fabric.global_rank == 1 and fabric.strategy.steps == 3:
        os._exit(3)


def test_a_worker_that_dies_ends_the_others_within_seconds(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"exit code 3|lost worker 1"):
        run(tmp_path, gossip(topology=Ring()), Loop(look=dies, steps=10_000))
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(("options", "remedy"), [
    ({"find_unused_parameters": True}, "has no option 'find_unused_parameters'"),
    ({"island": None}, "has no option 'island'"),
    ({"delay": -1}, "delay"),
    ({"codec": Int8, "delay": 1}, "codec"),
    ({"bucket_bytes": 0}, "bucket_bytes must be positive"),
], ids=str)  # fmt: skip
def test_impossible_options_are_refused(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        FabricGossipStrategy(**options)
