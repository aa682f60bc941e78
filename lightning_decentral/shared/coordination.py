"""Stopping together and ending epochs together (SIGTERM, unequal batches) though no step waits for all workers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from lightning.pytorch import Trainer
from torch.optim import Optimizer

from lightning_decentral.shared.loop_patches import LoopPatches
from lightning_decentral.shared.registration import StepWatch
from lightning_decentral.shared.wire.agreement import RollCall, StopFlag
from lightning_decentral.shared.wire.transport import Wire

Result = TypeVar("Result")


class Rounds(Protocol):
    """What a strategy tells of its rounds, one number for each optimizer (`RollCall` says what they are for)."""

    def rounds(self) -> list[int]:
        """Rounds taken."""

    def wanted(self) -> list[int]:
        """Rounds that the others must have launched before this worker can go on."""

    def take_part(self, index: int) -> None:
        """Run one round of the optimizer with that index, without an update."""


class Uncoordinated:
    """Of a single worker: there is nobody to wait for.

    Attributes:
        waiting: around whatever may wait for other workers.
        updating: around the optimizer steps that the strategy takes.
    """

    waiting: AbstractContextManager[Any] = nullcontext()
    updating: AbstractContextManager[Any] = nullcontext()

    @property
    def agreed(self) -> bool:
        """Whether all workers know that they stop."""
        return False

    def meet(self, call: Callable[[], Result]) -> Result:
        """Run a collective call of Lightning's: counted, so that a worker that waits in one alone is found."""
        return call()

    def tick(self) -> None:
        """Once a round."""

    def close(self) -> None:
        """The fit has ended."""


class Coordination(Uncoordinated):
    """One fit's stop flag, roll call and patched loops.

    Args:
        of: whose rounds they are.
        sigterm_every: rounds between two looks whether some worker got a SIGTERM (read one interval later).
        forward_signal: hands a signal on to the processes that this one started.
        name: of this fit, another one for each.
    """

    def __init__(
        self,
        wire: Wire,
        trainer: Trainer,
        optimizers: Sequence[Optimizer],
        of: Rounds,
        *,
        sigterm_every: int,
        forward_signal: Callable[[int], None],
        name: str,
    ) -> None:
        self._of, self._met, self._open = of, 0, True
        self._stop = StopFlag(wire.flags, sigterm_every)
        self.waiting = self._roll = RollCall(
            wire.roll, wire.store, of.rounds, of.wanted, self._take_part, lambda: self._met, name
        )
        self.updating = self._steps = StepWatch(optimizers)
        self._loops = LoopPatches(trainer, self._stop, self._roll, forward_signal)

    @property
    def agreed(self) -> bool:
        return self._stop.agreed

    def meet(self, call: Callable[[], Result]) -> Result:
        if not self._open:
            return call()
        self._met += 1
        with self._roll:
            return call()

    def tick(self) -> None:
        self._stop.tick()

    def _take_part(self, index: int) -> None:
        self._of.take_part(index)
        if index == 0:  # as after an update of the first optimizer
            self._stop.tick()

    def close(self) -> None:
        """Lightning's own methods again. `agreed` stays: how the fit ended decides who may still meet."""
        if self._open:
            self._open = False
            self._roll.close()
            self._loops.restore()
            self._steps.close()
