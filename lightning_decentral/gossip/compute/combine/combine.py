"""Combine rules: the one equation of decentralized averaging, in correction form, and what a rule may add to it.

    mixed_i = sum_j w_ij sent_j
    x_i    <- x_i + rate * (mixed_i - sent_i)

It keeps what x_i learnt since it was sent. So adapt-then-combine (no update between launch and landing),
adapt-while-combining (one update) and every longer delay are this one rule with other launch and landing points.

LAW (translation): apply(x + d) == apply(x) + d for every d. It is what makes overlap safe for any rule.

Rules that need the user's update see it as a displacement u = x - last, where `last`, a part of their state, is x after
the update before, and gets every correction that x gets. It is -eta g for SGD and whatever any other optimizer makes
of the gradient, so that a rule knows neither.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_decentral.gossip.plan.checks import check
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Own, Weights

State = dict[str, Tensor]


@dataclass(frozen=True)
class Turn:
    """What a rule may know of a round beside its bucket.

    Args:
        round: its number; while landing, that of the round that lands.
        learning_rate: the largest of the optimizer's groups, as its last update used it.
        peak: the largest learning rate so far.
        own: w_ii of the round: a scalar on a worker, [size, 1] in a simulation.
        degree: how many others are heard in the round, likewise.
    """

    round: int
    learning_rate: float
    peak: float
    own: Callable[[], Tensor]
    degree: Callable[[], Tensor]


class RateSchedule(ABC):
    """turn -> rate, in [0, largest]."""

    @property
    @abstractmethod
    def largest(self) -> float:
        """The largest rate it may ever give: what stability is judged by."""

    @abstractmethod
    def __call__(self, turn: Turn) -> float:
        """The rate of this round."""


Rate = float | RateSchedule


def at(rate: Rate, turn: Turn) -> float:
    """The rate of this round."""
    return rate(turn) if isinstance(rate, RateSchedule) else rate


def largest(rate: Rate) -> float:
    """What stability is judged by."""
    return rate.largest if isinstance(rate, RateSchedule) else rate


class Combine(ABC):
    """Rule of one bucket. `x` has the shape [n] on a worker, [size, n] in a simulation; a message, what was sent and
    what was mixed have a shape of their own, [m] or [size, m].

    In every step: the user's update; what lands is applied; `adapt`; `message` leaves. At delay 0 it lands at once.
    """

    lasting: ClassVar[tuple[str, ...]] = ()
    """What a healed worker keeps of its state, for sums over all workers that never change."""

    of_links: ClassVar[bool] = False
    """Whether its state is about certain links: then another topology can't go on from it."""

    @property
    def weights(self) -> Weights:
        """Of what is heard, where the user names none."""
        return Own()

    @property
    def copies(self) -> int:
        """Numbers in a message for each parameter."""
        return 1

    @property
    def largest_rate(self) -> float:
        """The largest step towards what was heard, from 0 to 1, over 1 with an outer momentum: what a codec's error is
        judged against."""
        return 1.0

    @property
    def exact(self) -> int:
        """Elements at the end of every message that no codec may round, as push-sum's weight."""
        return 0

    @property
    def of_differences(self) -> bool:
        """Whether messages are differences, of which a coarse codec may lose a part: it is sent later. One that isn't
        sound then counts as zero, and a mean of all workers may be encoded once more (`link.cliques_of`)."""
        return False

    def placed(self, topology: Topology, size: int) -> "Combine":
        """The same rule, told how many workers there are and when they talk, where it asks."""
        return self

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        """See that the rule works with this plan, before any worker talks.

        Raises:
            ValueError: with the remedy.
        """
        check(topology, size, weights)

    def init(self, x: Tensor) -> State:
        """The rule's state for a bucket with value x."""
        return {}

    def adapt(self, x: Tensor, state: State, turn: Turn) -> None:
        """Correct x in place once in every step, after the user's update and what landed."""
        return

    def message(self, x: Tensor, state: State) -> Tensor:
        """What is sent. The mixer takes a copy of it at once, so it may be x itself."""
        return x.detach()

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

    def incurable(self, heard: bool = True) -> str:
        """Why a worker whose parameters were poisoned can't go on from its neighbours' by `heal`; empty: it can.

        By default so where the rule keeps anything: what begins anew on one worker may break a sum over all.

        Args:
            heard: whether any sound message was, in this round; else it would wait for a later one.
        """
        kept = self.init(torch.zeros(1))
        return f"it keeps {', '.join(kept)}, which no neighbour could give" if kept else ""

    def tied(self) -> str:
        """Why workers that come and go would spoil it; empty: they don't, and a newcomer takes a member's state.

        By default so where the rule keeps anything, which may be part of a sum over all workers.
        """
        kept = ", ".join(self.init(torch.zeros(1)))
        return f"what it keeps ({kept}) belongs to all workers together, which none may leave" if kept else ""

    def stand_in(self, other: Tensor) -> Tensor:
        """What counts in a round in the place of a message between two workers that was refused.

        Args:
            other: the receiver's own message; on the worker that sent it, the mean of the sound ones that it heard.
        """
        return other

    def refused(self, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        """This worker's own message was refused: correct the state by what was heard in the round; args as of `heal`.
        Called for each such message that left before the worker was healed; those after the first find it healed.
        """
        return

    def heal(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        """x <- what a mixture of sound messages stands for, in place; the state begins anew there, but for `lasting`.

        Args:
            sent: what counted in the place of this worker's message: `stand_in`, or in an all-reduce the others' mean.
            mixed: the round's mixture with it; the rule's to overwrite.
        """
        x.copy_(self.values(mixed))
        lasting = {name: state[name] for name in self.lasting}
        state.clear()
        state |= self.init(x) | lasting

    def mixing(self, turn: Turn) -> dict[str, float]:
        """What users watch of a round, by name: only what the rule has."""
        return {}

    def shown(self, state: State) -> Tensor | None:
        """What is validated and saved, averaged over the workers, in the place of x; None: x itself."""
        return None

    def share(self, state: State) -> Tensor | None:
        """This worker's weight in the mean of the workers; None: all equal."""
        return None
