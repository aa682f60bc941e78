"""Batches of each worker, as Lightning serves them: its distributed sampler, shuffled anew in each epoch."""

import os
from collections.abc import Callable, Iterator
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

Batches = Callable[[int], Iterator[Any]]
"""Of a rank, in order, without an end."""


def loader_of(module: LightningModule, data: LightningDataModule | DataLoader[Any] | None) -> DataLoader[Any]:
    """The loader for training, of one worker that has all data: the data's, or the module's own.

    Raises:
        ValueError: there are several loaders, or none of torch's.
    """
    if isinstance(data, LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        found: Any = data.train_dataloader()
    else:
        found = module.train_dataloader() if data is None else data
    if not isinstance(found, DataLoader):
        raise ValueError(f"the training data are a {type(found).__name__}: one torch DataLoader can be rehearsed")
    return found


def shared_out(loader: DataLoader[Any], workers: int, seed: int = 0) -> tuple[Batches, int | None]:
    """(batches of each of so many workers, batches of an epoch; None: unknown). The seed is added to the run's."""
    if isinstance(loader.dataset, IterableDataset):  # Lightning leaves these to the user, too
        return lambda rank: _endless(loader), None
    loaders = [_update_dataloader(loader, _sampler(loader, workers, rank, seed)) for rank in range(workers)]
    if not len(loaders[0]):
        raise ValueError(
            f"{workers} workers leave less than one batch for each: take a smaller batch, or fewer workers"
        )
    return lambda rank: _endless(loaders[rank]), len(loaders[0])


def _sampler(loader: DataLoader[Any], workers: int, rank: int, seed: int) -> Any:
    own, seed = loader.sampler, seed + int(os.environ.get("PL_GLOBAL_SEED", "0"))
    asked: dict[str, Any] = {"num_replicas": workers, "rank": rank, "seed": seed}
    shuffle = not isinstance(own, SequentialSampler)
    if isinstance(own, (RandomSampler, SequentialSampler)):
        return DistributedSampler(loader.dataset, shuffle=shuffle, **asked)
    return DistributedSamplerWrapper(own, shuffle=shuffle, **asked)


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    epoch, some = 0, True
    while some:
        set_epoch = getattr(loader.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        some = False
        for batch in loader:
            some = True
            yield batch
        epoch += 1
