"""The mixers of all optimizers: which parameters and states each mixes, in which buckets, saved and restored together.

An optimizer has a mixer for each fragment that travels by itself; the first has the mixers of states that travel, too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.gossip.compute.healing import Healing, first_poisoned, forget_poison
from lightning_decentral.gossip.wire.exchange import Traffic
from lightning_decentral.gossip.wire.making import Beside
from lightning_decentral.gossip.wire.making import Making as Making
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.recovery import Recovery
from lightning_decentral.gossip.wire.written import Written
from lightning_decentral.shared.compute.buckets import Bucket, dealt, with_tail
from lightning_decentral.shared.compute.layout.place import orders, refuse_reordered
from lightning_decentral.shared.wire.fsdp import local
from lightning_decentral.shared.wire.transport import Transport


def healing(most: int, module: nn.Module) -> Healing:
    """Of a worker that trains this module; as `Healing`."""
    return Healing(most, lambda: first_poisoned((name, local(p)) for name, p in module.named_parameters()))


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """In order, each once."""
    return list(dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]))


class OptimizerMixer:
    """What one optimizer trains, or a fragment of it, and the mixer that mixes it.

    Args:
        taken: parameters that an optimizer mixes already; a parameter of several is mixed by the first.
        fragment: (which one, of how many).
        states: of the optimizer, mixed beside.
        others_sick: whether any other mixer of the worker holds what isn't sound.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mixer: Mixer,
        making: Making,
        taken: set[nn.Parameter],
        fragment: tuple[int, int] = (0, 1),
        states: Sequence[Beside] = (),
        others_sick: Callable[[], bool] = bool,
    ) -> None:
        self.optimizer, self.mixer, self.states = optimizer, mixer, tuple(states)
        self.buckets, self.packs = list[Bucket](), list[list[int]]()
        self._making, self._taken, self._fragment = making, taken, fragment
        self._own, self._seen = set[nn.Parameter](), list[nn.Parameter]()
        forget = partial(forget_poison, optimizer, local, lambda: [state.name for state in self.states])
        self.recovery = Recovery(self.buckets, forget, others_sick)
        self.written = Written(self.buckets)
        # Wherever a round lands: in a step, before training ends, before a mask is chosen.
        mixer.healing.forget = self.recovery.healed

    def adopt(self) -> None:
        """Take in what the optimizer got since the last look (gradual unfreezing adds groups)."""
        now = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        seen, self._seen = self._seen, now
        if len(now) != len(seen) or not all(map(is_, now, seen)):  # without a hash of each, which is Python's
            self._pack(self._of_fragment([p for p in dict.fromkeys(now) if p not in self._taken]))

    def adopt_pack(self, places: Sequence[int] | int) -> None:
        """What the run that is resumed packed at a time: a message in flight may hold what isn't unfrozen here yet."""
        every = parameters_of(self.optimizer)
        free = self._of_fragment([p for p in every if p not in self._taken])
        # 0.2 saved how many: the first of those that weren't packed yet.
        self._pack(
            free[:places] if isinstance(places, int) else [every[place] for place in places if place < len(every)]
        )

    def _of_fragment(self, new: list[nn.Parameter]) -> list[nn.Parameter]:
        which, count = self._fragment
        if count == 1:
            return new
        # Of all that it has, frozen or not: so whose turn it is doesn't depend on when something is unfrozen.
        mine = set(dealt(parameters_of(self.optimizer), count)[which])
        return [p for p in new if p in mine]

    def _pack(self, new: list[nn.Parameter]) -> None:
        if new:
            self._taken.update(new)
            self._own.update(new)
            buckets = self._making.pack(new)
            self.buckets += buckets
            places = {p: place for place, p in enumerate(parameters_of(self.optimizer))}
            self.packs.append([places[p] for p in new])
            mixed = with_tail(buckets)
            self.mixer.extend(mixed, [span.matrices for span in mixed])

    def adopt_states(self) -> None:
        """Take in the states that the optimizer has for them since its last update."""
        for state in self.states:
            state.adopt(self._own)

    def step(self) -> None:
        # The largest: a group that is kept at 0 says nothing of the others. Without an optimizer there is none.
        learning_rate = max((float(group.get("lr", 1.0)) for group in self.optimizer.param_groups), default=1.0)
        self.recovery.begin()
        if self.mixer.steps < self._making.exact_steps:
            self.mixer.restart(self._making.mean)
        else:
            self.mixer.step(learning_rate)
        for state in self.states:
            state.mixer.step(learning_rate)
        self._store()
        self.recovery.end()
        self.written.stepped()

    def drain(self) -> None:
        for bucket in self.buckets:
            bucket.adopt()
        self.mixer.drain()
        for state in self.states:
            state.drain()
        self._store()
        self.written.note()

    def _store(self) -> None:
        for bucket in self.buckets:
            bucket.store()

    def all_buckets(self) -> list[Bucket]:
        """Of parameters and of states."""
        return [*self.buckets, *(bucket for state in self.states for bucket in state.buckets)]

    def shown(self, standing: bool) -> Iterator[tuple[int, Tensor]]:
        """(address of a parameter, what is evaluated in its place); what was written since the last step is itself.

        Args:
            standing: whether the mean stands in the parameters' place.
        """
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
        """Of the parameters and the states; the rounds are the parameters'."""
        beside = (state.mixer.exchange.traffic() for state in self.states)
        return sum((replace(traffic, rounds=0) for traffic in beside), self.mixer.exchange.traffic())

    def state_dict(self) -> dict[str, Any]:
        beside = {state.name: state.state_dict() for state in self.states}
        return self.mixer.state_dict() | {"orders": orders(self.buckets)} | ({"beside": beside} if beside else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Errors as `Mixer.load_state_dict`."""
        refuse_reordered(state, self.buckets)
        self.mixer.load_state_dict(state)
        for own in self.states:
            own.load_state_dict(state["beside"][own.name])


class Mixers:
    """Of each optimizer as many as the model has fragments.

    Args:
        making: asked when an optimizer's are made.
    """

    def __init__(self, making: Callable[[], Making]) -> None:
        self._making = making
        self._all: list[OptimizerMixer] = []
        self._exact_steps: int | None = None
        self._taken: set[nn.Parameter] = set()

    def __iter__(self) -> Iterator[OptimizerMixer]:
        return iter(self._all)

    def __getitem__(self, index: int) -> OptimizerMixer:
        return self._all[index]

    def of(self, optimizer: Optimizer) -> list[OptimizerMixer]:
        """Of this optimizer; new ones where the optimizers were replaced, on all workers in the same step."""
        if found := [mixer for mixer in self._all if mixer.optimizer is optimizer]:
            return found
        making = self._timed()
        made, states = making.mixers(), making.states(optimizer)
        for place, mixer in enumerate(made):
            fragment, beside = (place, len(made)), () if place else states
            others = partial(self._others_sick, len(self._all))
            self._all.append(OptimizerMixer(optimizer, mixer, making, self._taken, fragment, beside, others))
        return self._all[-len(made) :]

    def _others_sick(self, place: int) -> bool:
        return any(mixer.recovery.sick for number, mixer in enumerate(self._all) if number != place)

    def traffic(self) -> Traffic:
        """Of all; a fault that has poisoned several optimizers or fragments is one."""
        healed = max((mixer.mixer.healing.healed for mixer in self._all), default=0)
        return replace(sum((mixer.traffic() for mixer in self._all), Traffic()), healed=healed)

    def _timed(self) -> Making:
        """With the exact steps that the first one had, or those of the run that is resumed."""
        # A share of a run that is made longer would grow, and a rule that has begun mustn't end.
        making = self._making()
        if self._exact_steps is None:
            self._exact_steps = making.exact_steps
        return replace(making, exact_steps=self._exact_steps)

    def adopt(self, optimizer: Optimizer) -> None:
        """Take in what this optimizer trains."""
        for mixer in self.of(optimizer):
            mixer.adopt()

    def step(self, optimizer: Optimizer) -> None:
        """One round after an update of this optimizer."""
        for mixer in self.of(optimizer):
            mixer.adopt()
            mixer.adopt_states()
            mixer.step()

    def share(self, over: Transport, device: torch.device, meet: Callable[[Callable[[], Any]], Any]) -> float | None:
        """w_i / sum_j w_j of push-sum (the first optimizer's where there are several); None: all equal. Collective."""
        if not (shares := [share for mixer in self._all[:1] for share in mixer.mixer.shares()[:1]]):
            return None
        # A poisoned weight would poison all shares: its worker has none.
        own = shares[0].double().to(device).nan_to_num(0.0, 0.0, 0.0)
        total = own.clone()
        meet(lambda: over.all_reduce(total).wait())
        return float(own / total)

    def shown(self, standing: bool = False) -> Mapping[int, Tensor]:
        """{address of a parameter: what is evaluated in its place}, where the rule has something else than its mean."""
        return dict(pair for mixer in self._all for pair in mixer.shown(standing))

    def note(self, written: Sequence[Tensor]) -> None:
        """The mean has left the parameters' place; these were written meanwhile."""
        for mixer in self._all:
            mixer.written.note(written)

    def settle(self) -> None:
        for mixer in self._all:
            mixer.drain()

    @torch.no_grad()
    def end(self) -> None:
        """Land all that is in flight, where nothing follows: what somebody wrote since the last step stays."""
        kept = [pair for mixer in self._all for pair in mixer.written.kept()]
        self.settle()
        for parameter, written in kept:
            parameter.copy_(written)
        self.note([parameter for parameter, _ in kept])

    def release(self) -> None:
        """Give every parameter and state a storage of its own again."""
        for mixer in self._all:
            for bucket in mixer.all_buckets():
                bucket.release()
        self._all = []
        self._taken.clear()

    def state_dict(self, of: Callable[[OptimizerMixer], Any] = OptimizerMixer.state_dict) -> dict[str, Any]:
        """The mixers' states, and the places in their optimizers of the parameters that were packed at a time."""
        return {
            "mixers": [of(mixer) for mixer in self._all],
            "packs": [list(mixer.packs) for mixer in self._all],
            "exact_steps": self._exact_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: it was taken with another number of optimizers, or with other buckets.
        """
        self.release()
        self._exact_steps = state.get("exact_steps")
        mixers = [mixer for optimizer in optimizers for mixer in self.of(optimizer)]
        if len(mixers) != len(state["mixers"]):
            each = len(mixers) // max(1, len(optimizers))
            raise ValueError(
                f"the checkpoint has {len(state['mixers']) // each} optimizers, this run has {len(optimizers)}: "
                "resume with the same configure_optimizers and topology"
            )
        # Fragment by fragment, each packed as it was: a message in flight has the layout of its buckets.
        for mixer, packs, saved in zip(mixers, state["packs"], state["mixers"], strict=True):
            for pack in packs:
                mixer.adopt_pack(pack)
            mixer.load_state_dict(saved)
