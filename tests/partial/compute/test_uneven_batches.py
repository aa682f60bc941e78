"""Unequal batches: shares of one global batch, and their weighted gradients, against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_decentral.partial import Balanced
from lightning_decentral.partial.compute.uneven_batches import SharedBatches, counts, shared
from tests.partial.towers import Batches, Tower, run

SAMPLES = 90


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(*torch.randint(0, 6, (2, SAMPLES), generator=generator))


@given(weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=8), samples=st.integers(8, 500))
def test_counts_are_in_proportion(weights: list[float], samples: int) -> None:
    shares = [w / sum(weights) for w in weights]
    found = counts(shares, samples)
    assert sum(found) == samples
    assert min(found) >= 1
    assert all(abs(n - (1 + share * (samples - len(shares)))) < 1 for n, share in zip(found, shares, strict=True))


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="2 samples can't be shared by 3 workers"):
        counts([0.3, 0.3, 0.4], 2)


@given(size=st.integers(1, 4), batch_size=st.integers(2, 9), epoch=st.integers(0, 3))
def test_workers_share_each_global_batch(size: int, batch_size: int, epoch: int) -> None:
    shares = [Balanced().share(rank, size) for rank in range(size)]
    sizes = counts(shares, size * batch_size)
    samplers = [DistributedSampler(dataset(), size, rank, seed=5) for rank in range(size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    batches = [list(SharedBatches(sampler, batch_size, sizes)) for sampler in samplers]
    assert [len(rows) for rows in batches] == [-(-SAMPLES // size) // batch_size] * size
    plain = [list(sampler) for sampler in samplers]
    for index, parts in enumerate(zip(*batches, strict=True)):
        assert [len(part) for part in parts] == sizes
        together = {i for row in plain for i in row[index * batch_size : (index + 1) * batch_size]}
        assert {i for part in parts for i in part} == together


def test_a_segment_has_the_mean_over_the_samples_of_its_contributors(tmp_path: Path) -> None:
    loader = DataLoader(dataset(), batch_size=8, shuffle=True)
    options = {"depth": Balanced(), "cuts": ["network.blocks.1", "network.blocks.3"]}
    settings = {"use_distributed_sampler": True, "batches": loader, "max_steps": 4, "size": 3}
    rows = run(tmp_path, Tower(norm=False), options=options, **settings)
    samplers = [DistributedSampler(dataset(), 3, rank, shuffle=True, seed=1) for rank in range(3)]
    sizes = counts([Balanced().share(rank, 3) for rank in range(3)], 24)
    batches = [list(SharedBatches(sampler, 8, sizes)) for sampler in samplers]
    assert len(set(sizes)) > 1
    tensors = dataset().tensors
    for step in range(3):
        module = Tower()
        module.load_state_dict(rows[0]["parameters"][step - 1] if step else module.state_dict())
        depths = [1, 2, 3]
        for segment, name in ((0, "network.embedding.weight"), (1, "network.blocks.2.first.weight")):
            ranks = [r for r in range(3) if depths[r] >= 3 - segment]
            indices = [i for r in ranks for i in batches[r][step]]
            module.zero_grad()
            module.loss([t[indices] for t in tensors]).backward()
            expected = dict(module.named_parameters())[name].grad
            for row in rows:
                torch.testing.assert_close(row["gradients"][step][name], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.thorough
def test_replicas_are_equal_after_every_step(tmp_path: Path) -> None:
    """As `test_lightning` has it for the assignments with equal batches."""
    module = Tower(tied=True, norm=True, optimizer="adamw", schedule=True)
    settings = {"max_steps": 50, "gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "precision": "bf16-mixed"}
    loader = {"use_distributed_sampler": True, "batches": DataLoader(dataset(), batch_size=4), "size": 3}
    rows = run(tmp_path, module, options={"depth": Balanced(warm_up=3)}, **settings, **loader)
    assert [len(row["parameters"]) for row in rows] == [50] * 3
    for row in rows[1:]:
        for mine, first in zip(row["parameters"], rows[0]["parameters"], strict=True):
            assert all(torch.equal(mine[name], value) for name, value in first.items())


@pytest.mark.parametrize("loader", [Batches(), DataLoader(dataset(), batch_size=2)], ids=["iterable", "sampler"])
def test_other_loaders_are_refused(loader: Any) -> None:
    with pytest.raises(ValueError, match=r"unequal shares need a DataLoader .*or use Staircase"):
        shared(loader, [0.5, 0.5])
