"""An elastic worker in Lightning's loops: a newcomer's counters and schedules, the examples that each is dealt."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DistributedSampler, Sampler

from lightning_decentral.elastic.plan.calendar import UNBOUNDED, Calendar, rounds_before
from lightning_decentral.elastic.plan.dealing import Dealing
from lightning_decentral.elastic.remembered import remember, remembered
from lightning_decentral.shared.wire.plain import NotPlain
from lightning_decentral.shared.wire.plain import pack as packed

NOTHING: dict[str, dict[str, Any]] = {"callbacks": {}, "plateaus": {}, "remembered": {"metrics": {}, "savers": {}}}
"""States of which nothing is to be restored."""
COUNTS = ("ready", "started", "processed", "completed")


def calendar_of(trainer: Trainer, dataloader: Any, weights: int) -> Calendar:
    """Calendar of a run that begins now, or goes on from a checkpoint, with members of so much weight together."""
    accumulated, loop = trainer.accumulate_grad_batches, trainer.fit_loop
    batches = batches_of(trainer, dataloader, weights)
    epoch: Any = loop.epoch_progress.current
    batch = loop.epoch_loop.batch_progress
    # Saved where an epoch's last batch was over, it may or may not have been counted.
    begun = 0 if epoch.started == epoch.processed else batches if batch.is_last_batch else batch.current.completed
    before = rounds_before(batches, accumulated, epoch.processed, begun)
    return Calendar(max(1, batches), accumulated, before, loop.epoch_loop.global_step, weights)


def batches_of(trainer: Trainer, dataloader: Any, weights: int) -> int:
    """Number of batches of an epoch, as limit_train_batches leaves them."""
    found = sized_len(dataloader)
    batches = UNBOUNDED if found is None else found
    if dealable(dataloader):
        batches = -(-len(dataloader.dataset) // (weights * dataloader.batch_size))
    limit = trainer.limit_train_batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * (1.0 if limit is None else limit))


def _unlimited(trainer: Trainer, batches: int) -> int:
    """The fewest of which limit_train_batches leaves so many: Lightning takes its share of what it is given."""
    limit = trainer.limit_train_batches
    share = 1.0 if limit is None or isinstance(limit, int) else limit
    return next(n for n in count(int(batches / share)) if int(n * share) >= batches) if share > 0 else batches


def refuse_others(parameters: Sequence[Any]) -> None:
    """RuntimeError where an optimizer has lost parameters that it had."""
    raise RuntimeError(
        f"an optimizer has lost some of its {len(parameters)} parameters while training, which members mix on: keep "
        "them in its groups (freeze them with requires_grad_(False)), or train without elastic"
    )


def refuse_unplanned(batches: int, calendar: Calendar) -> None:
    """ValueError where schedules were made for epochs of another length than the run's; 0: they weren't."""
    if batches and max(1, batches) != calendar.batches:
        raise ValueError(
            f"an epoch of this run has {calendar.batches} batches, and schedules here are for {batches}: give every "
            "worker the same Elastic(workers=...) and data"
        )


def refuse_other_calendar(own: Calendar, calendar: Calendar) -> None:
    """ValueError where this worker's data would make epochs of another length than the oldest's."""
    if (own.batches, own.accumulated) != (calendar.batches, calendar.accumulated):
        raise ValueError(
            f"an epoch of the oldest worker has {calendar.batches} batches, {calendar.accumulated} in a step, and of "
            f"this one {own.batches}, {own.accumulated} in a step: give every worker the same data and Trainer"
        )


def refuse_several_lengths(batches: int, calendar: Calendar) -> None:
    """ValueError for a further loader that would make epochs of another length than the first."""
    if max(1, batches) != calendar.batches:
        raise ValueError(
            f"loaders of {calendar.batches} and of {batches} batches don't go together in an elastic run, whose epochs "
            "have one length: give loaders of one length, or one loader of pairs"
        )


def refuse_combined(trainer: Trainer, calendar: Calendar) -> None:
    """ValueError where loaders are combined to an epoch of another length than each of them has."""
    combined, batches = trainer.fit_loop._combined_loader, trainer.fit_loop.max_batches
    if combined is not None and len(combined.flattened) > 1 and batches != calendar.batches:
        raise ValueError(
            f"{len(combined.flattened)} loaders make an epoch of {batches} batches, and an elastic run's has "
            f"{calendar.batches}: combine them by mode='min_size' or 'max_size_cycle'"
        )


def dealable(dataloader: Any) -> bool:
    """Return whether its examples are those that Lightning would give to each of several workers."""
    return (
        type(getattr(dataloader, "sampler", None)) is DistributedSampler
        and getattr(dataloader, "batch_size", None) is not None
    )


def seed_of(dataloader: Any) -> int:
    """Seed of the order of its examples."""
    return int(dataloader.sampler.seed) if dealable(dataloader) else 0


def dealt(
    trainer: Trainer,
    dataloader: Any,
    batches: int,
    dealing: Callable[[Dealing], Callable[[], Iterator[Any]]],
    weight: int = 1,
) -> Any:
    """The same loader, whose examples are dealt among the members; any other is left as it is.

    Args:
        batches: of an epoch.
        dealing: of whom it gets each batch's places.
        weight: its batches have so many times the examples.
    """
    if not dealable(dataloader):
        return dataloader
    before, batch = dataloader.sampler, dataloader.batch_size
    made = Dealing(len(dataloader.dataset), batch, before.shuffle, before.seed)
    sampler = ElasticSampler(_unlimited(trainer, batches) * batch * weight, dealing(made))
    found: Any = _update_dataloader(dataloader, sampler, mode=RunningStage.TRAINING)
    found.batch_sampler.batch_size = batch * weight
    return found


def nobody(dealing: Dealing) -> Callable[[], Iterator[Any]]:
    """Deals nothing: for a loader whose length alone is asked for."""
    return ().__iter__


class ElasticSampler(Sampler[int]):
    """Places of examples, from where the run is to the end of its epoch."""

    def __init__(self, length: int, ticks: Callable[[], Iterator[Any]]) -> None:
        self._length, self._ticks = length, ticks

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        for places in self._ticks():
            yield from places.tolist()


@contextmanager
def scaled(optimizer: Optimizer, share: float) -> Iterator[None]:
    """Make its updates so many times as large, whatever it makes of gradients: they are multiples of the rate."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * share if share != 1 else rate
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def go_to(trainer: Trainer, calendar: Calendar, round: int) -> None:
    """Counters and schedules are at the beginning of this round. The epoch has not begun in this process."""
    loop = trainer.fit_loop
    counted: Any = loop.epoch_progress
    steps, epochs = loop.epoch_loop.global_step, counted.current.processed
    epoch, batch = calendar.place(round)
    step = calendar.step(round)
    loop.restarting = batch > 0
    for counts in (counted.current, counted.total):
        for name, value in zip(COUNTS, [epoch + (batch > 0)] * 2 + [epoch] * 2, strict=True):
            setattr(counts, name, value)
    progress = loop.epoch_loop.batch_progress
    progress.is_last_batch = False
    for counts, value in ((progress.current, batch), (progress.total, epoch * calendar.batches + batch)):
        for name in COUNTS:
            setattr(counts, name, value)
    taken = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    taken.ready = taken.completed = step
    _catch_up(trainer, steps, step, epochs, epoch)


def last_to_leave_for(trainer: Trainer, calendar: Calendar, round: int) -> int:
    """The last round that may be gone on in from this one: behind it all validate, or the epoch ends."""
    _, begun = calendar.place(round)
    check, batches = trainer.val_check_batch, calendar.batches
    interval = int(check) if check is not None and 0 < check < batches else batches
    ends = min(batches, -(-(begun + 1) // interval) * interval)
    return round + (ends - begun - 1) // calendar.accumulated


def leave_out(trainer: Trainer, calendar: Calendar, round: int, rounds: int) -> None:
    """Count so many rounds before this one, in the same epoch, as if they had been; its first batch is drawn."""
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    batches, steps = rounds * calendar.accumulated, loop.global_step
    for counts in (loop.batch_progress.current, loop.batch_progress.total):
        for name in COUNTS:
            setattr(counts, name, getattr(counts, name) + batches)
    fetcher: Any = fit._data_fetcher
    fetcher.fetched += batches
    if fetcher.length is not None:
        fetcher.done = loop.batch_progress.is_last_batch = fetcher.fetched >= fetcher.length
    taken = loop.automatic_optimization.optim_progress.optimizer.step.total
    taken.ready, taken.completed = taken.ready + rounds, taken.completed + rounds
    loop._batches_that_stepped += rounds
    epoch = calendar.place(round)[0]
    _catch_up(trainer, steps, steps + rounds, epoch, epoch)


def _catch_up(trainer: Trainer, steps: int, step: int, epochs: int, epoch: int) -> None:
    for config in trainer.lr_scheduler_configs:
        before, now = (steps, step) if config.interval == "step" else (epochs, epoch)
        if not isinstance(config.scheduler, ReduceLROnPlateau):
            for _ in range(now // config.frequency - before // config.frequency):
                config.scheduler.step()


def count_logged(trainer: Trainer, step: int) -> None:
    """Log what comes next under this step: Lightning counts a restart within an epoch as one."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def copied(states: dict[str, Any]) -> dict[str, Any]:
    """Copy the states that can be sent, as they are now, to the host."""
    cloned = apply_to_collection(states, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))
    return {name: state for name, state in cloned.items() if plain(name, state)}


def plain(name: str, value: Any) -> bool:
    """Return whether it can be sent."""
    try:
        packed(value)
    except NotPlain as error:
        if name:
            rank_zero_warn(f"a newcomer doesn't get {name!r} of the checkpoint: {error}")
        return False
    return True


def agreed_states(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """States of callbacks, by their keys, and of schedules that follow a metric, by their place. All members must
    decide alike what these decide: who stops, what is the best so far, whether the rate falls."""
    plateaus = {str(place): of.scheduler.state_dict() for place, of in _plateaus(trainer).items()}
    callbacks = copied(call._call_callbacks_state_dict(trainer))
    return {"callbacks": callbacks, "plateaus": copied(plateaus), "remembered": remembered(trainer)}


def restored(trainer: Trainer, states: dict[str, dict[str, Any]]) -> None:
    """Callbacks and schedules are as those were."""
    call._call_callbacks_load_state_dict(trainer, {"callbacks": states["callbacks"]})
    remember(trainer, states["remembered"])
    plateaus = _plateaus(trainer)
    for place, state in states["plateaus"].items():
        scheduler = plateaus[int(place)].scheduler
        scheduler.load_state_dict(state)
        for group, rate in zip(scheduler.optimizer.param_groups, state["_last_lr"], strict=True):
            group["lr"] = rate


def _plateaus(trainer: Trainer) -> dict[int, Any]:
    configs = dict(enumerate(trainer.lr_scheduler_configs))
    return {place: config for place, config in configs.items() if isinstance(config.scheduler, ReduceLROnPlateau)}


def take(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Restore model, data and callbacks; Lightning restores the rest of it: loops, optimizers, schedules."""
    connector = trainer._checkpoint_connector
    connector._loaded_checkpoint = checkpoint
    connector.restore_model()
    connector.restore_datamodule()
    connector.restore_callbacks()
