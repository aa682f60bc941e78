"""Mixer of one optimizer's parameters and states, packed into buckets."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.gossip.compute.healing import HealedBuckets, Healing, first_poisoned, forget_poison
from lightning_decentral.gossip.wire.exchange import Traffic
from lightning_decentral.gossip.wire.making import MixerFactory, StateMixer, parameters_of
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.shared.compute.buckets import Bucket, dealt, with_tail
from lightning_decentral.shared.compute.layout import orders, refuse_reordered, same
from lightning_decentral.shared.wire.fsdp import local


def healing(most: int, module: nn.Module) -> Healing:
    """Make the `Healing` of a worker that trains this module."""
    return Healing(most, lambda: first_poisoned((name, local(p)) for name, p in module.named_parameters()))


class OptimizerMixer:
    """Mixes the parameters of one optimizer, or a fragment of them. A parameter that several optimizers train belongs
    to the first (`taken`), and is mixed after the updates of each."""

    def __init__(
        self,
        optimizer: Optimizer,
        mixer: Mixer,
        making: MixerFactory,
        taken: set[nn.Parameter],  # parameters that another mixer has
        fragment: tuple[int, int] = (0, 1),  # (number of the fragment, how many fragments)
        states: Sequence[StateMixer] = (),  # mixers of the optimizer's states
        others_sick: Callable[[], bool] = bool,  # whether another mixer of the worker has poisoned parameters
        place: Callable[[], int] = int,  # index of the optimizer among those with mixers
    ) -> None:
        self.optimizer, self.mixer, self.states = optimizer, mixer, tuple(states)
        self.buckets, self.own = list[Bucket](), set[nn.Parameter]()  # mixed parameters
        self.looks, self.strayed = 0, False  # times the optimizer had new parameters; whether it lacks a mixed one
        self._packs, self._seen = list[list[nn.Parameter]](), list[nn.Parameter]()
        self._making, self._taken, self._fragment = making, taken, fragment
        self._last, self._place = optimizer, place
        self.recovery, self.written = HealedBuckets(self.buckets, self._forget, others_sick), Written(self.buckets)
        # Wherever a round is mixed: in a step, before training ends, before a mask is chosen.
        mixer.healing.forget = self.recovery.healed

    def _forget(self) -> None:
        """Reset the poisoned states of the optimizers that have updated these parameters last."""
        for optimizer in {self.optimizer, self._last}:
            forget_poison(optimizer, local, lambda: [state.name for state in self.states])

    def adopt(self) -> None:
        """Add the optimizer's new parameters to the buckets (gradual unfreezing adds groups)."""
        # A parameter with a gradient that was frozen again since the backward is updated, too.
        groups = self.optimizer.param_groups
        now = [p for group in groups for p in group["params"] if p.requires_grad or p.grad is not None]
        if same(now, self._seen):
            return
        self._seen, self.looks = now, self.looks + 1
        self.strayed = not self.own.issubset(parameters_of(self.optimizer))
        new = self._of_fragment([p for p in dict.fromkeys(now) if p not in self._taken])
        self._making.mixed.grow(new, self._place())
        if new and self.mixer.steps:
            self._making.equalize(new)
        self._pack(new)

    def hand_over(self, optimizer: Optimizer, states: Sequence[StateMixer]) -> Traffic:
        """Continue with another optimizer of these parameters, and new state mixers. Return the old mixers' traffic."""
        for state in self.states:
            state.drain()
            for bucket in state.buckets:
                bucket.release()
        past = self._of_states()
        self.optimizer, self.states, self._seen = optimizer, tuple(states), []
        return past

    @property
    def packs(self) -> list[list[int]]:
        """Indices in the present optimizer of the parameters that were packed at a time."""
        places = {p: place for place, p in enumerate(parameters_of(self.optimizer))}
        return [[places[p] for p in pack if p in places] for pack in self._packs]

    def adopt_pack(self, places: Sequence[int] | int) -> None:
        """Pack as the resumed run had: a message in flight may contain parameters that aren't unfrozen here yet."""
        every = parameters_of(self.optimizer)
        free = self._of_fragment([p for p in every if p not in self._taken])
        # Version 0.2 saved a number: that of the first parameters that weren't packed yet.
        new = free[:places] if isinstance(places, int) else [every[place] for place in places if place < len(every)]
        self._making.mixed.grow(new, self._place())
        self._pack(new)

    def _of_fragment(self, new: list[nn.Parameter]) -> list[nn.Parameter]:
        which, count = self._fragment
        if count == 1:
            return new
        # Of all its parameters, frozen or not: so a parameter's fragment doesn't depend on when it is unfrozen.
        mine = set(dealt(parameters_of(self.optimizer), count)[which])
        return [p for p in new if p in mine]

    def _pack(self, new: list[nn.Parameter]) -> None:
        if new:
            self._taken.update(new)
            self.own.update(new)
            self._packs.append(list(new))
            self._making.known.restore(new)  # with the strides of all workers, also for parameters unfrozen later
            buckets = self._making.pack(new)
            self.buckets += buckets
            self.mixer.extend(with_tail(buckets))

    def step(self, by: Optimizer | None = None) -> None:
        """Take one round after an update; `by`: another optimizer that made the update, of shared parameters."""
        self._last = by or self.optimizer
        # The largest learning rate: a group kept at 0 says nothing about the others. Without an optimizer none.
        learning_rate = max((float(group.get("lr", 1.0)) for group in self._last.param_groups), default=1.0)
        layouts = self._making.mixed.layouts  # a round's parameters are fixed when it begins
        if self.recovery.recovers:
            self.recovery.begin()
        layouts.begin()
        if self.mixer.steps < self._making.exact_steps:
            self.mixer.restart(self._making.mean)
        else:
            self.mixer.step(learning_rate)
        for state in self.states:
            state.mixer.step(learning_rate)
        layouts.done()
        self.store()
        if self.recovery.recovers:
            self.recovery.end()
        self.written.stepped()

    def drain(self) -> None:
        for bucket in self.buckets:
            bucket.adopt()
        self.mixer.drain()
        for state in self.states:
            state.drain()
        self.store()
        self.written.note()

    def store(self) -> None:
        for bucket in self.buckets:
            bucket.store()

    def shown(self, standing: bool) -> Iterator[tuple[int, Tensor]]:
        """Yield (address of a parameter, tensor to evaluate instead), unless it was written to since the last step.
        `standing`: the mean has replaced the parameters meanwhile."""
        if not (flats := self.mixer.shown()):
            return
        written = self.written.found if standing else self.written.look()
        for bucket in self.buckets:
            # A bucket is mixed as one flat tensor or as two.
            flat, missing = [], bucket.flat.numel()
            while missing:
                flat.append(flats.pop(0))
                missing -= len(flat[-1])
            yield from ((place, view) for place, view in bucket.views(torch.cat(flat)) if place not in written)

    def traffic(self) -> Traffic:
        """Traffic of parameters and states; only rounds of the parameters are counted."""
        return self.mixer.traffic() + self._of_states()

    def _of_states(self) -> Traffic:
        others = (state.mixer.traffic() for state in self.states)
        return sum((replace(traffic, rounds=0) for traffic in others), Traffic())

    def state_dict(self) -> dict[str, Any]:
        states = {state.name: state.state_dict() for state in self.states}
        packed = {"orders": orders(self.buckets), "padding": [bucket.padding for bucket in self.buckets]}
        return self.mixer.state_dict() | packed | ({"beside": states} if states else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Errors as `Mixer.load_state_dict`."""
        refuse_reordered(state, self.buckets)
        self.mixer.load_state_dict(state)
        for bucket, padding in zip(self.buckets, state.get("padding", ()), strict=False):  # version 0.2 saved none
            bucket.padding = padding
        for own in self.states:
            own.load_state_dict(state["beside"][own.name])


SAMPLES = 64  # Elements sampled of each parameter: a pass over all elements per step would cost as much as a round.


class Written:
    """Detects writes to the parameters of one mixer's buckets since its last step. A parameter's version counts its
    changes, except those by `.data`, which a sample of its elements shows."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._places: list[Tensor] = []
        self._owners: list[list[int]] = []
        self._versions: list[list[int]] = []
        self._samples: list[Tensor] = []
        self.found: set[int] = set()  # addresses of parameters that were written to, as found by `look`

    def stepped(self) -> None:
        """Count earlier writes as part of the update."""
        self.found.clear()
        self.note()

    @torch.no_grad()
    def note(self, written: Iterable[Tensor] = ()) -> None:
        """Compare from now on. Keeps what was found, and `written`: writes while the mean had replaced parameters."""
        own = {local(p).data_ptr() for bucket in self._buckets for p in bucket.parameters} if written else set()
        self.found.update(own.intersection(local(t).data_ptr() for t in written))
        for bucket in self._buckets[len(self._places) :]:
            self._lay_out(bucket)
        self._versions = [[p._version for p in bucket.parameters] for bucket in self._buckets]
        self._samples = [b.sampled(places) for b, places in zip(self._buckets, self._places, strict=True)]

    @torch.no_grad()
    def look(self) -> set[int]:
        """Return the addresses of parameters that were written to. Waits for a GPU."""
        for bucket in self._buckets:
            bucket.adopt()  # a parameter may have been given another storage
        found = zip(self._buckets, self._places, self._owners, self._versions, self._samples, strict=False)
        for bucket, places, owners, versions, samples in found:
            changed = [p._version != version for p, version in zip(bucket.parameters, versions, strict=True)]
            for place in (bucket.sampled(places) != samples).nonzero().flatten().tolist():
                changed[owners[place]] = True
            pairs = zip(bucket.parameters, changed, strict=True)
            self.found.update(local(p).data_ptr() for p, was in pairs if was)
        self.note()
        return self.found

    def kept(self) -> list[tuple[Tensor, Tensor]]:
        """Return (parameter, written value) pairs."""
        found = self.look()
        every = [local(p) for bucket in self._buckets for p in bucket.parameters]
        return [(p, p.clone()) for p in every if p.data_ptr() in found]

    def _lay_out(self, bucket: Bucket) -> None:
        rows, owners = list[Tensor](), list[int]()
        at = next((p.device for p in bucket.parameters), bucket.flat.device)  # a copy would make the host wait
        for number, place in enumerate(bucket.ranges()):
            count = min(SAMPLES, len(place))
            row: Tensor = torch.linspace(place.start, place.stop - 1, count, dtype=torch.float64, device=at).long()
            rows.append(row)
            owners += [number] * len(row)
        self._places.append(torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long, device=at))
        self._owners.append(owners)
