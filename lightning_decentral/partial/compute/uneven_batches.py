"""Uneven batch sizes: a batch sampler that gives each worker its share of the same global batch."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, Sampler

KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
)
"""Options that a data loader keeps when its batches are shared out."""


def counts(shares: Sequence[float], samples: int) -> list[int]:
    """Whole numbers in proportion to the shares, with sum `samples`: one each, the rest by largest remainders.
    ValueError: fewer samples than workers."""
    if samples < len(shares):
        raise ValueError(f"{samples} samples can't be shared by {len(shares)} workers: use a larger batch_size")
    spare = samples - len(shares)
    found = [1 + int(share * spare) for share in shares]
    remainders = sorted(range(len(shares)), key=lambda i: int(shares[i] * spare) - shares[i] * spare)
    for index in remainders[: samples - sum(found)]:
        found[index] += 1
    return found


class SharedBatches(Sampler[list[int]]):
    """Sampler of this worker's slice of every global batch: the samples of all workers' DistributedSamplers, of which
    `sampler` is this worker's. `sizes`: samples of each worker, `batch_size` on average. An incomplete last batch is
    left out."""

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int, sizes: Sequence[int]) -> None:
        self.sampler, self._batch_size, self.sizes = sampler, batch_size, tuple(sizes)

    def __len__(self) -> int:
        return len(self.sampler) // self._batch_size  # an incomplete batch would have other shares

    def __iter__(self) -> Iterator[list[int]]:
        rows = []
        for rank in range(len(self.sizes)):
            other = copy.copy(self.sampler)  # with the same seed and epoch: another rank gives another worker's samples
            other.rank = rank
            rows.append(list(other))
        first = sum(self.sizes[: self.sampler.rank])
        for index in range(len(self)):
            batch = slice(index * self._batch_size, (index + 1) * self._batch_size)
            together = [sample for row in rows for sample in row[batch]]
            yield together[first : first + self.sizes[self.sampler.rank]]


def shared(loader: object, shares: Sequence[float]) -> tuple[DataLoader[object], tuple[int, ...]]:
    """Return a loader with unequal batches, and the samples of each worker. ValueError: not a DataLoader with a batch
    size and a DistributedSampler."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.sampler, DistributedSampler):
        raise ValueError(
            f"unequal shares need a DataLoader whose sampler Lightning distributes, got {type(loader).__name__}: "
            "pass DataLoader(dataset, batch_size=...) with use_distributed_sampler=True, or use Staircase()"
        )
    if loader.batch_size is None:
        raise ValueError("unequal shares need a DataLoader with a batch_size: give one, or use Staircase()")
    sizes = counts(shares, len(shares) * loader.batch_size)
    batches = SharedBatches(loader.sampler, loader.batch_size, sizes)
    options: dict[str, Any] = {name: getattr(loader, name) for name in KEPT}
    return DataLoader(loader.dataset, batch_sampler=batches, **options), tuple(sizes)
