"""The monitor's rows against known counts, the cut inside gossip against a simulation by one process."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch import Tensor

from lightning_decentral import GossipStrategy, PartialBackpropStrategy
from lightning_decentral.gossip import Complete, Ring
from lightning_decentral.partial import (
    Decay,
    PartialBackpropMonitor,
    PartialBackward,
    PerWorker,
    Skip,
    Staircase,
    Temporal,
)
from lightning_decentral.partial.plan.cost import saved_bytes
from tests.partial.towers import Batches, Scripted, Tower, Watch, batch_of, run
from tests.tiny import QUIET, in_processes
from tests.wandb_file import history

CUTS = ["network.blocks.1", "network.blocks.2", "network.blocks.3"]


class Plan(Watch):
    """The plan's costs, and what the progress bar shows."""

    def look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        driver = trainer.strategy.driver
        assert driver is not None
        self.more["saved"] = [saved_bytes(driver.plan.costs[-d:]) for d in (1, 2, 3, 4)]
        self.more["bar"] = sorted(trainer.progress_bar_metrics)


@pytest.mark.sampled
@pytest.mark.parametrize("every", [1, 2])
def test_rows_of_the_monitor(tmp_path: Path, every: int) -> None:
    logger = CSVLogger(str(tmp_path), name="", version="")
    options = {"depth": Temporal(order=Scripted(4, 2, 1), warm_up=0), "cuts": CUTS}
    callbacks = [PartialBackpropMonitor(every_n_steps=every), Plan(tmp_path)]
    rows = run(tmp_path, Tower(), options=options, callbacks=callbacks, logger=logger, max_steps=6, log_every_n_steps=1)
    with (tmp_path / "metrics.csv").open() as stream:
        found = [row for row in csv.DictReader(stream) if row.get("partial/depth")]
    depths = [4, 2, 1, 4, 2, 1][every - 1 :: every]
    assert [float(row["partial/depth"]) for row in found] == depths
    assert [float(row["partial/saved_bytes"]) for row in found] == [rows[0]["saved"][d - 1] for d in depths]
    assert all(float(row["partial/backward_seconds"]) > 0 for row in found)
    sent = [every * float(row["partial/sent_bytes"]) for row in found]
    module = Tower()
    trained = {4: 0, 2: 2, 1: 3}
    blocks = [sum(4 * (p.numel() + 1) for p in block.parameters()) for block in module.network.blocks]
    ends = {"network.embedding": 4 * (6 * 8 + 1), "network.head": 4 * (6 * 8 + 6 + 2)}
    sizes = {
        d: sum(blocks[low:]) + ends["network.head"] + ends["network.embedding"] * (d == 4) for d, low in trained.items()
    }
    # 2 (n - 1) / n is one of two workers; one number more says whether a buffer has changed.
    expected = [sizes[d] + 4 for d in (4, 2, 1, 4, 2, 1)]
    assert sent == [pytest.approx(sum(expected[i : i + every])) for i in range(0, 6, every)]
    assert "partial/depth" in rows[0]["bar"]


def into_wandb(folder: Path) -> None:
    logger = WandbLogger(save_dir=folder, offline=True, project="partial")
    logger.log_hyperparams({"recipe": "tiny"})  # begins the run here, before the workers start
    strategy = PartialBackpropStrategy(
        depth=Temporal(order=Scripted(4, 2, 1), warm_up=0), cuts=CUTS, start_method="fork"
    )
    watched: list[Callback] = [PartialBackpropMonitor(every_n_steps=1), Watch(folder)]
    options = {**QUIET, "logger": logger, "max_steps": 3, "devices": 2, "log_every_n_steps": 1}
    Trainer(strategy=strategy, callbacks=watched, **options).fit(Tower(), Batches(4))
    wandb.finish()


@pytest.mark.thorough
def test_rows_of_the_monitor_in_wandb(tmp_path: Path) -> None:
    in_processes(into_wandb, tmp_path)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = [row for row in history(file) if "partial/depth" in row]
    assert [row["partial/depth"] for row in rows] == [4, 2, 1]
    assert [row["trainer/global_step"] for row in rows] == [0, 1, 2]
    assert {"partial/saved_bytes", "partial/backward_seconds", "partial/sent_bytes"} <= set(rows[0])


def test_the_monitor_is_silent_elsewhere(tmp_path: Path) -> None:
    logger = CSVLogger(str(tmp_path), name="", version="")
    trainer = Trainer(**{**QUIET, "logger": logger}, max_steps=2, callbacks=[PartialBackpropMonitor()])
    trainer.fit(Tower(), Batches(4))
    assert not any("partial" in name for name in trainer.callback_metrics)


def test_a_wrong_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="every_n_steps must be at least 1, got 0"):
        PartialBackpropMonitor(every_n_steps=0)


# ---- inside gossip ---------------------------------------------------------------------------------------------------


def simulated(depths: list[list[int]], mix: Any, absent: Any, steps: int) -> list[dict[str, Tensor]]:
    """Every worker by itself, parameters below its cut without gradient; then the mixing matrix."""
    size = len(depths)
    modules = [Tower(optimizer="momentum") for _ in range(size)]
    optimizers = [module.configure_optimizers() for module in modules]
    for step in range(steps):
        for rank, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            optimizer.zero_grad()
            module.loss(batch_of(rank, step)).backward()
            lowest = 4 - depths[rank][step % len(depths[rank])]
            below = [*module.network.embedding.parameters()] if lowest else []
            for parameter in [*below, *module.network.blocks[:lowest].parameters()]:
                parameter.grad = None
                if isinstance(absent, Decay):
                    parameter.data.mul_(1 - 0.1 * 0.1)
            optimizer.step()
        with torch.no_grad():
            for name in modules[0].state_dict():
                rows = torch.stack([module.state_dict()[name] for module in modules])
                mixed = torch.einsum("ij,j...->i...", mix, rows)
                for module, row in zip(modules, mixed, strict=True):
                    module.state_dict()[name].copy_(row)
    return [dict(module.state_dict()) for module in modules]


@pytest.mark.sampled
@pytest.mark.parametrize("absent", [Skip(), Decay()], ids=str)
def test_gossip_with_a_depth_of_each_worker(tmp_path: Path, absent: Any) -> None:
    callback = PartialBackward(depth=PerWorker(fractions=(0.25, 1.0, 0.5)), cuts=CUTS, absent=absent)
    strategy = GossipStrategy(topology=Complete(), delay=0, start_method="fork")
    rows = run(tmp_path, Tower(optimizer="momentum"), strategy=strategy, callbacks=[callback], size=3, max_steps=4)
    expected = simulated([[1], [4], [2]], torch.full((3, 3), 1 / 3), absent, steps=4)
    for row, state in zip(rows, expected, strict=True):
        torch.testing.assert_close(row["parameters"][-1], state, rtol=1e-4, atol=1e-6)


def test_gossip_overlapped_stays_a_mean_of_all(tmp_path: Path) -> None:
    """The default order and a ring: workers differ, each has moved everywhere, and nothing is left in the module."""
    callback = PartialBackward(depth=Staircase())
    strategy = GossipStrategy(topology=Ring(), start_method="fork")
    rows = run(tmp_path, Tower(tied=True), strategy=strategy, callbacks=[callback], size=3, max_steps=6)
    start = Tower(tied=True).state_dict()
    for row in rows:
        assert all(not torch.equal(row["parameters"][-1][name], value) for name, value in start.items())
    low = "network.blocks.0.first.weight"
    own = [row["gradients"] for row in rows]
    assert [low in gradients[0] for gradients in own] == [False, False, True], "only the deepest trains the bottom"


def test_one_device_alone(tmp_path: Path) -> None:
    callback = PartialBackward(depth=Temporal(order=Scripted(4, 2), warm_up=0), cuts=CUTS)
    rows = run(tmp_path, Tower(optimizer="momentum"), strategy="auto", callbacks=[callback], size=1, max_steps=4)
    (expected,) = simulated([[4, 2]], torch.ones(1, 1), Skip(), steps=4)
    torch.testing.assert_close(rows[0]["parameters"][-1], expected)


@pytest.mark.parametrize("strategy", ["ddp_fork", "partial_backprop_fork"])
def test_the_callback_is_refused_where_gradients_are_averaged(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(RuntimeError, match=r"ValueError: PartialBackward leaves gradients.*without this callback"):
        run(tmp_path, Tower(), strategy=strategy, callbacks=[PartialBackward()])
