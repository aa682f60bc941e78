"""Healing: a worker whose parameters were poisoned takes its neighbours', a number of times; the rest of them goes on.

    x_i <- sum_j w_ij x_j / sum_j w_ij        over the sources j that are sound, where x_i isn't

What it sent while it was sick was refused by all; what its rule keeps begins anew or goes on, as the rule says. Where
nobody sound is heard it stays sick, says nothing that could be averaged, and takes what comes next.
"""

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_decentral.gossip.compute.combine.combine import Combine, State, Turn
from lightning_decentral.gossip.compute.integrity import Sick
from lightning_decentral.shared.compute.health import FACTOR, scale, sound

PATIENCE = 32
"""Rounds that a worker waits for somebody sound."""


class Healing:
    """How often a worker may be healed; by default never: it ends with the error that says what it holds.

    Args:
        most: times; 0 ends the training at once.
        poisoned: names the first parameter that isn't sound, and what it holds.

    Attributes:
        healed: times so far.
    """

    def __init__(self, most: int = 0, poisoned: Callable[[], str] = str) -> None:
        self.healed = 0
        self._most, self._poisoned = most, poisoned
        self._round = -1  # of the last healing: a round's buckets are one
        self._left: dict[int, int] = {}  # by bucket, the last round that had left when it was healed
        self._sick_since: int | None = None

    def heal(self, sick: Sick, bucket: int, left: int, combine: Combine, x: Tensor, state: State, turn: Turn) -> bool:
        """x and its state <- the neighbours', or NaN where none is sound. False: the message left before the last
        healing, and changed what is kept, at most.

        Args:
            left: the last round in which this bucket left.

        Raises:
            FloatingPointError: it has been healed too often, or can't be: the rule says why.
        """
        if not self._most:
            raise FloatingPointError(str(sick)) from None
        (sent,), (mixed,) = sick.sent, sick.mixed
        heard = bool(torch.isfinite(scale([mixed])))
        if sick.round <= self._left.get(bucket, -1):
            if heard:
                combine.refused(sent, mixed, state, turn)
            return False
        if reason := combine.incurable(heard):
            raise FloatingPointError(f"{sick}. It can't go on from its neighbours': {reason}; Gossip() can") from None
        if not heard:
            self._wait(sick)
            x.fill_(torch.nan)
            return True
        for name in combine.lasting:
            if not _sound(state[name]):
                raise FloatingPointError(f"{sick}. Its {name} are poisoned, too, and no neighbour has them") from None
        self._count(sick)
        self._left[bucket] = left
        combine.refused(sent, mixed, state, turn)
        combine.heal(x, sent, mixed, state, turn)
        return True

    def _wait(self, sick: Sick) -> None:
        self._sick_since = self._sick_since if self._sick_since is not None else sick.round
        if sick.round - self._sick_since >= PATIENCE:
            raise FloatingPointError(f"{sick} (no neighbour that is sound was heard in {PATIENCE} rounds)") from None

    def _count(self, sick: Sick) -> None:
        self._sick_since = None
        if sick.round == self._round:
            return
        if self.healed == self._most:
            raise FloatingPointError(f"{sick} (healed {self.healed} times, as often as `heals` allows)") from None
        self._round, self.healed = sick.round, self.healed + 1
        warnings.warn(
            f"{str(sick).partition(';')[0]}: {self._poisoned()}. It takes its neighbours' parameters and goes on "
            f"({self.healed} of at most {self._most} times)",
            stacklevel=2,
        )


def _sound(x: Tensor) -> bool:
    """x is finite, and not absurd beside 1."""
    own = scale([x])
    return bool(sound(torch.stack([own, torch.ones_like(own)]))[0])


def first_poisoned(named: Iterable[tuple[str, Tensor]]) -> str:
    """`weight holds NaN`: the first that isn't finite; else the one with the largest magnitude."""
    found = [(name, float(scale([tensor.detach()]))) for name, tensor in named if tensor.is_floating_point()]
    for name, most in found:
        if most != most or most == float("inf"):
            return f"{name} holds {'NaN' if most != most else 'infinity'}"
    name, most = max(found, key=lambda pair: pair[1])
    if most <= FACTOR:
        return "all of them are sound by now"
    return f"{name} holds {most:.2g}"


@torch.no_grad()
def forget_poison(optimizer: Optimizer, local: Callable[[Tensor], Tensor] = torch.Tensor.detach) -> None:
    """Moments with NaN, infinity or absurd numbers begin anew.

    Args:
        local: what this device holds of one.
    """
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.is_floating_point() and not _sound(local(value)):
                local(value).zero_()
