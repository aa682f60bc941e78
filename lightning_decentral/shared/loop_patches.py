"""Patches of Lightning's loops: where they would make workers wait for each other or leave one behind.

Each replacement is of one method on one instance, for the time of one `fit`. A version of Lightning without that
method gets a warning that says what is lost.
"""

import functools
import signal
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_decentral.shared.wire.agreement import RollCall, StopFlag

LOST = {
    "_broadcast_sigterm_tensor": "it may make workers wait for each other before every batch",
    "_sigterm_notifier_fn": "a SIGTERM may not reach every worker",
    "on_advance_end": "unequal numbers of batches may hang",
}


class LoopPatches:
    """Puts a flag that nobody waits for in place of Lightning's broadcast from worker 0 before every batch, makes a
    SIGTERM raise that flag, and calls the roll where an epoch ends.

    Args:
        forward_signal: hands a signal on to the processes that this one started.
    """

    def __init__(self, trainer: Trainer, stop: StopFlag, roll: RollCall, forward_signal: Callable[[int], None]) -> None:
        self._trainer, self._stop, self._roll, self._forward = trainer, stop, roll, forward_signal
        self._undo: list[Callable[[], None]] = []
        self._epoch_ended = False
        loop = trainer.fit_loop.epoch_loop
        self._replace(loop, "_broadcast_sigterm_tensor", self._stop_if_agreed)
        self._replace(trainer._signal_connector, "_sigterm_notifier_fn", self._on_sigterm)
        self._replace(loop, "on_advance_end", self._end_batch)
        self._replace(trainer.fit_loop, "on_advance_end", self._end_epoch)

    def restore(self) -> None:
        """Lightning's own methods again."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _replace(self, owner: Any, name: str, by: Callable[..., Any]) -> None:
        inner = getattr(owner, name, None)
        if inner is None:
            rank_zero_warn(f"this version of Lightning has no {type(owner).__name__}.{name}: {LOST[name]}")
            return
        setattr(owner, name, functools.partial(by, inner))
        self._undo.append(lambda: delattr(owner, name))

    def _stop_if_agreed(self, _: object) -> None:
        if self._stop.agreed:
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException(128 + signal.SIGTERM)  # with 0, a launcher that forked would wait for a result

    def _on_sigterm(self, _: object, signum: int, __: object) -> None:
        if not self._stop.raised:
            self._forward(signum)
        self._stop.raised = True

    def _end_batch(self, inner: Callable[[object], None], fetcher: object) -> None:
        if self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._call_roll()
        else:
            self._epoch_ended = False
        inner(fetcher)

    def _end_epoch(self, inner: Callable[[], None]) -> None:
        self._call_roll()
        self._epoch_ended = False
        inner()

    def _call_roll(self) -> None:
        if not self._epoch_ended:
            self._roll.end_epoch()
        self._epoch_ended = True
