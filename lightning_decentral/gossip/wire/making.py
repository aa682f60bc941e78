"""Making of a run's mixers: what the mixers of its optimizers ask for, whatever its workers are."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.gossip.wire.mixer import MeanOfSound, Mixer
from lightning_decentral.shared.compute.buckets import Bucket
from lightning_decentral.shared.wire.meeting.comparison import Layout, MakeLayouts, Named, TrainingComparison

Pack = Callable[[Sequence[nn.Parameter]], list[Bucket]]
"""Parameters as buckets, as their island packs them."""


class TravellingState(Protocol):
    """A state of an optimizer that is mixed with the parameters: `rounds.StateMixer`."""

    name: str
    mixer: Mixer
    buckets: list[Bucket]

    def adopt(self, trained: set[nn.Parameter]) -> None: ...
    def drain(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def nothing_beside(optimizer: Optimizer) -> Sequence[TravellingState]:
    """No states of the optimizer: parameters alone are mixed."""
    return ()


def alone(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], str]:
    """The mean of one worker."""
    return tensors, ""


def as_they_are(parameters: Sequence[nn.Parameter]) -> None:
    """Leave the parameters as they are."""


class Mixed:
    """Parameters that one worker's rounds mix: compared with the others' where they grow or begin anew, no other time.

    Who trains what in a step is each worker's own: what was mixed once goes on being mixed where it's frozen.

    Attributes:
        by: {parameter that is mixed: place of the optimizer after whose updates it is}.
        layouts: the comparison, to be informed of every round: `begin`, and `done` when it is launched.
    """

    def __init__(self) -> None:
        self.layouts = TrainingComparison()
        self._named: Named = tuple
        self.close()

    def watch(self, named: Named, make: MakeLayouts) -> None:
        """Ask the other workers from now on, until `close`. They have been compared.

        Args:
            named: the module's parameters with their names.
        """
        self.layouts.close()
        self._named = named
        self.layouts = make(self._layout)

    def close(self) -> None:
        """Forget all; nobody is asked any more."""
        self.layouts.close()
        self.layouts = TrainingComparison()
        self.by: dict[nn.Parameter, int] = {}
        self._since: dict[nn.Parameter, int] = {}
        self._optimizers = self._replaced = self._calls = 0
        self._asks = True

    def grow(self, new: Sequence[nn.Parameter], by: int) -> None:
        """Mix these, too, from the next round of the optimizer with that place on. Collective where that is new.

        Raises:
            RuntimeError: another worker doesn't, by name, on all.
        """
        if all(self.by.get(p) == by for p in new):
            return
        self.by |= dict.fromkeys(new, by)
        self._ask()

    def admit(self, optimizers: int) -> None:
        """Expect so many optimizers from now on, each with rounds of its own. Collective; errors as `grow`."""
        self._optimizers = optimizers
        self._ask()

    def begin_anew(self, by: Mapping[nn.Parameter, int], optimizers: int) -> None:
        """Mix these and no others, by new rounds of so many optimizers. Collective; errors as `grow`."""
        self.by, self._optimizers, self._replaced = dict(by), optimizers, self._replaced + 1
        self._ask()

    def _ask(self) -> None:
        if self._asks:
            self.layouts.changed()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Take what is mixed from files that all workers read: nobody is asked."""
        self.by, self._asks = {}, False
        yield
        self._asks = True
        self.layouts.settle()

    def _layout(self) -> Layout:
        found = {}
        for name, p in self._named():
            by, since = self.by.get(p), self._since.setdefault(p, self._calls)
            form = "not mixed" if by is None else f"mixed after updates of optimizer {by}"
            found[name] = f"{tuple(p.shape)} {p.dtype}, {form}{f', new at change {since}' if since else ''}"
        found["optimizers"] = f"{self._optimizers}, replaced {self._replaced} times"
        self._calls += 1
        return found


@dataclass(frozen=True)
class MixerFactory:
    """Factories of a run's mixers, and what the mixers need of the run.

    Args:
        mixers: new ones over groups of their own, one for each fragment of the model; collective.
        pack: of parameters.
        states: of an optimizer, those that travel; collective.
        exact_steps: first steps, in which all workers are averaged instead.
        mean: (of flat tensors over the sound workers, why this one isn't sound or nothing); collective.
        known: parameters that all workers began with, frozen ones among them.
        alike: gives every worker the first one's values of parameters that come while training; collective.
        meet: x <- the mean of the workers, as it is evaluated; collective.
        mixed: what all workers mix, compared where it changes.
    """

    mixers: Callable[[], Sequence[Mixer]]
    pack: Pack
    states: Callable[[Optimizer], Sequence[TravellingState]] = nothing_beside
    exact_steps: int = 0
    mean: MeanOfSound = alone
    known: Container[nn.Parameter] = ()
    alike: Callable[[Sequence[nn.Parameter]], None] = as_they_are
    meet: Callable[[Sequence[nn.Parameter]], None] = as_they_are
    mixed: Mixed = field(default_factory=Mixed)

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
