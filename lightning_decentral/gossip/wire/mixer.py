"""Mixer: when rounds of gossip are launched and landed, bucket by bucket: buckets x combine x exchange."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.combine.rule import State, Turn
from lightning_decentral.gossip.compute.healing import Healing
from lightning_decentral.gossip.compute.integrity import Sick
from lightning_decentral.gossip.wire.exchange import Brought, Copied, Exchange, Landed, Number, Started, brought, kept
from lightning_decentral.gossip.wire.flight import Flight

T = TypeVar("T")
MeanOfSound = Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], str]]


class Flat(Protocol):
    """What a mixer mixes: `buckets.Bucket` on a worker, anything with a flat tensor in a simulation."""

    flat: Tensor

    def adopt(self) -> None:
        """See that the parameters are views of `flat`."""


class Mixer:
    """Runs one exchange round per optimizer step.

    After update t:   land the round launched after update t - delay;   launch round t.
    delay 0 (ATC)     x(t+1) = W (x + u)            launched and landed after the same update
    delay 1 (AWC)     x(t+1) = W x + u(x)           hidden behind a whole forward and backward
    delay k           x(t+1) = x + u(x) + rate (W - I) x(t-k+1)

    Memory beyond the model: one copy of the message for every one in flight, the sent one and each heard one; and the
    rule's state.

    Args:
        buckets: the parameters; more may be appended while training (all workers in the same round).
        delay: rounds between launch and landing, at least 0.

    Attributes:
        round: rounds taken so far.
        steps: steps taken so far.
        wanted: steps that the neighbours must have taken for the last landing.
        healing: what happens where this worker's own message was refused.

    Source: the orders, Wang et al. 2410.11998, section 3; delayed mixing, `stability.largest_stable_rate`.
    """

    def __init__(self, buckets: Sequence[Flat], combine: Combine, exchange: Exchange[Any], delay: int) -> None:
        self.buckets: list[Flat] = []
        self.round, self.steps = 0, 0
        self.wanted = 0
        self.exchange = exchange
        self.healing = Healing()
        self._learning_rate, self._peak = 0.0, 0.0
        self._combine, self._delay = combine, delay
        self._correct = combine.apply
        rule = type(combine)
        # Whether x as it was corrected is what leaves next: then one pass corrects and copies.
        self._sends_x = rule.adapt is Combine.adapt and rule.message is Combine.message
        self._keeps_left = exchange.coder.encodes and rule.encoded is not Combine.encoded
        self._states: list[State] = []
        self._flights: deque[Flight] = deque()
        self.extend(buckets)

    def extend(self, buckets: Sequence[Flat]) -> None:
        """Mix these too, from the next launch on."""
        self.exchange.admit([b.flat for b in buckets], self._combine)
        self.buckets += buckets
        self._states += [self._combine.init(bucket.flat) for bucket in buckets]

    def step(self, learning_rate: float = 1.0, rounds: int = 1) -> None:
        """Call after the user's update, on every worker equally often.

        Args:
            learning_rate: of that update.
            rounds: to take; those beyond the first block, there is nothing to hide them behind.
        """
        self._learning_rate, self._peak = learning_rate, max(self._peak, learning_rate)
        for nth in range(max(1, rounds)):
            turn = self.turn(self.round)
            due, leaving = self._due(self.round - self._delay), self._leaving() if rounds else None
            # The user's code may have given a parameter another storage.
            for bucket in self.buckets:
                bucket.adopt()
            # Bucket by bucket: one is mixed and made ready to leave while the next is still on its way, so that
            # the links rest for the last bucket's mixing at most and not for that of the whole model.
            for place, (bucket, state) in enumerate(zip(self.buckets, self._states, strict=True)):
                copied = self._land(due, place, leaving)
                if not nth:  # it corrects an update, of which there is one in a step
                    self._combine.adapt(bucket.flat, state, turn)
                if leaving:
                    self._launch(leaving, place, self._combine.message(bucket.flat, state), turn, copied)
            if rounds:
                if not self._delay:
                    self._land_until(self.round)
                self.round += 1
        self.steps += 1

    def drain(self) -> None:
        """Land all that is in flight."""
        self._land_until(self.round)

    def restart(self, mean: MeanOfSound) -> None:
        """A step without a round: every worker becomes the mean of all, and the rule begins anew from there.

        Args:
            mean: (of flat tensors over the sound workers, why this one isn't sound or nothing); collective.

        Raises:
            FloatingPointError: this worker isn't sound, and has been healed as often as it may.
        """
        for bucket in self.buckets:
            bucket.adopt()
        self.wanted = self.steps + 1
        means, complaint = mean([bucket.flat for bucket in self.buckets])
        if complaint:
            self.healing.healed_by_mean(complaint, self.round)
        for bucket, value in zip(self.buckets, means, strict=True):
            bucket.flat.copy_(value)
        self._states = [self._combine.init(bucket.flat) for bucket in self.buckets]
        self.round, self.steps = self.round + 1, self.steps + 1

    def shown(self) -> list[Tensor]:
        """What is evaluated in the place of each bucket; empty: the parameters themselves."""
        shown = map(self._combine.shown, self._states)
        return [tensor for tensor in shown if tensor is not None]

    def shares(self) -> list[Tensor]:
        """The rule's weight of this worker in the mean, by bucket; empty: all workers are equal."""
        shares = map(self._combine.share, self._states)
        return [share for share in shares if share is not None]

    def mixing(self) -> dict[str, float]:
        """What users watch of the last round: only what the rule has."""
        return self._combine.mixing(self.turn(max(0, self.round - 1)))

    def codec_errors(self) -> list[float]:
        """What codecs lost, as last measured; nothing where messages travel as they are."""
        coder = self.exchange.coder
        for flight in self._flights if coder.encodes else ():  # elsewhere nobody waits to hear that
            for started in flight.started:
                started.settle()
        error = coder.error()
        return [] if error is None else [error]

    def turn(self, round: int) -> Turn:
        """What the rule may know of a round."""
        return Turn(round, self._learning_rate, self._peak, partial(self._own, round), partial(self._degree, round))

    def _rate(self, turn: Turn) -> float | None:
        """`Combine.rate_of`, where the rule alone corrects."""
        return self._combine.rate_of(turn)

    def _own(self, round: int) -> Tensor:
        return self._number(self.exchange.neighbours(round).own)

    def _degree(self, round: int) -> Tensor:
        return self._number(self.exchange.neighbours(round).degree)

    def _number(self, value: Number) -> Tensor:
        """A scalar on the buckets' device; in a simulation a column."""
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value)
        # Filled there: copying a number to a device would make the host wait.
        return torch.full((), value, dtype=torch.float64, device=self.buckets[0].flat.device)

    def _leaving(self) -> Flight | None:
        """The round that is launched now, in flight from its first bucket on."""
        if not self.buckets or self.exchange.neighbours(self.round).silent:
            return None
        self._flights.append(Flight(self.round, self.steps))
        return self._flights[-1]

    def _launch(self, flight: Flight, place: int, message: Tensor, turn: Turn, copied: Copied | None) -> None:
        x, state = self.buckets[place].flat, self._states[place]
        if self._keeps_left:
            self._combine.encoded(x, state)
        # A copy leaves: what was sent is subtracted at the landing, and updates change x until then.
        sent, started = self.exchange.launch(message, flight.round, place, copied)
        flight.sent.append(sent)
        flight.started.append(started)
        # By `depart` at the latest: what went to a new neighbour long before the old one's message is complete would
        # take the half of its link.
        if place == len(self.buckets) - 1:
            self.exchange.depart(flight.started, flight.round)
        self._combine.launched(x, partial(_settled, sent, started), state, turn)

    def _due(self, last: int) -> list[Flight]:
        """Those launched in round `last` or before, no longer in flight."""
        due = []
        while self._flights and self._flights[0].round <= last:
            due.append(self._flights.popleft())
        return due

    def _land(self, due: Sequence[Flight], place: int, leaving: Flight | None = None) -> Copied | None:
        """The copy that leaves next, where the last landing's pass has made it."""
        copied: Copied | None = None
        for flight in due:
            if place >= len(flight.started):
                continue  # a bucket that was taken in after the launch
            # By then the others have launched it, or land it, too.
            self.wanted = 1 + (self.steps if flight.started[place].together else flight.step)
            turn, sent, x = self.turn(flight.round), flight.sent[place], self.buckets[place].flat
            rate = self._rate(turn) if flight.started[place].correction else None
            if leaving and flight is due[-1] and rate is not None and self._sends_x:
                copied = self.exchange.copied(x, leaving.round, place)
            mixed, copied = self._landed(flight, place, partial(brought, x, rate, copied), _only)
            for tensor in mixed:
                self._correct(x, sent, tensor, self._states[place], turn)
            self.exchange.pool.give([sent, *mixed])
        return copied

    def _landed(self, flight: Flight, place: int, take: Callable[[Started], T], of: Callable[[list[Tensor]], T]) -> T:
        """What came back for one bucket; `of` nothing where its own message was refused, which corrects nothing."""
        try:
            return take(flight.started[place])
        except Sick as sick:
            left = max(f.round for f in (flight, *self._flights) if len(f.started) > place)
            x, state, turn = self.buckets[place].flat, self._states[place], self.turn(flight.round)
            if not self.healing.heal(sick, place, left, self._combine, x, state, turn) and sick.late:
                return of(sick.mixed)  # a device hears of what left before: this round is as any other
            self.exchange.pool.give(sick.mixed)
            return of([])

    def _land_until(self, last: int) -> None:
        due = self._due(last)
        for place in range(len(self.buckets)):
            self._land(due, place)

    def state_dict(self) -> dict[str, Any]:
        """Round, rule states and every flight with what it brings. Waits for the wire, changes no parameter."""
        flights = [flight.state_dict(partial(self._kept, flight)) for flight in self._flights]
        return {**self.kept(), "flights": flights, "healing": self.healing.state_dict()}

    def _kept(self, flight: Flight, place: int) -> Landed:
        """What came for one bucket. Who was refused is healed where it lands, in a step: not in what is saved now, nor
        in the mean that may stand in the parameters' place."""
        try:
            return kept(self._rate(self.turn(flight.round)), flight.started[place])
        except Sick as sick:
            self.healing.check(sick, place, self._combine, self._states[place])
            return Landed([], sick=sick)

    def kept(self) -> dict[str, Any]:
        """`state_dict` without what is under way, which isn't a newcomer's: nobody waits for the wire."""
        return {
            "round": self.round,
            "steps": self.steps,
            "peak": self._peak,
            "states": [dict(state) for state in self._states],
            "flights": [],
            "exchange": self.exchange.coder.state_dict(),
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
                "resume with the same version, bucket_bytes and device, or delete its .workers folder to start "
                "from the mean"
            )
        self.exchange.coder.load_state_dict(state["exchange"])
        like = [bucket.flat for bucket in self.buckets]
        self.round, self.steps, self._peak = (state[k] for k in ("round", "steps", "peak"))
        self._states = [{k: v.to(x.device) for k, v in s.items()} for s, x in zip(state["states"], like, strict=True)]
        self.healing.load_state_dict(state.get("healing") or self.healing.state_dict())
        self._flights = deque(Flight.of(saved, like) for saved in state["flights"])


def _only(mixed: list[Tensor]) -> Brought:
    return mixed, None


def _settled(sent: Tensor, started: Started) -> Tensor:
    started.settle()
    return sent
