"""Mixer: launches gossip rounds and mixes their messages, bucket by bucket: buckets x update rule x exchange."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine, State, Turn
from lightning_decentral.gossip.compute.healing import Healing
from lightning_decentral.gossip.compute.mixing import Sick
from lightning_decentral.gossip.wire.exchange import Copied, Dropped, Exchange, Flight, Landed, Number, Traffic

MeanOfSound = Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], str]]


class Flat(Protocol):
    """Interface of a bucket to mix: `buckets.Bucket` on a worker, any flat tensor in a simulation."""

    flat: Tensor

    def adopt(self) -> None:
        """Make the parameters views of `flat` again."""


class Mixer:
    """Runs one exchange round per optimizer step.

    After update t:   land (mix) the round launched after update t - delay;   launch (send) round t.
    delay 0 (ATC)     x(t+1) = W (x + u)            launched and landed after the same update
    delay 1 (AWC)     x(t+1) = W x + u(x)           overlaps a whole forward and backward
    delay k           x(t+1) = x + u(x) + rate (W - I) x(t-k+1)

    Memory beyond the model: for every round in flight one copy of the sent message and of each received message, and
    the rule's state. All workers may append buckets while training, in the same round.

    Source: the orders, Wang et al. 2410.11998, section 3; delayed mixing, `stability.largest_stable_rate`."""

    def __init__(self, buckets: Sequence[Flat], combine: Combine, exchange: Exchange[Any], delay: int) -> None:
        self.buckets: list[Flat] = []
        self.round, self.steps = 0, 0  # rounds so far
        self.wanted = 0  # steps that the neighbours must have taken for the last round that was mixed
        self.exchange = exchange
        self.healing = Healing()  # handles a refused message of this worker
        self._learning_rate, self._peak = 0.0, 0.0
        self._combine, self._delay = combine, delay
        self._correct, self._rate = combine.apply, combine.rate_of
        rule = type(combine)
        self._adapts = rule.adapt is not Combine.adapt
        # Whether the next message is the corrected x: then one pass corrects and copies.
        self._sends_x = not self._adapts and rule.message is Combine.message
        self._keeps_left = exchange.coder.encodes and rule.encoded is not Combine.encoded
        self._asks_sent = rule.launched is not Combine.launched
        self._landed, self._in_flight_seconds = 0, 0.0
        self._states: list[State] = []
        self._flights: deque[Flight] = deque()
        self.extend(buckets)

    def extend(self, buckets: Sequence[Flat]) -> None:
        """Mix these buckets, too, from the next round on."""
        self.exchange.admit([b.flat for b in buckets], self._combine)
        self.buckets += buckets
        self._states += [self._combine.init(bucket.flat) for bucket in buckets]

    def step(self, learning_rate: float = 1.0, rounds: int = 1) -> None:
        """Take rounds after the user's update, whose learning rate is given; call equally often on every worker. Rounds
        beyond the first block, as no computation overlaps them."""
        self._learning_rate, self._peak = learning_rate, max(self._peak, learning_rate)
        for nth in range(max(1, rounds)):
            turn = self.turn(self.round)
            due, leaving = self._due(self.round - self._delay), self._leaving() if rounds else None
            # The user's code may have given a parameter another storage.
            for bucket in self.buckets:
                bucket.adopt()
            # Bucket by bucket: a bucket is mixed and encoded while the next is still received, so that the links idle
            # only while the last bucket is mixed, instead of the whole model.
            for place, (bucket, state) in enumerate(zip(self.buckets, self._states, strict=True)):
                copied = self._land(due, place, leaving)
                if self._adapts and not nth:  # `adapt` corrects an update, of which a step has one
                    self._combine.adapt(bucket.flat, state, turn)
                if leaving:
                    self._launch(leaving, place, turn, copied)
            if rounds:
                if not self._delay:
                    self.drain()
                self.round += 1
        self.steps += 1

    def drain(self) -> None:
        """Wait for all rounds in flight, and mix them."""
        due = self._due(self.round)
        for place in range(len(self.buckets)):
            self._land(due, place)

    def restart(self, mean: MeanOfSound) -> None:
        """Set every worker to the mean of all instead of a round; the rule's state begins anew. `mean` returns (mean of
        flat tensors over the sound workers, why this worker isn't sound or ""); collective.
        FloatingPointError: this worker isn't sound, and has been healed as often as `heals` allows."""
        for bucket in self.buckets:
            bucket.adopt()
        self.wanted = self.steps + 1
        means, complaint = mean([bucket.flat for bucket in self.buckets])
        if complaint:
            self.healing.count(complaint, self.round)
            self.healing.forget()
        for bucket, value in zip(self.buckets, means, strict=True):
            bucket.flat.copy_(value)
        self._states = [self._combine.init(bucket.flat) for bucket in self.buckets]
        self.round, self.steps = self.round + 1, self.steps + 1

    @torch.no_grad()
    def begin_at(self, states: Sequence[State], flats: Sequence[Tensor]) -> None:
        """Continue from another worker's rule states, at its anchors or at these flat tensors, if it has either.
        RuntimeError if it mixes other buckets."""
        flats = flats or [state["anchor"] for state in states if "anchor" in state]
        if flats and [flat.numel() for flat in flats] != [bucket.flat.numel() for bucket in self.buckets]:
            raise RuntimeError("parameters were unfrozen while this worker joined: start it again")
        for bucket, own, state, flat in zip(self.buckets, self._states, states, flats, strict=False):
            own.update((name, value.to(bucket.flat.device, copy=True)) for name, value in state.items())
            bucket.flat.copy_(flat)

    def shown(self) -> list[Tensor]:
        """Tensors to evaluate instead of each bucket; empty for the parameters themselves."""
        return [tensor for tensor in map(self._combine.shown, self._states) if tensor is not None]

    def shares(self) -> list[Tensor]:
        """This worker's weight in the mean of the workers, by bucket; empty for equal weights."""
        return [share for share in map(self._combine.share, self._states) if share is not None]

    def mixing(self) -> dict[str, float]:
        """Values of the last round to log, as far as the rule has them."""
        return self._combine.mixing(self.turn(max(0, self.round - 1)))

    def codec_errors(self) -> list[float]:
        """Relative errors of codecs, as last measured; empty if messages aren't encoded."""
        coder = self.exchange.coder
        for flight in self._flights if coder.encodes else ():  # elsewhere nobody waits for that
            for message in flight.messages:
                message.settle()
        error = coder.lost.value()
        return [] if error is None else [error]

    def traffic(self) -> Traffic:
        """Traffic of the exchange, with the number of mixed rounds."""
        return self.exchange.traffic() + Traffic(self._landed, in_flight_seconds=self._in_flight_seconds)

    def turn(self, round: int) -> Turn:
        """Values of a round that the rule may use."""
        at = partial(self.exchange.neighbours, round)  # few rules call it
        own, degree = lambda: self._number(at().own), lambda: self._number(at().degree)
        return Turn(round, self._learning_rate, self._peak, own, degree)

    def _number(self, value: Number) -> Tensor:
        """Make a scalar on the buckets' device, in a simulation a column."""
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value)
        # Filled on the device: copying a number to a GPU would make the host wait.
        return torch.full((), value, dtype=torch.float64, device=self.buckets[0].flat.device)

    def _leaving(self) -> Flight | None:
        """Add the round that is launched now to those in flight, and return it."""
        if not self.buckets or self.exchange.neighbours(self.round).silent:
            return None
        self._flights.append(Flight(self.round, self.steps))
        return self._flights[-1]

    def _launch(self, flight: Flight, place: int, turn: Turn, copied: Copied | None) -> None:
        x, state = self.buckets[place].flat, self._states[place]
        message = x if self._sends_x else self._combine.message(x, state)
        if self._keeps_left:
            self._combine.encoded(x, state)
        launched = self.exchange.launch(message, flight.round, place, copied)
        flight.messages.append(launched)
        # By `depart` at the latest: a message to a new neighbour, sent long before the old neighbour's message is
        # complete, would take half of its link.
        if place == len(self.buckets) - 1:
            self.exchange.depart(flight.messages, flight.round)
            flight.departed = perf_counter()
        if self._asks_sent:
            self._combine.launched(x, launched.settle, state, turn)

    def _due(self, last: int) -> list[Flight]:
        """Remove and return the rounds in flight launched in round `last` or before."""
        due = []
        while self._flights and self._flights[0].round <= last:
            due.append(self._flights.popleft())
        return due

    def _land(self, due: Sequence[Flight], place: int, leaving: Flight | None = None) -> Copied | None:
        """Correct a bucket by the due rounds; return the next message's copy if the correction's pass made one."""
        copied: Copied | None = None
        for flight in due:
            if place >= len(flight.messages):
                continue  # a bucket that was added after the launch
            message, turn, x = flight.messages[place], self.turn(flight.round), self.buckets[place].flat
            # By now the other workers have launched this round, too, or are mixing it.
            self.wanted = 1 + (self.steps if message.together else flight.step)
            rate = self._rate(turn) if message.corrects else None
            mixed, copied = None, None
            try:
                if rate is None:
                    with suppress(Dropped):  # the round has no mixture
                        mixed = message.land()
                else:
                    if leaving and flight is due[-1] and self._sends_x:
                        copied = self.exchange.copied(x, leaving.round, place)
                    message.correct(x, rate, copied)
            except Sick as sick:
                mixed, copied = self._healed(sick, flight, place, turn), None
            if mixed is not None:
                self._correct(x, message.sent, mixed, self._states[place], turn)
            self.exchange.pool.give([message.sent] if mixed is None else [message.sent, mixed])
            if not place and flight.departed:  # count a round once, with its first bucket
                self._landed += 1
                self._in_flight_seconds += perf_counter() - flight.departed
        return copied

    def _healed(self, sick: Sick, flight: Flight, place: int, turn: Turn) -> Tensor | None:
        """Heal the bucket whose own message was refused; return a mixture if one corrects it nevertheless."""
        left = max(f.round for f in (flight, *self._flights) if len(f.messages) > place)
        x, state = self.buckets[place].flat, self._states[place]
        if not self.healing.heal(sick, place, left, self._combine, x, state, turn) and sick.late:
            return sick.mixed  # a GPU's verdict is about an earlier round: this round is mixed as usual
        self.exchange.pool.give([sick.mixed])
        return None

    def state_dict(self) -> dict[str, Any]:
        """State to save: round, rule states and messages in flight. Waits for messages, changes no parameter."""
        flights = [flight.state_dict(partial(self._keep, flight)) for flight in self._flights]
        return {**self.kept(), "flights": flights, "healing": self.healing.state_dict()}

    def _keep(self, flight: Flight, place: int) -> Landed:
        """Wait for and keep what a bucket receives. A refused bucket is healed later, when a step mixes it: not in the
        state that is saved now, nor in a mean that may replace the parameters."""
        message = flight.messages[place]
        try:
            return message.keep(self._rate(self.turn(flight.round)) is not None)
        except Sick as sick:
            self.healing.check(sick, place, self._combine, self._states[place])
            return Landed(message.sent, None, sick=sick)

    def kept(self) -> dict[str, Any]:
        """`state_dict` without messages in flight, for a newcomer to copy; waits for no message."""
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
        """Restore what `state_dict` returned. ValueError: the state was saved with other buckets."""
        elements = [bucket.flat.numel() for bucket in self.buckets]
        if state["elements"] != elements:
            raise ValueError(
                f"the checkpoint's messages have buckets of {state['elements']} elements, this run has {elements}: "
                "resume with its version, bucket_bytes and device, or delete its .workers folder to start from the mean"
            )
        self.exchange.coder.load_state_dict(state["exchange"])
        like = [bucket.flat for bucket in self.buckets]
        self.round, self.steps, self._peak = (state[k] for k in ("round", "steps", "peak"))
        self._states = [{k: v.to(x.device) for k, v in s.items()} for s, x in zip(state["states"], like, strict=True)]
        self.healing.load_state_dict(state.get("healing") or self.healing.state_dict())
        self._flights = deque(Flight.of(saved, like) for saved in state["flights"])
