"""Factories of a run's mixers, mixers of optimizer states, and the comparison of mixed parameters between workers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_decentral.gossip.compute.travel import LACKING, UNKNOWN, agreed, kinds
from lightning_decentral.gossip.wire.mixer import MeanOfSound, Mixer
from lightning_decentral.shared.compute.buckets import Bucket, with_tail
from lightning_decentral.shared.compute.layout import ModelLayout
from lightning_decentral.shared.wire.meeting.comparison import Layout, MakeLayouts, Named, TrainingComparison

Pack = Callable[[Sequence[nn.Parameter]], list[Bucket]]  # Packs parameters into buckets, as their island does.


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Parameters of an optimizer in order, each once."""
    return list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))


PackState = Callable[[Optimizer, str, Mapping[nn.Parameter, int]], list[Bucket]]
"""Packs one optimizer state of these parameters into buckets, in the type that `travel.kinds` found."""


class StateMixer:
    """Mixes one optimizer state with the parameters, from when any worker's optimizer has the state."""

    def __init__(
        self,
        optimizer: Optimizer,
        name: str,
        mixer: Mixer,
        pack: PackState,
        everyone: Callable[[list[int]], list[list[int]]],  # gathers a row of numbers from each worker
    ) -> None:
        self.name, self.mixer = name, mixer
        self.buckets: list[Bucket] = []
        self.packs: list[dict[int, int]] = []  # {parameter's index: its state's kind}, by pack
        self._optimizer, self._pack, self._everyone = optimizer, pack, everyone
        self._known: set[nn.Parameter] = set()
        self._trained = self._looks = 0
        self._stepped = stepped = [False]  # updates since the last look; a list, as the hook outlives this object
        optimizer.register_step_post_hook(lambda *_: stepped.__setitem__(0, True))

    def adopt(self, trained: set[nn.Parameter]) -> None:
        """Add new states of these parameters to the buckets, the same on all workers. Collective. ValueError: as
        `travel.kinds`, or no worker's optimizer has a state of this name."""
        if trained <= self._known:
            return
        stepped, self._stepped[0] = self._stepped[0], False
        if len(trained) != self._trained:
            self._trained, self._looks = len(trained), 0
        self._looks += 1
        if self._looks & (self._looks - 1):  # look the 1st, 2nd, 4th, ... time: a state may stay unknown for ever
            return
        parameters, groups = parameters_of(self._optimizer), self._optimizer.param_groups
        group_of = {p: number for number, group in enumerate(groups) for p in group["params"]}
        new = [place for place, p in enumerate(parameters) if p in trained and p not in self._known]
        mine = kinds(self._optimizer, self.name, [parameters[place] for place in new], stepped)
        found = agreed(self._everyone(mine), [group_of[parameters[place]] for place in new])
        chosen = {place: kind for place, kind in zip(new, found, strict=True) if kind > LACKING}
        if LACKING in found and not (chosen or self.packs):
            kept = sorted({key for p in parameters for key in self._optimizer.state.get(p, {})})
            remedy = f"name one of {', '.join(kept)}, or leave it out of states" if kept else "leave it out of states"
            raise ValueError(
                f"{type(self._optimizer).__name__} has no state {self.name!r} that could be mixed: {remedy}"
            )
        self._known.update(parameters[place] for place, kind in zip(new, found, strict=True) if kind != UNKNOWN)
        self._take(chosen)

    def _take(self, chosen: Mapping[int, int]) -> None:
        if not chosen:
            return
        parameters = parameters_of(self._optimizer)
        new = {parameters[place]: kind for place, kind in chosen.items()}
        self._known.update(new)
        self.packs.append(dict(chosen))
        buckets = self._pack(self._optimizer, self.name, new)
        self.buckets += buckets
        self.mixer.extend(with_tail(buckets))

    def drain(self) -> None:
        for bucket in self.buckets:
            bucket.adopt()
        self.mixer.drain()

    def state_dict(self, state_of: Callable[[Mixer], dict[str, Any]] = Mixer.state_dict) -> dict[str, Any]:
        packs = [list(pack) for pack in self.packs], [list(pack.values()) for pack in self.packs]
        looks = [self._trained, self._looks]
        known = [place for place, p in enumerate(parameters_of(self._optimizer)) if p in self._known]
        found = {"packs": packs[0], "kinds": packs[1], "looks": looks, "known": known}
        return {**found, "mixer": state_of(self.mixer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, after the optimizer's states were loaded; again with a later state."""
        # Packed as when saved: a message in flight has the layout of its buckets.
        for number, places in [*enumerate(state["packs"])][len(self.packs) :]:
            if "kinds" in state:
                saved = state["kinds"][number]
            else:  # saved by version 0.2, where each worker mixed its own optimizer's states
                parameters = parameters_of(self._optimizer)
                saved = kinds(self._optimizer, self.name, [parameters[place] for place in places], stepped=False)
            self._take(dict(zip(places, saved, strict=True)))
        self._trained, self._looks = state.get("looks", (0, 0))
        parameters = parameters_of(self._optimizer)
        self._known.update(parameters[place] for place in state.get("known", ()))
        self.mixer.load_state_dict(state["mixer"])


class Mixed:
    """Parameters that this worker's rounds mix, compared with the other workers' whenever the set changes. Each worker
    may freeze parameters on its own: a parameter that was mixed once is mixed on while frozen."""

    def __init__(self) -> None:
        self.layouts = TrainingComparison()  # call `begin` at the start of every round, `done` at its launch
        self._named: Named = tuple
        self.close()

    def watch(self, named: Named, make: MakeLayouts) -> None:
        """Compare these named parameters with the other workers' from now on, until `close`."""
        self.layouts.close()
        self._named = named
        self.layouts = make(self._layout)

    def close(self) -> None:
        """Forget all parameters, and compare no more."""
        self.layouts.close()
        self.layouts = TrainingComparison()
        self.by: dict[nn.Parameter, int] = {}  # {mixed parameter: index of the optimizer after whose updates}
        self._since: dict[nn.Parameter, int] = {}
        self._optimizers = self._replaced = self._calls = 0
        self._asks = True

    def grow(self, new: Sequence[nn.Parameter], by: int) -> None:
        """Mix new parameters, too, from the next round of optimizer number `by` on. Collective if any is new.
        RuntimeError, on all workers: another worker doesn't mix them, with their names."""
        if all(self.by.get(p) == by for p in new):
            return
        self.by |= dict.fromkeys(new, by)
        self._ask()

    def admit(self, optimizers: int) -> None:
        """Expect this number of optimizers from now on, each with its own rounds. Collective; errors as `grow`."""
        self._optimizers = optimizers
        self._ask()

    def begin_anew(self, by: Mapping[nn.Parameter, int], optimizers: int) -> None:
        """Mix only these parameters, in new rounds of `optimizers` optimizers. Collective; errors as `grow`."""
        self.by, self._optimizers, self._replaced = dict(by), optimizers, self._replaced + 1
        self._ask()

    def _ask(self) -> None:
        if self._asks:
            self.layouts.changed()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Don't compare parameters meanwhile, which all workers load from files."""
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
    """Factories of a run's mixers, and the functions that these need. All functions except `pack` are collective."""

    mixers: Callable[[], Sequence[Mixer]]  # makes mixers over new process groups, one for each fragment of the model
    pack: Pack
    states: Callable[[Optimizer], Sequence[StateMixer]] = lambda optimizer: ()  # makes mixers of optimizer states
    exact_steps: int = 0  # number of first steps, which average all workers instead
    mean: MeanOfSound = lambda tensors: (tensors, "")  # (mean of sound workers, why this worker isn't sound or "")
    known: ModelLayout = field(default_factory=ModelLayout)  # parameters at the start, and their strides
    alike: Callable[[Sequence[nn.Parameter]], None] = lambda new: None  # copies worker 0's values, while training
    meet: Callable[[Sequence[nn.Parameter]], None] = lambda parameters: None  # sets x to the mean that is evaluated
    mixed: Mixed = field(default_factory=Mixed)  # parameters that all workers mix, compared when they change

    @torch.no_grad()
    def equalize(self, new: Sequence[nn.Parameter]) -> None:
        """Make newly trained parameters equal on all workers. Collective."""
        # Frozen parameters are equal already, unless somebody wrote to them: then their mean stays.
        known = [p for p in new if p in self.known]
        means, _ = self.mean([p.detach().flatten() for p in known]) if known else ((), "")
        for parameter, value in zip(known, means, strict=True):
            parameter.copy_(value.view(parameter.shape))
        if drawn := [p for p in new if p not in self.known]:
            self.alike(drawn)  # a module added while training: workers may have drawn different values
