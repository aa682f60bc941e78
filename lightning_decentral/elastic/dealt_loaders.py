"""Joining a run: the moment in set-up when a worker becomes a member, the epoch's length, and its examples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import DistributedSampler, Sampler

from lightning_decentral.elastic import loops
from lightning_decentral.elastic.plan.dealing import UNBOUNDED, Calendar, Dealing
from lightning_decentral.elastic.wire.participant import Participant


@dataclass
class Joining:
    """Processes the training loaders of one fit, in the order in which they are combined."""

    weight: int  # of this worker's batches
    weights: int  # expected sum of all workers' weights, used before it is known how many workers begin
    # Begins the next round. Its argument makes the run's calendar, if this worker is the oldest of the first members.
    begin: Callable[[Callable[[], Calendar]], None]
    planned: int = 0  # batches of an epoch that the module was given before the members were known; 0: it didn't ask
    _processed: int = 0

    def loader(self, member: Participant | None, trainer: Trainer, dataloader: object) -> object:
        """Return the loader with this worker's examples; for its first loader the worker joins the run."""
        if member is None:  # the module asks for the number of steps
            self.planned = batches_of(trainer, dataloader, self.weights)
            # Only the length of the loader is asked for.
            return dealt(trainer, dataloader, self.planned, lambda dealing: ().__iter__)
        # The loader's index among the combined loaders, also when they are loaded again.
        combined = trainer.fit_loop._combined_loader
        place = self._processed if combined is None else self._processed % len(combined.flattened)
        self._processed += 1
        if member.round < 0:
            self._join(member, trainer, dataloader)
        assert member.calendar is not None
        batches, weights = member.calendar.batches, member.calendar.weights
        if place and combined is None and batches != max(1, own := batches_of(trainer, dataloader, weights)):
            raise ValueError(
                f"loaders of {batches} and of {own} batches can't be combined in an elastic run, as both need one "
                "epoch length: give loaders of one length, or one loader of pairs"
            )
        deals = partial(member.deals, place=place)
        return dealt(trainer, dataloader, batches, deals, self.weight)

    def _join(self, member: Participant, trainer: Trainer, dataloader: Any) -> None:
        """Make this worker a member, and set its loops to the run's present round."""
        if member.seed is None:
            member.seed = int(dataloader.sampler.seed) if dealable(dataloader) else 0  # of the examples' order
        self.begin(lambda: self._calendar(member, trainer, dataloader))
        calendar = member.calendar = member.calendar or self._calendar(member, trainer, dataloader)
        assert member.view is not None
        own = self._calendar(member, trainer, dataloader) if member.view.number == 1 else calendar
        if (own.batches, own.accumulated) != (calendar.batches, calendar.accumulated):
            raise ValueError(
                f"an epoch of the oldest worker has {calendar.batches} batches, {calendar.accumulated} in a step, and "
                f"of this one {own.batches}, {own.accumulated} in a step: give every worker the same data and Trainer"
            )
        if self.planned and max(1, self.planned) != calendar.batches:
            raise ValueError(
                f"an epoch of this run has {calendar.batches} batches, and schedules here are for {self.planned}: give "
                "every worker the same Elastic(workers=...) and data"
            )
        if member.round or calendar.before or trainer.fit_loop.restarting:
            loops.go_to(trainer, calendar, member.round)

    def _calendar(self, member: Participant, trainer: Trainer, dataloader: object) -> Calendar:
        """Make the calendar of a run that begins now or resumes from a checkpoint."""
        weights = self.weights if self.planned else member.founders
        accumulated, loop = trainer.accumulate_grad_batches, trainer.fit_loop
        batches = batches_of(trainer, dataloader, weights)
        epoch: Any = loop.epoch_progress.current
        batch = loop.epoch_loop.batch_progress
        # A checkpoint saved after an epoch's last batch may or may not have counted that batch.
        begun = 0 if epoch.started == epoch.processed else batches if batch.is_last_batch else batch.current.completed
        rounds = -(-batches // accumulated)
        before = epoch.processed * rounds + min(rounds, -(-begun // accumulated))
        rounds_so_far = loop.epoch_loop._batches_that_stepped if loops.manual(trainer) else loop.epoch_loop.global_step
        return Calendar(max(1, batches), accumulated, before, rounds_so_far, weights)


def batches_of(trainer: Trainer, dataloader: Any, weights: int) -> int:
    """Return the number of batches of an epoch, after limit_train_batches."""
    found = sized_len(dataloader)
    batches = UNBOUNDED if found is None else found
    if dealable(dataloader):
        batches = -(-len(dataloader.dataset) // (weights * dataloader.batch_size))
    limit = trainer.limit_train_batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * (1.0 if limit is None else limit))


def refuse_combined(trainer: Trainer, calendar: Calendar) -> None:
    """Raise a ValueError if the combined loaders' epoch has another length than the run's epoch."""
    combined, batches = trainer.fit_loop._combined_loader, trainer.fit_loop.max_batches
    if combined is not None and len(combined.flattened) > 1 and batches != calendar.batches:
        raise ValueError(
            f"{len(combined.flattened)} loaders make an epoch of {batches} batches, but this elastic run's epoch has "
            f"{calendar.batches}: combine the loaders by mode='min_size' or 'max_size_cycle'"
        )


def dealable(dataloader: Any) -> bool:
    """Return whether Lightning would shard this loader among workers by a DistributedSampler."""
    return (
        type(getattr(dataloader, "sampler", None)) is DistributedSampler
        and getattr(dataloader, "batch_size", None) is not None
    )


def dealt(
    trainer: Trainer,
    dataloader: Any,
    batches: int,  # batches of an epoch
    dealing: Callable[[Dealing], Callable[[], Iterator[Any]]],  # makes the iterator over example indices
    weight: int = 1,  # multiple of the loader's batch size
) -> Any:
    """Return the loader with its examples dealt among the members; other loaders are returned unchanged."""
    if not dealable(dataloader):
        return dataloader
    before, batch = dataloader.sampler, dataloader.batch_size
    made = Dealing(len(dataloader.dataset), batch, before.shuffle, before.seed)
    limit = trainer.limit_train_batches
    share = 1.0 if limit is None or isinstance(limit, int) else limit
    if share > 0:  # Lightning takes its share of the loader's length: the smallest length that leaves `batches`
        batches = next(n for n in count(int(batches / share)) if int(n * share) >= batches)
    sampler = ElasticSampler(batches * batch * weight, dealing(made))
    found: Any = _update_dataloader(dataloader, sampler, mode=RunningStage.TRAINING)
    found.batch_sampler.batch_size = batch * weight
    return found


class ElasticSampler(Sampler[int]):
    """Sampler of example indices, from the run's present round to the end of its epoch."""

    def __init__(self, length: int, ticks: Callable[[], Iterator[Any]]) -> None:
        self._length, self._ticks = length, ticks

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        for places in self._ticks():
            yield from places.tolist()
