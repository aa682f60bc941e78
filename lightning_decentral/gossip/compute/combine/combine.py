"""Combine rules: the one equation of decentralized averaging, in correction form, and what a rule may add to it.

    mixed_i = sum_j w_ij sent_j
    x_i    <- x_i + rate * (mixed_i - sent_i)

It keeps what x_i learnt since it was sent. So adapt-then-combine (no update between launch and landing),
adapt-while-combining (one update) and every longer delay are this one rule with other launch and landing points.

LAW (translation): apply(x + d) == apply(x) + d for every d. It is what makes overlap safe for any rule.

Rules that need the user's update see it as a displacement u = x - last, where `last`, a part of their state, is x after
the update before, and gets every correction that x gets. It is -eta g for SGD and whatever any other optimizer makes
of the gradient, so that a rule knows neither.

`Rule` is the interface for set-up, messages and healing, `Combine` adds how a bucket is mixed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lightning_decentral.gossip.plan.checks import check
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Own, Weights
from lightning_decentral.shared.compute.codec.casts import Plain
from lightning_decentral.shared.compute.codec.codec import Codec

State = dict[str, Tensor]


@dataclass(frozen=True)
class Turn:
    """Facts of a round that a rule may use in addition to its bucket.

    Args:
        round: its number; while landing, that of the round that lands.
        learning_rate: the largest of the optimizer's groups, as its last update used it.
        peak: the largest learning rate so far.
        own: w_ii of the round: a scalar on a worker, [size, 1] in a simulation.
        degree: number of sources (in-neighbours) in the round, likewise.
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
        exact: elements at the end of every message that no codec may round, as push-sum's weight.
        differences: messages are differences, of which a coarse codec may lose a part: it is sent later. One that isn't
            sound then counts as zero, and a mean of all workers may be encoded once more (`link.cliques_of`).
    """

    copies: int = 1
    exact: int = 0
    differences: bool = False


Heal = Callable[[Tensor, Tensor, Tensor, State, Turn], None]
"""(x, sent, mixed, state, turn): x <- what a mixture of sound messages stands for, in place, and its state.

sent: what counted in the place of this worker's message: `stand_in`, or in an all-reduce the others' mean.
mixed: the round's mixture with it; the rule's to overwrite.
"""


@dataclass(frozen=True)
class Recovery:
    """Behaviour of a rule where a worker's parameters were poisoned, or where workers come and go.

    Args:
        heal: how a poisoned worker takes its neighbours' parameters.
        incurable: why a poisoned worker can't go on from its neighbours'; empty: it can.
        unheard: why it can't wait for a later round, where no sound message was received in this one; empty: it can.
        tied: why workers that come and go would spoil it; empty: they don't, and a newcomer takes a member's state.
        of_links: its state is about certain links: another topology can't go on from it.
        lasting: what a healed worker keeps of its state, for sums over all workers that never change.
        stand_in: what counts in a round in the place of a message between two workers that was refused, given the
            receiver's own message; on the worker that sent it, the mean of the sound ones that it received.
        refused: (sent, mixed, state, turn): this worker's own message was refused; correct the state by what was
            received in the round. Called for each such message that left before the worker was healed; those after the
            first find it healed.
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
    """Reason why workers can't leave a rule that keeps this, which may be part of a sum over all; empty: none."""
    names = ", ".join(kept)
    return f"what it keeps ({names}) belongs to all workers together, which none may leave" if names else ""


class Rule(ABC):
    """Interface of a rule for the plan, before any message is sent."""

    @property
    def weights(self) -> Weights:
        """Mixing weights of what is received, where the user names none."""
        return Own()

    @property
    def largest_rate(self) -> float:
        """The largest step towards what was received, from 0 to 1, over 1 with an outer momentum: what a codec's error
        is judged against."""
        return 1.0

    @property
    def form(self) -> MessageForm:
        """Format of a message: its numbers for each parameter."""
        return MessageForm()

    @property
    @abstractmethod
    def recovery(self) -> Recovery:
        """Behaviour under this rule where workers are healed, come and go."""

    def placed(self, topology: Topology, size: int) -> Self:
        """The same rule, which knows how many workers there are and when they talk, where it asks."""
        return self

    @abstractmethod
    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        """See that the rule works with this plan, before any worker talks.

        Raises:
            ValueError: with the remedy.
        """


class Combine(Rule):
    """Rule of one bucket. `x` has the shape [n] on a worker, [size, n] in a simulation; a message, what was sent and
    what was mixed have a shape of their own, [m] or [size, m].

    In every step: the user's update; what lands is applied; `adapt`; `message` leaves. At delay 0 it lands at once.
    """

    @property
    def recovery(self) -> Recovery:
        """Recovery by default: a rule that keeps any state can't be healed, and none may leave: what begins anew on one
        worker may break a sum over all."""
        try:
            kept = tuple(self.init(torch.zeros(1, dtype=torch.float32)))  # one element stands for all
        except (IndexError, RuntimeError, ValueError):  # it wants more than one element, of which it keeps something
            kept = ("a state",)
        incurable = f"it keeps {', '.join(kept)}, which no neighbour could give" if kept else ""
        return Recovery(self._begin_anew, incurable=incurable, tied=tied_by(kept))

    def _begin_anew(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        """x <- what a mixture of sound messages stands for; the state begins there, but for what lasts."""
        x.copy_(self.values(mixed))  # (elements,)
        lasting = {name: state[name] for name in self.recovery.lasting}  # a sum's part, say, which no neighbour has
        state.clear()
        state |= self.init(x) | lasting  # what lasts wins over the fresh

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        check(topology, size, weights)

    def init(self, x: Tensor) -> State:
        """The rule's state for a bucket with value x."""
        return {}

    def adapt(self, x: Tensor, state: State, turn: Turn) -> None:
        """Correct x in place once in every step, after the user's update and what landed."""
        return

    def message(self, x: Tensor, state: State) -> Tensor:
        """Tensor to send. The mixer copies it at once, so it may be x itself."""
        return x.detach()  # (elements,), and so is what was sent and mixed

    def encoded(self, x: Tensor, state: State) -> None:
        """The message of x leaves through a codec, which may make what is sent differ from it."""
        return

    def values(self, message: Tensor) -> Tensor:
        """The parameters that a message, or a mixture of messages, stands for."""
        return message

    def launched(self, x: Tensor, sent: Callable[[], Tensor], state: State, turn: Turn) -> None:
        """The message is on its way. `sent` waits for a codec, which may have made it differ from the message."""
        return

    @abstractmethod
    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        """Correct x in place by what landed. `mixed` is the rule's to overwrite."""

    def rate_of(self, turn: Turn) -> float | None:
        """The rate, where `apply` is x <- x + rate (mixed - sent) and nothing else: a device then corrects x in one
        pass, without a mixture."""
        return None

    def mixing(self, turn: Turn) -> dict[str, float]:
        """Values of a round for users to watch, by name: only those that the rule has."""
        return {}

    def shown(self, state: State) -> Tensor | None:
        """Tensor to validate and save in the place of x, averaged over the workers; None: x itself."""
        return None

    def share(self, state: State) -> Tensor | None:
        """This worker's weight in the mean of the workers; None: all equal."""
        return None


def refuse_lossy(codec: Codec, rule: Rule) -> None:
    """ValueError for a codec that loses too much of what the rule sends."""
    if not (codec.complete or rule.form.differences):
        remedy = f"use DifferenceCompression({codec}), a smaller rate; or PseudoGradient()"
        raise ValueError(f"{codec} by itself would lose too much: {remedy}")
    if codec.remembers and rule.form.differences:
        inner = getattr(codec, "inner", Plain())
        raise ValueError(
            f"{rule} sends differences already, and an estimate of them would be sent again in each round: "
            f"use codec={inner}"
        )


MOST_LENGTHENED = 1.5  # Of what comes in parts; measured: at 1/64 of the elements 1.5 contracts, 2 no longer does.


def refuse_overshoot(codec: Codec, rule: Rule) -> None:
    """ValueError for a momentum that goes beyond what a codec has sent before the rest arrives."""
    if rule.form.differences and not codec.whole and rule.largest_rate > MOST_LENGTHENED:
        raise ValueError(
            f"{rule} goes {rule.largest_rate:.3g} times as far as was sent, lr / (1 - momentum), and {codec} "
            f"sends the rest rounds later: keep that to {MOST_LENGTHENED}, as momentum=0 with lr=1, or use Int4()"
        )
