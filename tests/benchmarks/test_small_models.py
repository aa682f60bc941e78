"""What the hint gives a small network reaches `ddp`'s loss, and Muon's 2e-2 doesn't under either strategy."""

import json
from statistics import mean, stdev

import pytest

from common.paths import RESULTS
from quality.small_models import MODELS, OPTIMIZERS, SEEDS, STRATEGIES

RUNS = json.loads((RESULTS / "small-models-2-cores.json").read_text())["runs"]


def losses(model: str, strategy: str, optimizer: str) -> list[float]:
    return [RUNS[f"{model}, {strategy}, {optimizer}, {seed}"]["loss"] for seed in SEEDS]


def test_everything_has_run() -> None:
    assert len(RUNS) == len(MODELS) * len(OPTIMIZERS) * len(STRATEGIES) * len(SEEDS)


@pytest.mark.parametrize("model", MODELS)
def test_accum_adamw_at_adamws_rate_ends_under_gossip_within_noise_of_ddp(model: str) -> None:
    ddp = losses(model, "ddp", "AdamW at 1e-3")
    found = mean(losses(model, "gossip", "AccumAdamW at 1e-3"))
    assert found <= mean(ddp) + stdev(ddp)
    assert found < mean(losses(model, "gossip", "AdamW at 1e-3"))


@pytest.mark.parametrize("model", MODELS)
def test_a_lower_rate_of_muon_is_better_under_ddp_as_well(model: str) -> None:
    lower = min(mean(losses(model, "ddp", f"Muon at {rate}")) for rate in ("6e-3", "2e-3"))
    assert lower < mean(losses(model, "ddp", "Muon at 2e-2"))
