"""Lightning's loops in an elastic worker: a newcomer's counters and schedules, and states that all members share.

Lightning's checkpoints lack some of these states: attributes of callbacks that save, and logged metrics. Without them
a newcomer would save at other steps than the members, although all must compute the mean at the same step. Hence
`metrics` and `savers` of `agreed_states`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_decentral.elastic.plan.dealing import Calendar
from lightning_decentral.shared.evaluation import callbacks_of
from lightning_decentral.shared.plan.described import constructed
from lightning_decentral.shared.settings import PLACES
from lightning_decentral.shared.wire.plain import NotPlain, pack

NOTHING: dict[str, Any] = {"callbacks": {}, "plateaus": {}, "metrics": {}, "savers": [], "manual": None}
"""States from which `restored` restores nothing."""
PLAIN = (type(None), bool, int, float, str)
COUNTS = ("ready", "started", "processed", "completed")


def refuse_others(parameters: Sequence[Any]) -> None:
    """Raise the RuntimeError for an optimizer that has lost parameters during training."""
    raise RuntimeError(
        f"an optimizer has lost some of its {len(parameters)} parameters during training, but members mix them: keep "
        "them in its groups (freeze them with requires_grad_(False)), or train without elastic"
    )


@contextmanager
def scaled(optimizer: Optimizer, share: float) -> Iterator[None]:
    """Scale the optimizer's updates by `share`, by scaling its learning rates during the step."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * share if share != 1 else rate
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def go_to(trainer: Trainer, calendar: Calendar, round: int) -> None:
    """Set counters and learning rate schedules to the beginning of this round, before this process begins an epoch."""
    loop = trainer.fit_loop
    counted: Any = loop.epoch_progress
    steps, epochs = loop.epoch_loop.global_step, counted.current.processed
    epoch, batch = calendar.place(round)
    step = calendar.step(round)
    loop.restarting = batch > 0
    for counts in (counted.current, counted.total):
        vars(counts).update(zip(COUNTS, [epoch + (batch > 0)] * 2 + [epoch] * 2, strict=True))
    progress = loop.epoch_loop.batch_progress
    progress.is_last_batch = False
    for counts, value in ((progress.current, batch), (progress.total, epoch * calendar.batches + batch)):
        vars(counts).update(dict.fromkeys(COUNTS, value))
    taken = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    taken.ready = taken.completed = step
    _catch_up(trainer, steps, step, epochs, epoch)


def last_to_leave_for(trainer: Trainer, calendar: Calendar, round: int) -> int:
    """Return the last round to which a late worker may skip: after it all validate, or the epoch ends."""
    _, begun = calendar.place(round)
    check, batches = trainer.val_check_batch, calendar.batches
    interval = int(check) if check is not None and 0 < check < batches else batches
    ends = min(batches, -(-(begun + 1) // interval) * interval)
    return round + (ends - begun - 1) // calendar.accumulated


def leave_out(trainer: Trainer, calendar: Calendar, round: int, rounds: int) -> None:
    """Count `rounds` skipped rounds before this one in the same epoch; this round's first batch is already drawn."""
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    batches, steps = rounds * calendar.accumulated, loop.global_step
    for counts in (loop.batch_progress.current, loop.batch_progress.total):
        vars(counts).update({name: getattr(counts, name) + batches for name in COUNTS})
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
    for config in () if manual(trainer) else trainer.lr_scheduler_configs:
        before, now = (steps, step) if config.interval == "step" else (epochs, epoch)
        if not isinstance(config.scheduler, ReduceLROnPlateau):
            for _ in range(now // config.frequency - before // config.frequency):
                config.scheduler.step()


def copied(states: dict[str, Any]) -> dict[str, Any]:
    """Copy to the host the states that can be sent."""
    return {name: state for name, state in _on_host(states).items() if plain(name, state)}


def _on_host(states: dict[str, Any]) -> Any:
    return apply_to_collection(states, Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))


def plain(name: str, value: Any) -> bool:
    """Return whether the value can be sent; warn if it can't and has a name."""
    try:
        pack(value)
    except NotPlain as error:
        if name:
            rank_zero_warn(f"a new worker doesn't receive {name!r} of the checkpoint: {error}")
        return False
    return True


def agreed_states(trainer: Trainer) -> dict[str, Any]:
    """Return states by which all members must decide alike: callbacks' states by key, ReduceLROnPlateau schedules by
    index, logged metrics by name, and attributes of callbacks that save. They decide when to stop, which checkpoint is
    the best, whether the learning rate falls, and when a mean is saved. Under manual optimization all schedules, and
    the number of steps, are the module's own."""
    return {
        "callbacks": copied(call._call_callbacks_state_dict(trainer)),
        "plateaus": copied({str(at): config.scheduler.state_dict() for at, config in _plateaus(trainer).items()}),
        "metrics": _on_host(dict(trainer.callback_metrics)),
        "savers": [*map(_own_of, _savers(trainer))],
        "manual": trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total.completed,
    }


def restored(trainer: Trainer, states: dict[str, Any]) -> None:
    """Restore the states of callbacks and schedules, and metrics that this worker hasn't logged yet."""
    call._call_callbacks_load_state_dict(trainer, {"callbacks": states["callbacks"]})
    known = trainer._logger_connector._callback_metrics
    for name, metric in states["metrics"].items():
        known.setdefault(name, metric.to(trainer.strategy.root_device) if isinstance(metric, Tensor) else metric)
    for saver, given in zip(_savers(trainer), states["savers"], strict=False):
        vars(saver).update({name: value for name, value in given.items() if name in _own_of(saver)})
    steps = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
    steps.ready = steps.completed = states["manual"] or steps.completed
    plateaus = _plateaus(trainer)
    for place, state in states["plateaus"].items():
        scheduler = plateaus[int(place)].scheduler
        scheduler.load_state_dict(state)
        for group, rate in zip(scheduler.optimizer.param_groups, state["_last_lr"], strict=True):
            group["lr"] = rate


def _plateaus(trainer: Trainer) -> dict[int, Any]:
    found, every = enumerate(trainer.lr_scheduler_configs), manual(trainer)
    return {place: config for place, config in found if every or isinstance(config.scheduler, ReduceLROnPlateau)}


def manual(trainer: Trainer) -> bool:
    """Return whether the module steps its optimizers and schedules by itself."""
    module = trainer.lightning_module
    return module is not None and not module.automatic_optimization


def _savers(trainer: Trainer) -> list[Callback]:
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, Checkpoint)]


def _own_of(callback: Callback) -> dict[str, Any]:
    """Return a callback's plain attributes, except constructor arguments and paths, which may differ among workers."""
    given = constructed(callback, type(callback).__mro__[:-1])
    own = {*given, *(f"_{name}" for name in given), *PLACES}
    return {name: value for name, value in vars(callback).items() if name not in own and isinstance(value, PLAIN)}
