"""How far the workers are apart, as a number that all of them share."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan, sqrt
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.shared.compute.device import AsyncRead, beside
from lightning_decentral.shared.wire.pending import Pending


class Gauge:
    """The distance between the workers, known to all of them some steps after it was measured, and nobody waits.

    Args:
        lag: steps between measuring and reading; 0 measures nothing.
        total: starts to sum a tensor over the workers in place; None where it holds all workers'.

    Attributes:
        distance: what was read last, equal on all workers; nan before.
    """

    def __init__(self, lag: int, total: Callable[[Tensor], Pending] | None) -> None:
        self.distance = nan
        self._lag, self._total = lag, total
        self._told: deque[Callable[[], Tensor]] = deque()

    def tell(self, squares: Tensor) -> None:
        """(squared distance, squared norm) of this worker in this step; reads what was told `lag` steps before."""
        if not self._lag:
            return
        self._told.append(_summed(squares, self._total(squares)) if self._total else _known(squares))
        if len(self._told) > self._lag:
            distance, norm = self._told.popleft()().tolist()
            self.distance = sqrt(distance / norm) if norm else self.distance

    def state_dict(self) -> dict[str, Any]:
        """What was read, and what is under way, waited for."""
        sums = [told() for told in self._told]
        self._told = deque(map(_known, sums))
        return {"distance": self.distance, "told": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.distance = state["distance"]
        self._told = deque(map(_known, state["told"]))


def _summed(squares: Tensor, pending: Pending) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with beside(squares.device):  # the host waits for this sum, not for what the device has to do since
            pending.wait()
            return AsyncRead(squares).read()

    return read


def _known(squares: Tensor) -> Callable[[], Tensor]:
    return lambda: squares


@dataclass(frozen=True)
class Consensus:
    """absolute = sqrt((1/n) sum_i ||x_i - xbar||^2);  relative = absolute / ||xbar||."""

    absolute: float
    relative: float


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """sum_k ||t_k||^2 in float64, complex numbers as pairs; a scalar on the tensors' device."""
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return torch.stack([t.double().square().sum() for t in real]).sum()
