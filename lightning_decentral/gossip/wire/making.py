"""How the mixers of a run are made: what the mixers of its optimizers ask of it, whatever its workers are."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.gossip.wire.mixer import MeanOfSound, Mixer
from lightning_decentral.shared.compute.buckets import Bucket

Pack = Callable[[Sequence[nn.Parameter]], list[Bucket]]
"""Parameters as buckets, as their island packs them."""


class Beside(Protocol):
    """A state of an optimizer that is mixed beside the parameters: `rounds.StateMixer`."""

    name: str
    mixer: Mixer
    buckets: list[Bucket]

    def adopt(self, trained: set[nn.Parameter]) -> None: ...
    def drain(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def nothing_beside(optimizer: Optimizer) -> Sequence[Beside]:
    """Parameters alone."""
    return ()


def alone(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], str]:
    """The mean of one worker."""
    return tensors, ""


def as_they_are(parameters: Sequence[nn.Parameter]) -> None:
    """Nothing has to be done to them."""


@dataclass(frozen=True)
class Making:
    """How the mixers of a run are made, and what they ask of it.

    Args:
        mixers: new ones over groups of their own, one for each fragment of the model; collective.
        pack: of parameters.
        states: of an optimizer, those that travel; collective.
        exact_steps: first steps, in which all workers are averaged instead.
        mean: (of flat tensors over the sound workers, why this one isn't sound or nothing); collective.
        known: parameters that all workers began with, frozen ones among them.
        alike: gives every worker the first one's values of parameters that come while training; collective.
        meet: x <- the mean of the workers, as it is evaluated; collective.
    """

    mixers: Callable[[], Sequence[Mixer]]
    pack: Pack
    states: Callable[[Optimizer], Sequence[Beside]] = nothing_beside
    exact_steps: int = 0
    mean: MeanOfSound = alone
    known: Container[nn.Parameter] = ()
    alike: Callable[[Sequence[nn.Parameter]], None] = as_they_are
    meet: Callable[[Sequence[nn.Parameter]], None] = as_they_are

    @torch.no_grad()
    def equalize(self, new: Sequence[nn.Parameter]) -> None:
        """Parameters that are trained from now on become the same on all workers. Collective."""
        # What was frozen is equal already, unless somebody wrote to it: then the mean stays what it was.
        known = [p for p in new if p in self.known]
        means, _ = self.mean([p.detach().flatten() for p in known]) if known else ((), "")
        for parameter, value in zip(known, means, strict=True):
            parameter.copy_(value.view(parameter.shape))
        if drawn := [p for p in new if p not in self.known]:
            self.alike(drawn)  # a module that came while training: each worker has drawn another, maybe
