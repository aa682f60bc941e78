"""When rounds are launched and landed: buckets x combine x exchange."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isnan
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine, State, Turn
from lightning_decentral.gossip.wire.consensus import Gauge
from lightning_decentral.gossip.wire.exchange import Exchange, Land
from lightning_decentral.shared.compute.buckets import Matrix


class Flat(Protocol):
    """What a mixer mixes: `buckets.Bucket` on a worker, anything with a flat tensor in a simulation."""

    flat: Tensor

    def adopt(self) -> None:
        """See that the parameters are views of `flat`."""


@dataclass
class Flight:
    """One round between launch and landing, bucket by bucket; each of `lands` may be called once, what it returned is
    kept for a checkpoint."""

    round: int
    step: int
    sent: list[Tensor] = field(default_factory=list)
    lands: list[Land] = field(default_factory=list)


class Mixer:
    """Runs one exchange round per optimizer step, or as many as the rule asks for.

    After update t:   land the round launched after update t - delay;   launch round t.
    delay 0 (ATC)     x(t+1) = W (x + u)            launched and landed after the same update
    delay 1 (AWC)     x(t+1) = W x + u(x)           hidden behind a whole forward and backward
    delay k           x(t+1) = x + u(x) + rate (W - I) x(t-k+1)

    A rule that corrects the update itself (`Combine.adapt`) does so between landing and launch.

    Bucket by bucket: one is mixed and made ready to leave while the next is still on its way, so that the links rest
    for the last bucket's mixing at most and not for that of the whole model. When they leave is the exchange's affair,
    by `depart` at the latest: what went to a new neighbour long before the old one's message is complete would take the
    half of its link.

    Memory beyond the model: one copy of the message for every one in flight, the sent one and each heard one; and the
    rule's state.

    Args:
        buckets: the parameters; more may be appended while training (all workers in the same round).
        delay: rounds between launch and landing, at least 0.
        gauge: tells the rule how far the workers are apart; by default one for a simulation.

    Attributes:
        round: rounds taken so far.
        steps: steps taken so far.
        wanted: steps that the neighbours must have taken for the last landing.

    Source: the orders, Wang et al. 2410.11998, section 3; delayed mixing, `weights.largest_stable_rate`.
    """

    def __init__(
        self, buckets: Sequence[Flat], combine: Combine, exchange: Exchange, delay: int, gauge: Gauge | None = None
    ) -> None:
        self.buckets: list[Flat] = []
        self.round, self.steps = 0, 0
        self.wanted = 0
        self._idle = 0
        self._gauge = gauge or Gauge(combine.lag, None)
        self._squares: list[Tensor] = []
        self.exchange = exchange
        self._learning_rate, self._peak = 0.0, 0.0
        self._combine, self._delay = combine, delay
        self._states: list[State] = []
        self._flights: deque[Flight] = deque()
        self.extend(buckets)

    def extend(self, buckets: Sequence[Flat], matrices: Sequence[Sequence[Matrix]] | None = None) -> None:
        """Mix these too, from the next launch on. `matrices`: those in each bucket, for codecs that see them."""
        self.exchange.admit([b.flat for b in buckets], matrices or [()] * len(buckets), self._combine)
        self.buckets += buckets
        self._states += [self._combine.init(bucket.flat) for bucket in buckets]

    def step(self, learning_rate: float = 1.0) -> None:
        """One round, or as many as the rule wants. Call after the user's update, on every worker equally often.

        Args:
            learning_rate: of that update.
        """
        self._learning_rate, self._peak = learning_rate, max(self._peak, learning_rate)
        for bucket in self.buckets:
            bucket.adopt()
        rounds = self._combine.rounds(self._gauge.distance, self._idle)
        due, turn = self._due(self.round - self._delay), self.turn(self.round)
        leaving = self._leaving() if rounds else None
        for place, (bucket, state) in enumerate(zip(self.buckets, self._states, strict=True)):
            self._land(due, place)
            self._combine.adapt(bucket.flat, state, turn)
            self._launch(leaving, place)
        self.exchange.depart()
        for another in range(rounds):
            self._take_round(launched=not another)
        self._idle = 0 if rounds else self._idle + 1
        self.steps += 1
        self._measure()

    def _take_round(self, launched: bool) -> None:
        if not launched:
            due, leaving = self._due(self.round - self._delay), self._leaving()
            for place in range(len(self.buckets)):
                self._land(due, place)
                self._launch(leaving, place)
            self.exchange.depart()
        if not self._delay:
            self._land_until(self.round)
        self.round += 1

    def _measure(self) -> None:
        if self._combine.lag and self.buckets:
            nothing = torch.zeros(2, dtype=torch.float64, device=self.buckets[0].flat.device)
            self._gauge.tell(torch.stack([nothing, *self._squares]).sum(0))
            self._squares = []

    def drain(self) -> None:
        """Land all that is in flight."""
        self._land_until(self.round)

    def shares(self) -> list[Tensor]:
        """The rule's weight of this worker in the mean, by bucket; empty: all workers are equal."""
        shares = map(self._combine.share, self._states)
        return [share for share in shares if share is not None]

    def mixing(self) -> dict[str, float]:
        """What users watch: the rule's of the last round, and the distance that it was told last, if any."""
        told = {} if isnan(self._gauge.distance) else {"consensus_measured": self._gauge.distance}
        return {**self._combine.mixing(self.turn(max(0, self.round - 1))), **told}

    def turn(self, round: int) -> Turn:
        """What the rule may know of a round."""
        own, degree = partial(self.exchange.own, round), partial(self.exchange.degree, round)
        return Turn(round, self._learning_rate, self._peak, own, degree)

    def _leaving(self) -> Flight | None:
        """The round that is launched now, in flight from its first bucket on."""
        if not self.buckets or self.exchange.silent(self.round):
            return None
        self._flights.append(Flight(self.round, self.steps))
        return self._flights[-1]

    def _launch(self, flight: Flight | None, place: int) -> None:
        if flight is None:
            return
        x, state = self.buckets[place].flat, self._states[place]
        message = self._combine.message(x, state)
        sent = self.exchange.pool.take(message).copy_(message)
        flight.sent.append(sent)
        flight.lands.append(self.exchange.start([sent], flight.round, place))
        self._combine.launched(x, partial(self._settled, sent), state, self.turn(flight.round))

    def _settled(self, sent: Tensor) -> Tensor:
        self.exchange.settle()
        return sent

    def _due(self, last: int) -> list[Flight]:
        """Those launched in round `last` or before, no longer in flight."""
        due = []
        while self._flights and self._flights[0].round <= last:
            due.append(self._flights.popleft())
        return due

    def _land(self, due: Sequence[Flight], place: int) -> None:
        for flight in due:
            if place >= len(flight.lands):
                continue  # a bucket that was taken in after the launch
            self.wanted = flight.step + 1
            (mixed,), turn, sent = flight.lands[place](), self.turn(flight.round), flight.sent[place]
            if self._combine.lag:
                self._squares.append(self._combine.measure(sent, mixed, turn))
            self._combine.apply(self.buckets[place].flat, sent, mixed, self._states[place], turn)
            self.exchange.pool.give([sent, mixed])

    def _land_until(self, last: int) -> None:
        due = self._due(last)
        for place in range(len(self.buckets)):
            self._land(due, place)

    def state_dict(self) -> dict[str, Any]:
        """Round, rule states and every flight with what it brings. Waits for the wire, changes no parameter."""
        flights = []
        for flight in self._flights:
            mixed = [tensor for land in flight.lands for tensor in land()]
            flight.lands = list(map(_landed, mixed))
            flights.append({"round": flight.round, "step": flight.step, "sent": list(flight.sent), "mixed": mixed})
        return {
            "round": self.round,
            "steps": self.steps,
            "idle": self._idle,
            "gauge": self._gauge.state_dict(),
            "peak": self._peak,
            "states": [dict(state) for state in self._states],
            "flights": flights,
            "exchange": self.exchange.state_dict(),
            "elements": [bucket.flat.numel() for bucket in self.buckets],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: it was taken with other buckets.
        """
        elements = [bucket.flat.numel() for bucket in self.buckets]
        if state["elements"] != elements:
            raise ValueError(
                f"the checkpoint's messages have buckets of {state['elements']} elements, this run has {elements}: "
                "resume with the same version and bucket_bytes, or delete the checkpoint's .workers folder to start "
                "from the mean"
            )
        self.exchange.load_state_dict(state["exchange"])
        like = [bucket.flat for bucket in self.buckets]
        self.round, self.steps, self._idle, self._peak = (state[k] for k in ("round", "steps", "idle", "peak"))
        self._gauge.load_state_dict(state["gauge"])
        self._states = [{k: v.to(x.device) for k, v in s.items()} for s, x in zip(state["states"], like, strict=True)]
        self._flights = deque(
            Flight(f["round"], f["step"], _copies(f["sent"], like), list(map(_landed, _copies(f["mixed"], like))))
            for f in state["flights"]
        )


def _landed(mixed: Tensor) -> Land:
    return lambda: [mixed]


def _copies(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """A flight may be older than the last buckets, so it may be shorter than `like`."""
    return [tensor.to(x.device, copy=True) for tensor, x in zip(tensors, like, strict=False)]
