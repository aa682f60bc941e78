"""Interface of update rules for decentralized averaging, in the form of a correction of x by the mixed messages.

    mixed_i = sum_j w_ij sent_j
    x_i    <- x_i + rate * (mixed_i - sent_i)

The correction keeps what x_i learnt since it was sent. So adapt-then-combine (no update between sending and mixing),
adapt-while-combining (one update) and every longer delay are this one rule, applied at different times.

LAW (translation): apply(x + d) == apply(x) + d for every d. This law makes overlap safe for any rule.

Rules that need the user's update read the displacement u = x - last, where `last`, a part of their state, is x after
the update before, and gets every correction that x gets. For SGD u is -eta g; a rule knows neither the optimizer nor
the gradient.

`Rule` is the interface for set-up, messages and healing; `Combine` adds how a bucket is mixed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lightning_decentral.gossip.plan.checks import check
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Own, Weights
from lightning_decentral.shared.compute.codec.codec import Codec, Plain

State = dict[str, Tensor]


@dataclass(frozen=True)
class Turn:
    """Values of a round that a rule may use: its number, learning rates, the worker's own weight and degree.

    Args:
        round: number of the round; in `apply`, of the round whose messages are mixed.
        learning_rate: the largest of the optimizer's groups, as its last update used it.
        peak: the largest learning rate so far.
        own: w_ii of the round: a scalar on a worker, [size, 1] in a simulation.
        degree: number of sources (in-neighbours) in the round: a scalar, or [size, 1].
    """

    round: int
    learning_rate: float
    peak: float
    own: Callable[[], Tensor]
    degree: Callable[[], Tensor]


@dataclass(frozen=True)
class MessageForm:
    """Format of a rule's messages, for codecs and exchanges.

    Args:
        copies: numbers in a message for each parameter.
        exact: number of elements at the end of every message that no codec may round, as push-sum's weight.
        differences: whether messages are differences, of which a coarse codec may lose a part, as the rule sends that
            part later. A message with NaN then counts as zero, and a mean may be encoded again (`link.cliques_of`).
    """

    copies: int = 1
    exact: int = 0
    differences: bool = False


Heal = Callable[[Tensor, Tensor, Tensor, State, Turn], None]
"""Function (x, sent, mixed, state, turn) that sets x and the state, in place, from a mixture of sound messages.

sent: replacement of this worker's refused message: `stand_in`, or in an all-reduce the others' mean.
mixed: the round's mixture with `sent`, which the function may overwrite.
"""


@dataclass(frozen=True)
class Recovery:
    """Behaviour of a rule when a worker's parameters contain NaN (are poisoned), or when workers come and go.

    Args:
        heal: function by which a poisoned worker copies its neighbours' parameters.
        incurable: why a poisoned worker can't copy its neighbours' parameters; empty if the worker can.
        unheard: why a poisoned worker that received no sound message can't wait for a later round; empty if it can.
        tied: why workers can't come and go; empty if they can, where a newcomer copies a member's state.
        of_links: whether the rule's state belongs to links, so that a run can't resume with another topology.
        lasting: names of the states that a healed worker keeps, for sums over all workers that never change.
        stand_in: replacement of a refused message, given the receiver's own message; on the worker that sent the
            refused message, given the mean of the sound messages that the worker received.
        refused: (sent, mixed, state, turn) corrects the state by the messages received in a round in which this
            worker's own message was refused. Called for each such message sent before the worker was healed; the calls
            after the first find the worker healed.
    """

    heal: Heal
    incurable: str = ""
    unheard: str = ""
    tied: str = ""
    of_links: bool = False
    lasting: tuple[str, ...] = ()
    stand_in: Callable[[Tensor], Tensor] = lambda own: own
    refused: Callable[[Tensor, Tensor, State, Turn], None] = lambda sent, mixed, state, turn: None


def tied_by(kept: Iterable[str]) -> str:
    """Reason why no worker may leave under a rule with the state `kept`, perhaps part of a sum over all; else empty."""
    names = ", ".join(kept)
    return f"its state ({names}) belongs to all workers together, so none may leave" if names else ""


class Rule(ABC):
    """Interface of an update rule for the set-up of a run, before any message is sent."""

    @property
    def weights(self) -> Weights:
        """Default mixing weights of received messages."""
        return Own()

    @property
    def largest_rate(self) -> float:
        """The largest mixing rate, from 0 to 1, over 1 with an outer momentum; a codec's error is compared with this
        rate."""
        return 1.0

    @property
    def form(self) -> MessageForm:
        """Format of a message: how many numbers it has for each parameter."""
        return MessageForm()

    @property
    @abstractmethod
    def recovery(self) -> Recovery:
        """Behaviour of this rule when workers are healed, come or go."""

    def placed(self, topology: Topology, size: int) -> Self:
        """Return the rule adapted to the topology and to the number of workers; by default unchanged."""
        return self

    @abstractmethod
    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        """Check that the rule works with these settings, before any worker communicates.

        Raises:
            ValueError: the rule doesn't; names a remedy.
        """


class Combine(Rule):
    """Base of update rules for a bucket `x` [n], in a simulation [size, n]. A message, `sent` and `mixed` have the
    shape [m] or [size, m], where m may differ from n.

    A step runs the user's update, `apply` of arrived messages, `adapt`, and sends `message`; delay 0 applies at once.
    """

    @property
    def recovery(self) -> Recovery:
        """Default recovery: under a rule with a state no worker can be healed or leave. A state that begins anew on one
        worker may break a sum over all workers."""
        try:
            kept = tuple(self.init(torch.zeros(1, dtype=torch.float32)))  # one element is enough for the names
        except (IndexError, RuntimeError, ValueError):  # a rule with a state that needs more than one element
            kept = ("a state",)
        incurable = f"it keeps {', '.join(kept)}, which no neighbour could give" if kept else ""
        return Recovery(self._begin_anew, incurable=incurable, tied=tied_by(kept))

    @property
    def aligned(self) -> "Combine | None":
        """This rule in a form that keeps equal states equal bit for bit, for committed rounds of elastic runs. There
        all workers mix the same messages. None for a rule whose workers differ."""
        return None

    def _begin_anew(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        """x <- parameters of a mixture of sound messages; the state is initialized from x, except lasting states."""
        x.copy_(self.values(mixed))  # (elements,)
        lasting = {name: state[name] for name in self.recovery.lasting}  # parts of a sum, which no neighbour has
        state.clear()
        state |= self.init(x) | lasting  # lasting states replace the new ones

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        check(topology, size, weights)

    def init(self, x: Tensor) -> State:
        """Make the rule's state for a bucket with value x."""
        return {}

    def adapt(self, x: Tensor, state: State, turn: Turn) -> None:
        """Correct x in place once in every step, after the user's update and `apply`."""
        return

    def message(self, x: Tensor, state: State) -> Tensor:
        """Return the tensor to send, which may be x itself: the mixer copies it at once."""
        return x.detach()  # (elements,), as are `sent` and `mixed`

    def encoded(self, x: Tensor, state: State) -> None:
        """Prepare the state for a message that a codec encodes, so that the decoded message may differ from x."""
        return

    def values(self, message: Tensor) -> Tensor:
        """Return the parameters that a message, or a mixture of messages, encodes."""
        return message

    def launched(self, x: Tensor, sent: Callable[[], Tensor], state: State, turn: Turn) -> None:
        """Update the state after a message has been launched. `sent()` waits for the codec and returns what arrives."""
        return

    @abstractmethod
    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        """Correct x in place by the mixed messages of a round. The rule may overwrite `mixed`."""

    def rate_of(self, turn: Turn) -> float | None:
        """Mixing rate if `apply` is x <- x + rate (mixed - sent) and nothing else, else None. With a rate a GPU
        corrects x in one pass."""
        return None

    def mixing(self, turn: Turn) -> dict[str, float]:
        """Values of a round to log, by name, such as the mixing rate; none by default."""
        return {}

    def shown(self, state: State) -> Tensor | None:
        """Tensor to validate and save instead of x, averaged over the workers; None for x itself."""
        return None

    def share(self, state: State) -> Tensor | None:
        """This worker's weight in the mean of the workers; None for equal weights."""
        return None


def refuse_lossy(codec: Codec, rule: Rule) -> None:
    """Raise ValueError for a codec that loses too much of the rule's messages."""
    if not (codec.complete or rule.form.differences):
        remedy = f"use DifferenceCompression({codec}), a smaller rate; or PseudoGradient()"
        raise ValueError(f"{codec} by itself would lose too much of the parameters: {remedy}")
    if codec.remembers and rule.form.differences:
        inner = getattr(codec, "inner", Plain())
        raise ValueError(
            f"{rule} sends differences already, and {codec} would send an estimate of them again in each round: "
            f"use codec={inner}"
        )


MOST_LENGTHENED = 1.5  # Largest lr / (1 - momentum); measured: with 1/64 of the elements sent 1.5 is stable, 2 isn't.


def refuse_overshoot(codec: Codec, rule: Rule) -> None:
    """Raise ValueError for an outer momentum that overshoots under a codec that sends differences in parts."""
    if rule.form.differences and not codec.whole and rule.largest_rate > MOST_LENGTHENED:
        raise ValueError(
            f"{rule} multiplies differences by lr / (1 - momentum) = {rule.largest_rate:.3g}, and {codec} sends parts "
            f"of them rounds later: keep it to {MOST_LENGTHENED}, as momentum=0 with lr=1, or use Int4()"
        )
