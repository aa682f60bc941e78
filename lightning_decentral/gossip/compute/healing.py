"""Healing: a worker whose parameters contain NaN, infinity or far too large numbers copies its neighbours' parameters.

    x_i <- sum_j w_ij x_j / sum_j w_ij        over the sources j that are sound, where x_i isn't

The other workers refused the sick worker's message; the update rule decides which of its states begin anew. Where no
sound message arrives the worker stays sick, its messages are refused, and it waits for the next round."""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_decentral.gossip.compute.combine.combine import Combine, State, Turn
from lightning_decentral.gossip.compute.mixing import Sick
from lightning_decentral.shared.compute.buckets import Bucket
from lightning_decentral.shared.compute.health import FACTOR, scale, sound

PATIENCE = 32  # Rounds that a sick worker waits for a sound message.


class Healing:
    """Heals a worker at most `most` times. By default never: the worker ends with an error. `poisoned` names its first
    parameter with NaN or infinity."""

    def __init__(self, most: int = 0, poisoned: Callable[[], str] = str) -> None:
        self.healed = 0  # number of healings so far
        self.forget: Callable[[], None] = lambda: None  # after each healing: resets the worker's other poisoned state
        self._most, self._poisoned = most, poisoned
        self._round = -1  # round of the last healing: a round's buckets count as one healing
        self._left: dict[int, int] = {}  # by bucket, the last round that had been sent when the bucket was healed
        self._sick_since: int | None = None

    def heal(self, sick: Sick, bucket: int, left: int, combine: Combine, x: Tensor, state: State, turn: Turn) -> bool:
        """x and its state <- the neighbours', or NaN if none is sound. Returns False if the refused message was sent
        before the last healing: then at most the state changes. `left`: the last round in which this bucket was sent.
        Errors as `check`."""
        self.check(sick, bucket, combine, state)
        sent, mixed = sick.sent, sick.mixed
        if sick.round <= self._left.get(bucket, -1):  # the bucket has been healed since this message left
            if _reached(sick):
                combine.recovery.refused(sent, mixed, state, turn)
            return False
        if not _reached(sick):
            self._sick_since = sick.round if self._sick_since is None else self._sick_since
            x.fill_(torch.nan)  # (elements,): refused by all workers until a sound message is received
            return True
        self._sick_since, self._left[bucket] = None, left
        self.count(str(sick), sick.round)
        combine.recovery.refused(sent, mixed, state, turn)
        combine.recovery.heal(x, sent, mixed, state, turn)
        self.forget()
        return True

    def check(self, sick: Sick, bucket: int, combine: Combine, state: State) -> None:
        """Check that the worker can be healed, before it mixes or saves a checkpoint that couldn't go on.
        FloatingPointError: the worker has been healed too often, or can't be healed, with the rule's reason."""
        if self._most and sick.round <= self._left.get(bucket, -1):
            return
        if (reason := self._hopeless(sick, combine, state)) is not None:
            raise FloatingPointError(f"{sick}{reason}") from None

    def count(self, complaint: str, round: int) -> None:
        """Count a healing, once for all buckets of a round. FloatingPointError: the limit of healings is reached."""
        if round == self._round:
            return
        if self.healed >= self._most:
            raise FloatingPointError(f"{complaint}{self._too_often()}") from None
        self._round, self.healed = round, self.healed + 1
        warnings.warn(
            f"{complaint.partition(';')[0]}: {self._poisoned()}. It takes its neighbours' parameters and goes on "
            f"({self.healed} of at most {self._most} times)",
            stacklevel=2,
        )

    def _too_often(self) -> str:
        return f" (healed {self.healed} times, as often as `heals` allows)" if self._most else ""

    def _hopeless(self, sick: Sick, combine: Combine, state: State) -> str | None:
        """Return why the worker can't be healed, or None if the worker can."""
        if not self._most:
            return ""
        recovery = combine.recovery
        if reason := recovery.incurable or ("" if _reached(sick) else recovery.unheard):
            return f". It can't go on from its neighbours': {reason}; Gossip() can"
        if not _reached(sick):
            since = sick.round if self._sick_since is None else self._sick_since
            waits = sick.round - since < PATIENCE
            return None if waits else f" (no sound message was received in {PATIENCE} rounds)"
        if name := next((name for name in recovery.lasting if not sound_alone([state[name]])), None):
            return f". The rule's state {name!r} is poisoned, too, and no neighbour has a copy"
        return self._too_often() if self.healed >= self._most and sick.round != self._round else None

    def state_dict(self) -> dict[str, Any]:
        """State to save: which messages in flight were sent before the healing."""
        return {"round": self._round, "left": dict(self._left), "sick since": self._sick_since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._round, self._left, self._sick_since = state["round"], dict(state["left"]), state["sick since"]


def _reached(sick: Sick) -> bool:
    """Return whether any sound message was received in the round."""
    return bool(torch.isfinite(scale([sick.mixed])))


def sound_alone(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors are finite, and not far too large compared with 1."""
    if not tensors:
        return True
    own = scale(tensors)  # the largest magnitude, a scalar
    return bool(sound(torch.stack([own, torch.ones_like(own)]))[0])


def first_poisoned(named: Iterable[tuple[str, Tensor]]) -> str:
    """Describe the first tensor that isn't finite, as `weight holds NaN`, else the one with the largest magnitude."""
    found = [(name, float(scale([tensor.detach()]))) for name, tensor in named if tensor.is_floating_point()]
    for name, most in found:
        if most != most or most == float("inf"):
            return f"{name} holds {'NaN' if most != most else 'infinity'}"
    name, most = max(found, key=lambda pair: pair[1])
    if most <= FACTOR:
        return "all parameters are sound by now"
    return f"{name} holds {most:.2g}"


COUNTERS = ("step", "n_iter")  # what optimizers count updates by, to correct moments that began at zero


@torch.no_grad()
def forget_poison(
    optimizer: Optimizer,
    local: Callable[[Tensor], Tensor] = torch.Tensor.detach,  # this device's part of a state
    travelling: Callable[[], Collection[str]] = tuple,  # states that come from the neighbours, as old as the count is
) -> None:
    """Reset moments with NaN, infinity or far too large numbers, and the count of updates that corrects them. With an
    old count a second moment of 0 would make Adam's next hundred steps up to six times too long."""
    for state in optimizer.state.values():
        floats = {name: v for name, v in state.items() if isinstance(v, Tensor) and v.is_floating_point()}
        poisoned = [name for name, value in floats.items() if not sound_alone([local(value)])]
        for name in poisoned:
            local(floats[name]).zero_()  # a moment begins anew
        if set(poisoned).difference(travelling()):
            state.update({name: state[name] * 0 for name in COUNTERS if name in state})


class HealedBuckets:
    """Keeps the healed values of one mixer's buckets until the rest of the worker's model is sound, too. Fragments, and
    the parameters of several optimizers, are healed one after the other, each in its own round. Until the last is
    healed, gradients come from a model with NaN, and would poison healed parameters again. `forget` resets other
    poisoned state of the worker; `others_sick` returns whether other parts of the model aren't sound."""

    def __init__(
        self, buckets: Sequence[Bucket], forget: Callable[[], None], others_sick: Callable[[], bool] = bool
    ) -> None:
        self._buckets, self._forget, self._others_sick = buckets, forget, others_sick
        # Whether other parts were sick at the healing: only then a step has to `begin` and `end`.
        self.recovers, self._held = False, list[Tensor]()

    @property
    def sick(self) -> bool:
        return not sound_alone([bucket.flat for bucket in self._buckets])

    def healed(self) -> None:
        """Note that a bucket has been healed."""
        self.recovers = True
        self._forget()

    @torch.no_grad()
    def begin(self) -> None:
        """Restore the healed parameters after an update, before anything reads them."""
        if not self._held:
            return
        for bucket in self._buckets:
            bucket.adopt()
        if self.sick:
            for bucket, held in zip(self._buckets, self._held, strict=False):
                bucket.flat.copy_(held)  # (elements,)
                bucket.store()
            self._forget()

    def end(self) -> None:
        """Copy the healed parameters after a round. Waits for a GPU."""
        self.recovers = self._others_sick()
        self._held = [bucket.flat.clone() for bucket in self._buckets] if self.recovers else []
