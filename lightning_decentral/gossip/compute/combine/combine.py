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

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.rule import Recovery, Rule, State, Turn, tied_by
from lightning_decentral.gossip.plan.checks import check
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights


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
    """Largest value of a rate, by which stability is judged."""
    return rate.largest if isinstance(rate, RateSchedule) else rate


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
            kept = tuple(self.init(torch.zeros(1, dtype=torch.float32)))
        except (IndexError, RuntimeError, ValueError):  # it wants more than one element, of which it keeps something
            kept = ("a state",)
        incurable = f"it keeps {', '.join(kept)}, which no neighbour could give" if kept else ""
        return Recovery(self._begin_anew, incurable=incurable, tied=tied_by(kept))

    def _begin_anew(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        """x <- what a mixture of sound messages stands for; the state begins there, but for what lasts."""
        x.copy_(self.values(mixed))
        lasting = {name: state[name] for name in self.recovery.lasting}
        state.clear()
        state |= self.init(x) | lasting

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

    def mixing(self, turn: Turn) -> dict[str, float]:
        """Values of a round for users to watch, by name: only those that the rule has."""
        return {}

    def shown(self, state: State) -> Tensor | None:
        """Tensor to validate and save in the place of x, averaged over the workers; None: x itself."""
        return None

    def share(self, state: State) -> Tensor | None:
        """This worker's weight in the mean of the workers; None: all equal."""
        return None
