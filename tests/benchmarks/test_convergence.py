"""The comparison of rules: shards that are a partition, tuning and test apart, and a small slice of it that runs."""

import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from lightning_decentral.gossip import Complete, Every, Exponential, Ring
from pages.reports import report
from quality import convergence
from quality.convergence import SCHEDULES, Descent, Setting, cell, key
from quality.convergence_methods import METHODS, WORKERS, Method, copies_sent
from quality.convergence_report import plot, text
from quality.shards import Network, digits, dirichlet_shards, skew

ROOT = Path(__file__).parents[2]
LABELS = np.random.default_rng(3).integers(0, 10, 1003)


@pytest.mark.parametrize("workers", [1, 7, 16])
@pytest.mark.parametrize("alpha", [1e-3, 0.1, 1.0, 100.0])
def test_every_example_is_in_one_shard_and_shards_are_equally_large(alpha: float, workers: int) -> None:
    shards = dirichlet_shards(LABELS, workers, alpha, seed=1)
    assert len(shards) == workers
    assert sorted(np.concatenate(shards)) == list(range(len(LABELS)))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_shards_are_the_more_skewed_the_smaller_alpha_is() -> None:
    found = [
        statistics.mean(skew(LABELS, dirichlet_shards(LABELS, 16, alpha, seed)) for seed in range(4))
        for alpha in (0.01, 0.1, 1.0, 10.0, 1000.0)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0.75
    assert found[-1] < 0.2


def test_skew_of_known_shards() -> None:
    labels = np.array([0, 0, 1, 1])
    assert skew(labels, [np.array([0, 2]), np.array([1, 3])]) == 0
    assert skew(labels, [np.array([0, 1]), np.array([2, 3])]) == 0.5


def test_the_three_splits_share_no_image_and_lose_none() -> None:
    splits = digits()
    assert sum(len(split.labels) for split in splits) == 1797
    rows = torch.cat([torch.cat([split.images, split.labels.unsqueeze(1)], 1) for split in splits])
    assert len(rows.unique(dim=0)) == len(rows)


def test_gradients_of_many_models_at_once_equal_autograd() -> None:
    network, generator = Network(), torch.Generator().manual_seed(0)
    flat = torch.stack([network.start(seed) for seed in (0, 1)])
    images = torch.rand(2, 5, 64, generator=generator)
    labels = torch.randint(0, 10, (2, 5), generator=generator)
    found = network.gradients(flat, images, labels)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for row, x, y, gradient in zip(flat, images, labels, found, strict=True):
        nn.utils.vector_to_parameters(row, module.parameters())
        module.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        expected = nn.utils.parameters_to_vector(p.grad for p in module.parameters())
        torch.testing.assert_close(gradient, expected)


def test_grid_points_and_seeds_dont_touch_each_other() -> None:
    """Each cell of one large run is the run of that setting and seed alone."""
    grid = [Setting(0.1, 0.0), Setting(0.3, 0.9), Setting(1e6, 0.0)]  # the last one diverges
    method = next(m for m in METHODS if m.rule == "gossip" and m.graph == "ring")
    together = cell(method, "falling", 0.1, seeds=(0, 1), grid=grid, steps=12)
    for place, setting in enumerate(grid):
        alone = [cell(method, "falling", 0.1, seeds=(seed,), grid=[setting], steps=12)["tuning"][0] for seed in (0, 1)]
        assert together["tuning"][place] == pytest.approx(statistics.mean(alone), abs=1e-6)


def test_all_reduce_is_one_worker_with_all_batches() -> None:
    """SGD on the mean of all workers' gradients, written without the package."""
    steps, method = 10, next(m for m in METHODS if m.rule == "all-reduce")
    descent = Descent(0.1, (0,), [Setting(0.3, 0.0)])
    reference = Descent(0.1, (0,), [Setting(0.3, 0.0)])
    last = convergence.simulated(method, descent, [1.0] * steps)
    x = reference.start
    for step in range(steps):
        x = (x - reference(x, step)).mean(0).expand_as(x)
    torch.testing.assert_close(last, x, rtol=1e-4, atol=1e-5)
    worst, mean = descent.accuracy(last, descent.tested)
    torch.testing.assert_close(worst, mean, rtol=0, atol=0.01)


@pytest.mark.parametrize(("topology", "copies"), [
    (Ring(), 2.0), (Exponential(), 4.0), (Complete(), 2 * 15 / 16), (Every(5, Complete()), 2 * 15 / 16 / 5),
], ids=str)  # fmt: skip
def test_copies_sent_per_step(topology: object, copies: float) -> None:
    assert copies_sent(topology, WORKERS) == pytest.approx(copies)


@pytest.mark.parametrize("method", [m for m in METHODS if m.graph != "none"], ids=lambda m: m.key)
def test_every_method_is_one_that_the_strategy_would_accept(method: Method) -> None:
    method.check()


def test_names_are_unique() -> None:
    assert len({method.key for method in METHODS}) == len(METHODS)


@pytest.mark.thorough
def test_a_small_slice_runs_and_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convergence, "STEPS", 4)
    monkeypatch.setattr(convergence, "SEEDS", (0, 1))
    path = tmp_path / "convergence.json"
    convergence.run(path, only="all-reduce")
    kept = json.loads(path.read_text())
    assert sorted(kept["cells"]) == sorted(key(METHODS[0], s, a) for s in SCHEDULES for a in convergence.ALPHAS)
    assert all(len(found["worst"]) == 2 for found in kept["cells"].values())
    assert all(0 < value < 1 for found in kept["cells"].values() for value in found["worst"])
    monkeypatch.setattr(convergence, "cell", lambda *_: pytest.fail("ran again"))
    convergence.run(path, only="all-reduce")
    table = text(json.loads(path.read_text()), METHODS, tuple(SCHEDULES), convergence.ALPHAS, key)
    assert table.count("| all-reduce | complete | 0 | 1.88 |") == 3
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_tables_show_what_has_run_only(tmp_path: Path) -> None:
    found = {"worst": [0.5, 0.7], "mean_model": [0.9, 0.9], "learning_rate": 0.3, "momentum": 0.9, "skew": 0.4}
    cells = {key(METHODS[0], "constant", 0.1): {**found, "cpu_seconds": 60.0}}
    results = {"cells": cells, "hardware": {"cores": "2"}, "grid": [{"learning_rate": 0.3, "momentum": 0.9}]}
    table = text(results, METHODS, tuple(SCHEDULES), convergence.ALPHAS, key)
    assert "60.0 ± 14.1" in table
    assert "0.3 / 0.9" in table
    assert METHODS[1].rule not in table
    plot(results, METHODS, tuple(SCHEDULES), convergence.ALPHAS, key, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").exists()


def test_the_pages_show_the_results() -> None:
    written = report("convergence-2-cores").split("\n\n")
    page = " ".join((ROOT / "benchmarks/convergence.md").read_text().split())
    assert all(" ".join(part.split()) in page for part in written[:4])
    picture = (ROOT / "benchmarks/results/convergence-2-cores.png").read_bytes()
    assert (ROOT / "docs/images/convergence.png").read_bytes() == picture


def test_percents_of_the_rules_page_stand_in_the_results() -> None:
    page = (ROOT / "docs/rules.md").read_text().partition("## Which one?")[2].partition("\n## ")[0]
    measured = re.findall(r"(\d+\.\d) ±", report("convergence-2-cores"))
    shown = {*measured, *(f"{float(one):.0f}" for one in measured)}
    said = set(re.findall(r"(\d+(?:\.\d)?) %", page))
    assert {"96.5", "98.4"} <= said <= shown
