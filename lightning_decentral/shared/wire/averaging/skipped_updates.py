"""Updates that a loss scaler or a check for NaN skips, and gradients that come at another scale after them.

What was rounded away is kept as it was before an update that isn't taken, and in the units of the gradients to come. A
scaler's factor falls exactly where it skips; it is read one step later, so that no device is waited for.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.shared.compute.device import AsyncRead
from lightning_decentral.shared.wire.averaging.residuals import Residuals

Keys = Callable[[], Collection[int]]


def scale_of(scaler: Any, device: torch.device) -> Callable[[], Tensor] | None:
    """Factor that multiplies the loss now, on the scaler's device; None without a scaler."""
    return None if scaler is None else lambda: scaler.scale(torch.ones((), device=device))


class SkippedUpdates:
    """Skipped updates of what one compressed mean has averaged.

    Args:
        residuals: of the mean.
    """

    def __init__(self, residuals: Residuals) -> None:
        self._residuals = residuals
        self._scale: Callable[[], Tensor] | None = None
        self._scaled = True
        self._unit, self._known = 0.0, False  # the scale of what was rounded away; 0 before the first
        self._open: list[tuple[Keys, AsyncRead]] = []
        self._any = False

    def guard(self, scale: Callable[[], Tensor] | None, scaled: bool = True) -> None:
        """Expect updates to be skipped from now on, by a scaler or otherwise.

        Args:
            scaled: whether gradients come multiplied by the scale.
        """
        self._residuals.guarded, self._scale, self._scaled = True, scale, scaled

    def updated(self, keys: Keys, skipped: bool) -> None:
        """An update of the tensors with these keys was due; `skipped`: it was found out at once that there is none."""
        if not self._residuals.guarded:
            self._residuals.guarded = skipped  # the first one of a run that nobody expected any in
            return
        self._any = True
        if skipped:
            self._residuals.withdraw(keys())
        if self._scale is not None:
            self._open.append((keys, AsyncRead(self._scale())))

    def settle(self) -> None:
        """Take or withdraw what the last mean has averaged, before the next."""
        if self._scale is not None and not self._known:
            self._come_at(float(self._scale()))
            self._known = True
        if self._any:
            self._any = False
            self.settle_scales()
            self._residuals.updated()

    def settle_scales(self) -> None:
        """Withdraw what a scaler has skipped; what waits for its update goes on waiting."""
        reads, self._open = self._open, []
        last = self._unit
        for keys, read in reads:
            before, last = last, float(read.read())
            if last < before:
                self._residuals.withdraw(keys())
        self._come_at(last)

    def _come_at(self, scale: float) -> None:
        if self._scaled and self._unit not in (0.0, scale):
            self._residuals.rescale(scale / self._unit)
        self._unit = scale

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self._unit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Residuals of a file come in its own units; the scaler is restored after them."""
        self._open, self._any, self._known = [], False, False
        self._unit = state.get("scale", 0.0)
