"""Gossip averaging: the plain rule, x <- x + rate (mixed - sent), mixing rates, and checks that they are stable.

A mixing rate, a number or a schedule, is how far a rule moves towards received messages. Less mixing late in training
keeps a disagreement between the workers that helps their mean (2602.02899)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine, State, Turn
from lightning_decentral.gossip.plan import stability
from lightning_decentral.gossip.plan.stability import RepeatedCorrection
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights, describe
from lightning_decentral.shared.plan.arguments import checked


class RateSchedule(ABC):
    """Schedule of a mixing rate: turn -> rate, in [0, largest]."""

    @property
    @abstractmethod
    def largest(self) -> float:
        """The schedule's largest mixing rate, by which stability is checked."""

    @abstractmethod
    def __call__(self, turn: Turn) -> float:
        """Return the mixing rate of a round."""


Rate = float | RateSchedule


def at(rate: Rate, turn: Turn) -> float:
    return rate(turn) if isinstance(rate, RateSchedule) else rate  # a number is the same in every round


def largest(rate: Rate) -> float:
    """Largest value of a mixing rate, by which stability is checked."""
    return rate.largest if isinstance(rate, RateSchedule) else rate


class RatedRule(Combine):
    """Base of rules with a mixing rate, as `Gossip` has."""

    rate: Rate

    def __post_init__(self) -> None:
        check_rate(self.rate)

    @property
    def largest_rate(self) -> float:
        return largest(self.rate)

    def mixing(self, turn: Turn) -> dict[str, float]:
        return {"mixing_rate": at(self.rate, turn)}


@checked
@dataclass(frozen=True, kw_only=True)
class Gossip(RatedRule):
    """x <- x + rate * (mixed - sent): decentralized SGD, adapt-then-combine at delay 0, adapt-while-combining at 1.

    Args:
        rate: mixing rate, a number or a `RateSchedule`. 1 mixes fully; smaller rates keep more of the worker's own
            value and are stable with longer delays.

    Raises:
        ValueError: rate is not in (0, 1].

    Source: Lian et al. 1705.09056; the overlapped order, Wang et al. 2410.11998, eq. 3.
    """

    rate: Rate = 1.0

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        """Check for doubly stochastic weights, and a rate that is stable with this delay."""
        super().check(topology, size, weights, delay)
        check_stable("Gossip", self.rate, topology, size, weights, delay)

    def rate_of(self, turn: Turn) -> float | None:
        # A subclass with another `apply` isn't this correction.
        return at(self.rate, turn) if type(self).apply is Gossip.apply else None

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        x.add_(mixed.sub_(sent), alpha=at(self.rate, turn))  # (elements,); in a simulation (size, elements)


@checked
@dataclass(frozen=True, kw_only=True)
class LinearRate(RateSchedule):
    """first + (last - first) min(1, round / rounds).

    Args:
        first: mixing rate at round 0, in (0, 1].
        last: mixing rate from round `rounds` on, in (0, 1].
        rounds: number of rounds from `first` to `last`, at least 1.
    """

    first: float = 1.0
    last: float
    rounds: int

    def __post_init__(self) -> None:
        for name, rate in (("first", self.first), ("last", self.last)):
            check_rate(rate, f"LinearRate's {name} rate")
        if self.rounds < 1:
            raise ValueError(f"LinearRate's rounds must be at least 1, got {self.rounds}: give the rounds to `last`")

    @property
    def largest(self) -> float:
        return max(self.first, self.last)

    def __call__(self, turn: Turn) -> float:
        return self.first + (self.last - self.first) * min(1.0, turn.round / self.rounds)


@checked
@dataclass(frozen=True, kw_only=True)
class LearningRatePower(RateSchedule):
    """gamma = rate (lr / lr_max)^power, lr_max the largest learning rate so far: `rate` in a warm-up, then falling.

    A round mixes with gamma W + (1 - gamma) I. Every worker must have the same learning rate.

    Raises:
        ValueError: power is not positive, or rate not in (0, 1].

    Source: 2602.02899.
    """

    power: float = 1.0
    rate: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self.rate, "LearningRatePower's rate")
        if self.power <= 0:
            raise ValueError(f"LearningRatePower's power must be positive, got {self.power}: 1 is proportional to lr")

    @property
    def largest(self) -> float:
        return self.rate

    def __call__(self, turn: Turn) -> float:
        return self.rate * (turn.learning_rate / turn.peak) ** self.power if turn.peak > 0 else self.rate


def check_rate(rate: Rate, name: str = "rate") -> None:
    """Raise ValueError unless every mixing rate is in (0, 1]."""
    if not 0 < largest(rate) <= 1:
        raise ValueError(f"{name} must be in (0, 1], got {largest(rate)}: 1 mixes fully, smaller values mix less")


def check_stable(rule: str, rate: Rate, topology: Topology, size: int, weights: Weights, delay: int) -> None:
    """Raise ValueError, naming the largest stable mixing rate, unless plain mixing at the largest rate contracts."""
    used = largest(rate)
    if used <= 1 and stability.stable_at_one(topology, size, delay, weights):
        return  # eigenvalues of a thousand workers take minutes
    safe = stability.largest_stable_rate(topology, size, delay, weights)
    if used >= safe * stability.CONTRACTS and size > 1:
        every = f", or topology=Every({delay}, ...), which is stable at rate 1" if delay > 1 else ""
        raise ValueError(
            f"mixing rate {used} with delay {delay} doesn't contract on {describe(topology, size, weights)}: the rate "
            f"must stay below {safe:.4g}; use {rule}(rate={well_below(safe)}){every}"
        )


def well_below(limit: float) -> float:
    """Half of the limit, to two digits: near the limit mixing contracts by next to nothing in a round."""
    return float(f"{limit / 2:.2g}")


def check_echo(
    rule: str, echo: RepeatedCorrection, rate: Rate, topology: Topology, size: int, weights: Weights, delay: int
) -> None:
    """Raise ValueError, naming a stable mixing rate, unless mixing with repeated corrections contracts."""
    safe, used = stability.largest_rate_with_echo(topology, size, delay, weights, echo), largest(rate)
    if used < safe or size == 1:
        return
    rate = well_below(safe)
    remedy = f"use {rule}(rate={rate})" if rate else "use a shorter delay, or a topology of one matrix"
    raise ValueError(
        f"{rule} at rate {used} with delay {delay} doesn't contract on {describe(topology, size, weights)}: "
        f"the rate must stay below {safe:.4g}; {remedy}"
    )
