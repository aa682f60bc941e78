"""Consensus error of the workers: measured late, without waiting, by a mixer that counts rounds by it, or at once."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import isnan, nan, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine, Rule, State, Turn
from lightning_decentral.gossip.wire.exchange import Exchange
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.shared.compute.device import AsyncRead, own_stream
from lightning_decentral.shared.compute.health import squared_norm
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Transport

if TYPE_CHECKING:
    from lightning_decentral.gossip.compute.combine.consensus_control import ConsensusControl

Meeting = Callable[[], Transport | None]


def mixer_of(combine: Rule, exchange: Exchange[Any], delay: int, meeting: Meeting) -> Mixer:
    """Make the mixer of a rule, without buckets yet. `meeting` makes a process group of all workers, for sums over
    workers; None in a simulation."""
    if isinstance(combine, Combine):
        return Mixer([], combine, exchange, delay)
    from lightning_decentral.gossip.compute.combine.consensus_control import ConsensusControl  # few runs count rounds

    assert isinstance(combine, ConsensusControl)
    over = meeting()
    return ControlledMixer(combine, exchange, delay, Gauge(combine.lag, over.all_reduce if over else None))


class ControlledMixer(Mixer):
    """Mixer that takes as many rounds per step as `ConsensusControl` decides, and measures theta when mixing."""

    def __init__(self, control: "ConsensusControl", exchange: Exchange[Any], delay: int, gauge: "Gauge") -> None:
        super().__init__([], control.inner, exchange, delay)
        self._control, self._gauge, self._idle = control, gauge, 0
        self._squares: list[Tensor] = []
        self._correct, self._rate = self._measured, lambda turn: None  # a measurement needs the mixture

    def step(self, learning_rate: float = 1.0, rounds: int = 1) -> None:
        # By a distance that is equal on all workers, so that they take equally many rounds.
        rounds = self._control.rounds(self._gauge.distance, self._idle)
        super().step(learning_rate, rounds)
        self._idle = 0 if rounds else self._idle + 1
        if self.buckets:
            # Zeros if nothing was mixed: the sums of all workers must pair, step by step.
            nothing = torch.zeros(2, dtype=torch.float64, device=self.buckets[0].flat.device)
            self._gauge.report(torch.stack([nothing, *self._squares]).sum(0))
            self._squares = []

    def _measured(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        self._squares.append(self._control.measure(sent, mixed, turn))
        self._combine.apply(x, sent, mixed, state, turn)

    def mixing(self) -> dict[str, float]:
        measured = {} if isnan(self._gauge.distance) else {"consensus_measured": self._gauge.distance}
        return {**super().mixing(), "consensus_target": self._control.target, **measured}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "idle": self._idle, "gauge": self._gauge.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._idle = state["idle"]
        self._gauge.load_state_dict(state["gauge"])


class Gauge:
    """Sums the measured distance over all workers, and reads the sum `lag` steps later, without waiting. `total` starts
    the in-place sum of a tensor over the workers; None in a simulation."""

    def __init__(self, lag: int, total: Callable[[Tensor], Pending] | None) -> None:
        self.distance = nan  # last distance read, equal on all workers; nan before the first
        self._lag, self._total = lag, total
        self._reported: deque[Callable[[], Tensor]] = deque()

    def report(self, squares: Tensor) -> None:
        """Add (squared distance, squared norm) of this worker in this step; read the sums of `lag` steps before."""
        self._reported.append(partial(_summed, squares, self._total and self._total(squares)))
        if len(self._reported) > self._lag:
            distance, norm = self._reported.popleft()().tolist()
            # A norm of 0: no worker mixed in that step.
            self.distance = sqrt(distance / norm) if norm else self.distance

    def state_dict(self) -> dict[str, Any]:
        """State to save: the distance as last read, and the results of the sums in flight."""
        sums = [summed() for summed in self._reported]
        self._reported = deque(partial(_summed, squares) for squares in sums)
        return {"distance": self.distance, "told": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.distance = state["distance"]
        self._reported = deque(partial(_summed, squares) for squares in state["told"])


def _summed(squares: Tensor, pending: Pending | None = None) -> Tensor:
    if pending is None:
        return squares
    with own_stream(squares.device):  # the host waits for this sum only, not for later work of the device
        pending.wait()
        return AsyncRead(squares).read()


@dataclass(frozen=True)
class Consensus:
    """Consensus error: absolute = sqrt((1/n) sum_i ||x_i - xbar||^2), relative = absolute / ||xbar||."""

    absolute: float
    relative: float


def spread(
    own: Sequence[Tensor], means: Sequence[Tensor], mean_of: Callable[[Sequence[Tensor]], list[Tensor]], shards: int
) -> Consensus:
    """Consensus error of the workers, from this worker's tensors and their means. Collective. Means are over devices,
    each of which has 1 / shards of its worker's tensors."""
    squares = [squared_norm([a - b for a, b in zip(own, means, strict=True)]), squared_norm(means)]
    distance, norm = (shards * square for square in mean_of(squares))
    return Consensus(float(distance.sqrt()), float((distance / norm.clamp(min=1e-300)).sqrt()))
