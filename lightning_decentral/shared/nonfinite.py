"""Steps whose gradients hold NaN or infinity, where all workers take the same updates."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from lightning.fabric.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, isfinite
from torch.optim import Optimizer

from lightning_decentral.shared.compute.device import AsyncRead
from lightning_decentral.shared.compute.health import scale

NonFinite = Literal["stop", "skip"]


class Unchecked:
    """Gradients are each worker's own affair, or a loss scaler's.

    Attributes:
        nonfinite: what becomes of a step whose gradients hold NaN or infinity.
        skipped: steps taken without an update so far.
    """

    nonfinite: str = "stop"
    skipped = 0

    def after(self, closure: Callable[[], Any], optimizer: Optimizer, precision: Precision) -> Callable[[], Any]:
        """The closure, and behind it a judgement of its gradients, before the update."""
        return closure

    def of_step(self, given: dict[str, Any], optimizer: Optimizer, precision: Precision) -> dict[str, Any]:
        """Arguments that a user's loop gives `optimizer.step`: gradients are there already, or come by its closure."""
        if given.get("closure") is not None:
            return {**given, "closure": self.after(given["closure"], optimizer, precision)}
        self.after(_nothing, optimizer, precision)()
        return given


class BeforeUpdate(Unchecked):
    """Nothing is judged; `call` is given the optimizer once its gradients are there, before the update.

    What is thawed within the step is known by then, and no parameter has moved yet.
    """

    def __init__(self, call: Callable[[Optimizer], None]) -> None:
        self._call = call

    def after(self, closure: Callable[[], Any], optimizer: Optimizer, precision: Precision) -> Callable[[], Any]:
        def called() -> Any:
            output = closure()
            self._call(optimizer)
            return output

        return called


class GradientCheck(Unchecked):
    """Gradients that are equal on all workers are judged alike on all of them: nobody has to be asked, none waits.

    Args:
        nonfinite: "stop" raises a FloatingPointError on all workers: at once on the host, one step later on a device,
            which nobody waits for. "skip" takes the step without an update, and worker 0 reports it; a device is waited
            for.

        settle: given the optimizer once its gradients are there, before they are judged.

    Raises:
        ValueError: another value.
    """

    def __init__(self, nonfinite: NonFinite, settle: Callable[[Optimizer], None] | None = None) -> None:
        if nonfinite not in ("stop", "skip"):
            raise ValueError(f"nonfinite must be 'stop' or 'skip', got {nonfinite!r}")
        self.nonfinite, self._settle = nonfinite, settle
        self._last: AsyncRead | None = None

    def after(self, closure: Callable[[], Any], optimizer: Optimizer, precision: Precision) -> Callable[[], Any]:
        if self._settle is not None:
            closure = BeforeUpdate(self._settle).after(closure, optimizer, precision)
        # A scaler's first steps overflow, and it skips them by itself.
        return closure if getattr(precision, "scaler", None) else partial(self._judged, closure, optimizer)

    def _judged(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        output = closure()
        self._judge(optimizer)
        return output

    def _judge(self, optimizer: Optimizer) -> None:
        gradients = [_values(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not gradients:
            return
        found = AsyncRead(isfinite(scale(gradients)))
        if self.nonfinite == "skip":
            self._skip_unless(bool(found.read()), optimizer)
        elif found.on_host:
            _stop_unless(bool(found.read()))
        else:
            last, self._last = self._last, found
            _stop_unless(last is None or bool(last.read()))

    def _skip_unless(self, finite: bool, optimizer: Optimizer) -> None:
        if finite:
            return
        # Without gradients an optimizer leaves parameters and their state alone; zeros would still decay them.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self.skipped += 1
        rank_zero_warn(f"the gradients of a step hold NaN or infinity: no worker updates ({self.skipped} skipped)")


def _nothing() -> None:
    """The closure of a step whose gradients are there."""


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _stop_unless(finite: bool) -> None:
    if not finite:
        raise FloatingPointError(
            "the gradients hold NaN or infinity on all workers: lower the learning rate, clip gradients "
            "(gradient_clip_val), find the operation with detect_anomaly=True, or leave out such steps with "
            "nonfinite='skip'"
        )
