"""The device never holds more bytes than its budget, counted storage by storage; on a CUDA device by the allocator.

On the CPU everything counts that operations of a step make, until it dies, with the copies of parameters and inputs,
the batch and buffers. What kernels use inside of one operation isn't seen.
"""

import functools
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_decentral import SpilledStrategy
from lightning_decentral.recipes.schedules import constant
from lightning_decentral.spilled.compute.engine import Engine
from lightning_decentral.spilled.compute.prefetch import Loader
from lightning_decentral.spilled.compute.transfer import Counting
from tests.spilled.spilling import (
    CONFIGS,
    LAYERS,
    ROWS,
    WIDTH,
    Chain,
    Watched,
    batches,
    finest,
    fit,
    least_bytes,
    recipe,
    rows,
)


class Peaks:
    """The most bytes that were on the stand-in in any step: copies, what operations made, batches, buffers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[int] = []
        counting, finish = Engine.counting, Engine.finish

        def counted(engine: Engine) -> Any:
            return Counting(engine.device.ledger, {}) if engine.plans else counting(engine)

        monkeypatch.setattr(Engine, "counting", counted)

        def watched(engine: Engine) -> None:
            finish(engine)
            self.found.append(engine.device.peak_bytes())
            engine.device.forget_peak()

        monkeypatch.setattr(Engine, "finish", watched)

    def planned(self) -> int:
        """Of the steps that had a plan; while a step is measured, the peak is forgotten at every block."""
        return max(self.found[2:])


@pytest.mark.sampled
@pytest.mark.parametrize("name", CONFIGS)
def test_the_peak_is_within_every_budget_down_to_the_least(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = least_bytes(name)
    for budget in (lowest, lowest * 11 // 10, 2 * lowest):
        peaks, strategy = Peaks(monkeypatch), Watched(memory_bytes=budget)
        fit(recipe(name), batches(name), strategy, limit_val_batches=0)
        assert lowest / 2 < peaks.planned() <= strategy.plans["training"].peak_bytes <= budget
        monkeypatch.undo()
    with pytest.raises(
        ValueError, match=rf"block .* needs {lowest} bytes.*memory_bytes={lowest - 1}.*at least {lowest}"
    ):
        fit(recipe(name), batches(name), SpilledStrategy(memory_bytes=lowest - 1))


def test_a_shard_that_stays_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(Loader, "_keep", lambda *_: None)
    peaks = Peaks(monkeypatch)
    fit(recipe("gpt"), batches("gpt"), SpilledStrategy(memory_bytes=least_bytes("gpt")), limit_val_batches=0)
    assert peaks.planned() > least_bytes("gpt")


def test_the_peak_of_a_chain_is_two_layers_and_one_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six layers: a plain step has all, and as many gradients."""
    layer, activation = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH
    peaks, strategy = Peaks(monkeypatch), Watched(memory_bytes=4 * layer + 8 * activation)
    fit(Chain(), rows(), strategy, limit_val_batches=0)
    assert 3 * layer < peaks.planned() <= 3 * layer + 8 * activation
    assert len(strategy.plans["training"].shards) == LAYERS


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_on_a_device_the_allocator_agrees(precision: str) -> None:
    """A GPT-2 of 5 layers of 12.6 MB: within two budgets, and close to the same training without spilling."""
    options = {"n_embd": 512, "n_layer": 5, "n_head": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

    def module() -> LightningModule:
        torch.manual_seed(0)
        make, config = CONFIGS["gpt"]
        adam = functools.partial(torch.optim.Adam, lr=1e-4)
        criterion = nn.functional.cross_entropy
        return make(config={**config, **options}, criterion=criterion, optimizer=adam, scheduler=constant)

    def run(strategy: Any) -> tuple[float, int]:
        torch.cuda.empty_cache()
        settings = {"accelerator": "gpu", "precision": precision, "max_steps": 6, "limit_val_batches": 0}
        done = fit(module(), batches("gpt"), strategy, **settings)
        return float(done.callback_metrics["train/loss"]), torch.cuda.max_memory_allocated()

    first = Watched()
    run(first)
    plan = first.plans["training"]
    lowest = finest(plan).peak_bytes
    assert plan.footprint.overlaps
    torch.cuda.reset_peak_memory_stats()
    plain, plain_bytes = run("auto")
    for budget in (int(1.05 * lowest), 2 * lowest):
        loss, peak = run(Watched(memory_bytes=budget))
        assert peak <= budget, "the measured steps forget the peak at every block, the others don't"
        assert loss == pytest.approx(plain, rel=0.02)
    assert lowest < plain_bytes / 2
