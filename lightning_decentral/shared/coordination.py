"""Stops all workers and ends their epochs together (SIGTERM, Ctrl-C, unequal batches), though no step waits for all.

Where Lightning's own loops would make the workers wait for each other, or leave one behind, their methods are replaced
on the instance for the time of one fit (`LoopPatches`). A version of Lightning without such a method gets a warning
that names what is lost."""

import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_decentral.shared.updates import Updates
from lightning_decentral.shared.wire.agreement import RollCall, Uneven
from lightning_decentral.shared.wire.meeting import waits
from lightning_decentral.shared.wire.meeting.notices import Heartbeat
from lightning_decentral.shared.wire.meeting.stopping import StopAgreement
from lightning_decentral.shared.wire.meeting.waits import Backlog, Rescue, Wait, Waits
from lightning_decentral.shared.wire.pending import raise_lost
from lightning_decentral.shared.wire.transport import Wire, abort_nccl

if TYPE_CHECKING:
    import lightning_decentral.shared.setup_and_step as strategies

Result = TypeVar("Result")


class Uncoordinated:
    """Coordination of a single worker's fit, which waits for no other."""

    waiting: AbstractContextManager[Any] = nullcontext()  # for code besides Lightning's calls that may wait for others
    updating: AbstractContextManager[Any] = nullcontext()  # for the optimizer steps that the strategy takes

    @property
    def agreed(self) -> bool:
        """Return whether all workers have agreed to stop."""
        return False

    @property
    def rests(self) -> bool:
        """Return whether this worker's epoch is over while others still train."""
        return False

    def meet(self, call: Callable[[], Result]) -> Result:
        """Run a collective call of Lightning's and count it, so that a worker that waits alone in a call is found."""
        return call()

    def tick(self) -> None:
        """Count a round; the strategy calls this once in each round."""

    def close(self) -> None:
        """End the coordination with the fit."""


class FitCoordinator(Uncoordinated):
    """Coordinates one fit: agreement to stop, roll call at epoch ends, patched loops; a context for code that waits."""

    def __init__(
        self,
        wire: Wire,
        trainer: Trainer,
        strategy: "strategies.WorkersStrategy",  # the strategy whose rounds are coordinated
        stop: StopAgreement,  # of this fit
        heartbeat: Heartbeat,  # its thread polls the agreement
        name: str,  # of this fit, a different one for each fit
    ) -> None:
        self._strategy, self._met, self._open, self._calling = strategy, 0, True, False
        self._stop, self._heartbeat, self._rank = stop, heartbeat, wire.roll.rank
        self._since: float | None = None  # by the monotonic clock, a wait for others; None: this host waits for nobody
        self.waiting = self
        given = wire.roll, wire.store, strategy.rounds, strategy.wanted
        self._roll = RollCall(*given, self._take_part, lambda: self._met, name, stop.left_after)
        self._queued, self._backlog = wire.world.queued, Backlog(wire.world.queued)
        self._rescue = Rescue(heartbeat, self._backlog.since, abort_nccl, stop.patience_seconds)
        self.updating = self._updates = Updates(strategy)
        self._loops = LoopPatches(trainer, stop, self._roll, self._updates)
        self._waits = Waits(heartbeat.board, self._wait)
        heartbeat.listen(stop.look)
        heartbeat.listen(self._waits.look)

    agreed, rests = property(attrgetter("_stop.agreed")), property(attrgetter("_roll.rests"))

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = None

    def meet(self, call: Callable[[], Result]) -> Result:
        if not self._open:
            return call()  # the fit has ended: nobody answers a roll call
        self._met, self._calling = self._met + 1, True
        try:
            with self:
                return call()
        except RuntimeError as error:
            raise_lost(error, "the others", self._rank)
            raise
        finally:
            self._calling = False
            if self._queued:
                self._backlog.mark()

    def _wait(self) -> Wait | None:
        """This worker's wait for others where it has lasted for long; otherwise None."""
        if (since := self._since) is None or time.monotonic() - since < waits.LONG_SECONDS:
            return None
        return Wait(self._met, self._calling, self._heartbeat.phase())

    def tick(self) -> None:
        if self._queued:  # a host waits in the calls themselves
            self._backlog.mark()
            self._rescue.check()
        self._stop.tick()

    def _take_part(self, index: int) -> None:
        self._strategy.take_part(index)
        self.tick()  # as after an update

    def close(self) -> None:
        """Restore Lightning's own methods. `agreed` stays: how the fit ended decides who may still communicate."""
        if self._open:
            self._open = False
            self._heartbeat.forget(self._stop.look)
            self._heartbeat.forget(self._waits.look)
            self._rescue.close()
            self._roll.close()
            self._loops.restore()
            self._updates.close()


LOST = {
    "_broadcast_sigterm_tensor": "it may make workers wait for each other before every batch",
    "_sigterm_notifier_fn": "a SIGTERM may not reach every worker",
    "on_advance_end": "unequal numbers of batches may hang",
    "setup_data": "a worker without a batch isn't named",
}


class LoopPatches:
    """Replaces Lightning's broadcast from worker 0 before every batch by an agreement that no worker waits for. A
    SIGTERM or a first Ctrl-C asks all workers to stop; the roll is called where an epoch ends."""

    def __init__(self, trainer: Trainer, stop: StopAgreement, roll: RollCall, updates: Updates) -> None:
        self._trainer, self._stop, self._roll, self._updates = trainer, stop, roll, updates
        self._undo = ExitStack()
        self.restore = self._undo.close  # Lightning's own methods again
        self._epoch_ended = self._ended_one = self._took = False
        loop = trainer.fit_loop.epoch_loop
        self._undo.callback(setattr, loop, "max_steps", loop.max_steps)
        replaced: list[tuple[Any, str, Callable[..., Any]]] = [
            (loop, "_broadcast_sigterm_tensor", self._stop_if_agreed),
            (trainer._signal_connector, "_sigterm_notifier_fn", self._on_sigterm),
            (loop, "on_advance_end", self._end_batch),
            (trainer.fit_loop, "on_advance_end", self._end_epoch),
            (trainer.fit_loop, "setup_data", self._set_up_data),
        ]
        for owner, name, by in replaced:
            if (inner := getattr(owner, name, None)) is None:
                rank_zero_warn(f"this version of Lightning has no {type(owner).__name__}.{name}: {LOST[name]}")
                continue
            setattr(owner, name, partial(by, inner))
            self._undo.callback(delattr, owner, name)
        if threading.current_thread() is threading.main_thread():
            self._undo.callback(self._hand_back, signal.signal(signal.SIGINT, self._on_interrupt))

    def _hand_back(self, before: Any) -> None:
        if signal.getsignal(signal.SIGINT) == self._on_interrupt:  # else somebody else's: Lightning's, after a Ctrl-C
            signal.signal(signal.SIGINT, before)

    def _stop_if_agreed(self, _: object) -> None:
        if not self._stop.agreed:
            return
        self._stop.left(self._roll.rounds())
        if self._stop.signum == signal.SIGINT:
            raise KeyboardInterrupt
        self._trainer._signal_connector.received_sigterm = True
        raise SIGTERMException(128 + signal.SIGTERM)  # with 0, a launcher that forked would wait for a result

    def _on_sigterm(self, _: object, signum: int, __: object) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._stop.raised and launcher is not None:
            launcher.kill(signum)  # the processes that this one started
        self._stop.ask(signum)

    def _on_interrupt(self, signum: int, frame: object) -> None:
        if self._stop.raised == signum:
            signal.default_int_handler(signum, None)  # a second signal: this worker stops at once, wherever it is
        self._stop.ask(signum)
        rank_zero_info("all workers stop after the same step; another Ctrl-C stops this process at once")

    def _end_batch(self, inner: Callable[[Any], None], fetcher: Any) -> None:
        loop, self._took = self._trainer.fit_loop.epoch_loop, True
        # No batch follows: there is none, or this worker stops early, alone or with the others.
        early = self._trainer.should_stop and self._trainer.fit_loop._can_stop_early
        ends = loop.batch_progress.is_last_batch or early
        self._updates.moved.batch(last=ends)
        if ends:  # before `inner`, which may validate, where all workers meet
            self._call_roll(lambda: loop._should_check_val_fx(fetcher) and not loop._skip_next_val)
        else:
            self._epoch_ended = False
        inner(fetcher)

    def _set_up_data(self, inner: Callable[[], None]) -> None:
        loop = self._trainer.fit_loop
        before = loop._combined_loader
        try:
            inner()
        except RuntimeError as error:
            if "zero length" in str(error):  # Lightning's text, on this worker alone
                self._refuse_no_batch(error)
            raise
        # A module may allow no batches: Lightning then ends this worker's training alone, or all if none has a batch.
        if loop._combined_loader is not before and self._roll.anyone(loop.max_batches > 0)[0] and not loop.max_batches:
            self._refuse_no_batch()

    def _refuse_no_batch(self, cause: Exception | None = None) -> None:
        # Another worker can't be followed through a whole epoch: validation would begin on the others alone.
        raise ValueError(
            f"worker {self._trainer.global_rank} has no training batch: give every worker data, or take fewer workers, "
            "a smaller batch_size or drop_last=False"
        ) from cause

    def _end_epoch(self, inner: Callable[[], None]) -> None:
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        # Batches in all epochs: a stateful loader that is resumed at its end has none left for its first epoch.
        had = progress.current if self._ended_one else progress.total
        if not had.ready and not self._trainer.should_stop:
            self._refuse_no_batch()
        self._call_roll()  # does nothing where a batch was known to be the last
        self._epoch_ended, self._ended_one = False, True
        # In a resumed epoch Lightning would leave out a step of ReduceLROnPlateau, though its metrics are new.
        if self._took and self._trainer.fit_loop.restarting:
            # Not by the property's setter, which marks the next counter as restarted, too: an epoch would be left out.
            self._trainer.fit_loop._restarting = False
        inner()

    def _call_roll(self, validates: Callable[[], bool] = bool) -> None:
        """Agree at an epoch's end: all workers stop if one worker stops, and all validate if one validates."""
        if self._epoch_ended:
            return
        try:
            self._roll.end_epoch()
        except Uneven as error:
            if self._trainer.should_stop:
                raise error.of_early_end() from error
            raise
        self._stop_if_agreed(None)  # before a validation, in which those that stopped would be missing
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        stops = trainer.should_stop and trainer.fit_loop._can_stop_early
        ends = stops or (loop.max_steps != -1 and loop.global_step >= loop.max_steps)  # all steps taken
        trainer.should_stop, all_end = self._roll.anyone(trainer.should_stop, ends)
        if all_end and not ends:
            # This worker had fewer batches than another one, which is at max_steps, or past min_steps and ends early.
            loop.max_steps = trainer.global_step
        (validate,) = self._roll.anyone(mine := validates())
        if validate and not mine:
            self._validate()
        self._epoch_ended = True

    def _validate(self) -> None:
        """Validate as Lightning does after a batch: another worker validates now, though this one wouldn't."""
        trainer = self._trainer
        first = trainer._logger_connector._first_loop_iter
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = first
