"""Committed rounds, first exact steps and states that travel: as in one process, and equal whoever dies and joins."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral.gossip import AllReduce, FullyShard, Island, Plain, Solo
from tests.elastic import test_pipelines as pipelines
from tests.elastic.test_islands import Lines, trained
from tests.elastic.weighted_training import BATCH, EXAMPLES, data
from tests.elastic.wire.rounds.test_commits import Reference
from tests.gossip.island_training import COMMITTED, DECAY, EXACT, KILLED, ROUNDS, Deep, H, flat

RATE, MOMENTUM = 0.05, 0.9
BATCHES = EXAMPLES // (2 * BATCH)  # of an epoch


class Alone:
    """Both workers in one process, by hand: SGD with momentum, then the rule."""

    def __init__(self, rounds: str, accumulated: int) -> None:
        start, (_, self.x, self.y) = Deep(), data().tensors
        self.model, self.options, self.accumulated = start, ROUNDS[rounds], accumulated
        weights = torch.tensor(flat(start), dtype=torch.float64)
        self.outer = Reference(2, COMMITTED["combine"], Plain(), len(weights), torch.float64)
        self.outer.x, self.outer.anchor = [weights.clone(), weights.clone()], weights.clone()
        self.buffers = [torch.zeros_like(weights) for _ in range(2)]
        self.two = rounds == "two optimizers"
        self.flying: tuple[dict[int, Tensor], list[Tensor]] | None = None

    def gradient(self, weights: Tensor, batches: list[list[int]]) -> Tensor:
        torch.nn.utils.vector_to_parameters(weights.clone(), self.model.parameters())
        self.model.zero_grad()
        for places in batches:
            loss = (self.model.net(self.x[places]) - self.y[places]).square().mean() / len(batches)
            loss.backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])

    def updates(self, step: int, first: Tensor) -> list[tuple[Tensor, float]]:
        """Which parameters are updated, at which rate."""
        if not self.two:
            return [(torch.ones_like(first), RATE)]
        own = [(first, RATE * DECAY**step)]
        return own + [(~first, RATE)] * 2 if step % BATCHES % 2 else own

    def step(self, step: int, batches: list[list[list[int]]]) -> None:
        outer = self.outer
        for rank, own in enumerate(batches):
            gradient, places = self.gradient(outer.x[rank], own), torch.arange(len(outer.x[rank]))
            first = places < sum(p.numel() for p in self.model.net[0].parameters())
            for taken, rate in self.updates(step, first):
                self.buffers[rank] = torch.where(taken, MOMENTUM * self.buffers[rank] + gradient, self.buffers[rank])
                outer.x[rank] = torch.where(taken, outer.x[rank] - rate * self.buffers[rank], outer.x[rank])
        if step < self.options.get("exact_steps", 0):
            outer.anchor = torch.stack(outer.x).mean(0)
            outer.x = [outer.anchor.clone(), outer.anchor.clone()]
        elif "combine" in self.options:
            self.commit(step)
        else:
            outer.x = [torch.stack(outer.x).mean(0)] * 2
            self.buffers = [torch.stack(self.buffers).mean(0)] * 2

    def commit(self, step: int) -> None:
        if self.flying is not None:
            sent, buffers = self.flying
            self.outer.commit(sent, [0, 1], [0, 1])
            if "states" in self.options:
                mean = torch.stack(buffers).mean(0)
                self.buffers = [own + mean - old for own, old in zip(self.buffers, buffers, strict=True)]
            self.flying = None
        if (step + 1) % H == 0:
            self.flying = self.outer.sent([0, 1]), [*self.buffers]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rounds", ["committed", "two optimizers", "accumulated", "exact", "travelling", "travelling, committed"]
)
def test_two_workers_are_one_process_that_does_the_same_by_hand(rounds: str, tmp_path: Path) -> None:
    found = trained(tmp_path, (Solo(), Solo()), 3, rounds)
    many = 2 if rounds == "accumulated" else 1
    alone, rows = Alone(rounds, many), [*zip(found["a0"], found["b0"], strict=True)]
    assert len(rows) > 4 * many * H
    for step in range(len(rows) // many):
        batches = rows[step * many : (step + 1) * many]
        alone.step(step, [[row[rank]["taken"] for row in batches] for rank in range(2)])
        for rank, row in enumerate(batches[-1]):
            assert rounds == "two optimizers" or row["step"] == step + 1
            assert row["weight"] == pytest.approx(alone.outer.x[rank].tolist(), abs=1e-12)
            buffers = alone.buffers[rank].tolist()[: len(row["buffers"])]  # of the first optimizer
            assert row["buffers"] == pytest.approx(buffers, abs=1e-12)
    assert rows[EXACT + 1][0]["rule"] == rows[EXACT + 1][1]["rule"]


def assert_equal_while_together(stays: Lines, joins: Lines) -> None:
    """What both keep of rounds is, in each step of both."""
    first = {row["step"]: row for row in stays}
    shared = [(row, first[row["step"]]) for row in joins if row["step"] in first and len(row["members"]) == 2]
    shared = [(one, other) for one, other in shared if one["members"] == other["members"]]
    assert {one["life"] for one, _ in shared} == {0, 1}
    assert all((one["rule"], one["rate"]) == (other["rule"], other["rate"]) for one, other in shared)
    assert len({one["rule"] for one, _ in shared if one["life"]}) > 4
    assert max(one["step"] for one, _ in shared) > KILLED


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("island", "dies", "rounds"),
    [
        (AllReduce(2), "b0", "four bits"),
        (FullyShard(2), "b1", "four bits"),
        (FullyShard(2), "b0", "exact"),
        (Solo(), "b0", "travelling, committed"),
        (Solo(), "b0", "two optimizers"),
    ],
    ids=str,
)
def test_a_member_is_killed_and_joins_again(island: Island, dies: str, rounds: str, tmp_path: Path) -> None:
    found = trained(tmp_path, (island, island), 12, rounds, dies=dies)
    assert_equal_while_together(found["a0"], found["b0"])
    for name in "ab":  # devices of one member have one model
        devices = [found[f"{name}{rank}"] for rank in range(island.devices)]
        for rows in zip(*([(r["life"], r["step"], r["weight"]) for r in of] for of in devices), strict=False):
            assert len({str(row) for row in rows if row[:2] == rows[0][:2]}) == 1


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_pipeline_is_killed_and_joins_again(tmp_path: Path) -> None:
    found = pipelines.trained(tmp_path, 6, "committed", dies="b1")
    assert_equal_while_together(found["a0"], found["b0"])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("island", "rounds"), [(Solo(), "travelling"), (Solo(), "all exact"), (FullyShard(2), "all exact")]
)
def test_a_newcomer_takes_what_all_have_equal(island: Island, rounds: str, tmp_path: Path) -> None:
    found = trained(tmp_path, (island, island), 12, rounds, dies="b0")
    first: dict[int, Any] = {row["step"]: row for row in found["a0"]}
    later = [row for row in found["b0"] if row["life"] == 1]
    assert len(later) > 4
    for row in later:
        other = first[row["step"]]
        if rounds == "all exact":
            assert row["weight"] == other["weight"]
            continue
        assert row["weight"] == pytest.approx(other["weight"], abs=1e-12)
        assert row["buffers"] == pytest.approx(other["buffers"], abs=1e-12)
