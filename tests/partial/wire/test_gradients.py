"""Gradients against an independent reference: full local gradients by one process, averaged over the contributors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral.partial import (
    BlockCoordinate,
    DepthAssignment,
    Full,
    Lisa,
    PerWorker,
    Selection,
    Staircase,
    Temporal,
)
from tests.partial.towers import Batches, Scripted, Tower, batch_of, plain_gradients, run

CUTS = ["network.blocks.1", "network.blocks.2", "network.blocks.3"]
ASSIGNMENTS: list[tuple[DepthAssignment, int]] = [
    (Full(), 2),
    (Staircase(), 2),
    (Staircase(), 3),
    (Staircase(), 4),
    (Staircase(warm_up=1), 3),
    (Temporal(warm_up=0), 2),
    (Temporal(order=Scripted(2, 4, 1), warm_up=0), 3),
    (PerWorker(fractions=(1.0, 0.25, 0.5)), 3),
    (Lisa(every=1, blocks=1), 2),
    (BlockCoordinate(every=1), 2),
    (BlockCoordinate(every=1, warm_up=1, seed=2), 3),
]


def segment(name: str) -> int:
    """By name, from the bottom."""
    parts = name.split(".")
    return {"embedding": 0, "head": 3}.get(parts[1], int(parts[2]) if parts[1] == "blocks" else 3)


def expected(tied: bool, assignment: DepthAssignment, size: int, step: int, state: dict[str, Tensor]) -> dict[str, Any]:
    """The mean over the contributors of each parameter's full local gradient; parts of a tied one add up."""
    module = Tower(tied)
    module.load_state_dict(state)
    rows = [plain_gradients(module, batch_of(rank, step)) for rank in range(size)]
    means: dict[str, Tensor] = {}
    for name in rows[0]:
        trained = [assignment.trained(rank, size, step, 4) for rank in range(size)]
        # A selection trains a tied weight as a whole, with the head; a depth each of its parts.
        whole = tied and isinstance(assignment, Selection) and "embedding" in name
        ranks = [r for r in range(size) if (3 if whole else segment(name)) in trained[r]]
        if ranks:
            means[name] = torch.stack([rows[r][name] for r in ranks]).mean(0)
    if tied:
        parts = [means.pop(n) for n in ("network.embedding.weight", "network.head.weight") if n in means]
        means |= {"network.embedding.weight": sum(parts)} if parts else {}
    return means


@pytest.mark.sampled
@pytest.mark.parametrize(("turn", "assignment", "size"), [(i, *case) for i, case in enumerate(ASSIGNMENTS)], ids=str)
def test_gradients_are_the_contributors_mean(tmp_path: Path, assignment: Any, size: int, turn: int) -> None:
    tied = turn % 3 > 0  # dealt out in turn, the harder one more often
    options = {"depth": assignment, "cuts": CUTS, "bucket_bytes": 300}
    rows = run(tmp_path, Tower(tied), options=options, size=size, batches=Batches(3), max_steps=3)
    start = Tower(tied).state_dict()
    for step in range(3):
        before = rows[0]["parameters"][step - 1] if step else start
        reference = expected(tied, assignment, size, step, before)
        for row in rows:
            assert row["gradients"][step].keys() == reference.keys()
            for name, value in reference.items():
                error = (row["gradients"][step][name] - value).norm() / value.norm().clamp(min=1e-12)
                assert error < 1e-5, (step, name, float(error))


def test_cuts_are_those_of_the_names(tmp_path: Path) -> None:
    rows = run(tmp_path, Tower(tied=True), options={"cuts": CUTS}, max_steps=1)
    for row in rows:
        assert list(row["boundaries"]) == CUTS
        assert row["segment_of"]["network.embedding.weight"] == 3, "used at the top, too"
        assert {n: s for n, s in row["segment_of"].items() if "embedding" not in n} == {
            n: segment(n) for n in row["segment_of"] if "embedding" not in n
        }
