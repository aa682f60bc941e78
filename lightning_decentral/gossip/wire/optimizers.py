"""The mixers of all optimizers, saved and restored together, and kept or made anew when optimizers are replaced.

Who holds which mixer:

    Mixers
      OptimizerMixer      for each optimizer, and each fragment of the model (mostly one)
        Mixer             sends and mixes the buckets of its parameters
        StateMixer        for each state of the optimizer that travels; the first fragment's has them all
          Mixer           sends and mixes the buckets of the state
      MixerFactory        makes all of these; knows which parameters are mixed (`making.Mixed`)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.gossip.wire.exchange import Traffic
from lightning_decentral.gossip.wire.making import Mixed, MixerFactory, parameters_of
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.optimizer_mixer import OptimizerMixer
from lightning_decentral.shared.compute.modules import same
from lightning_decentral.shared.wire.transport import Transport


def heirs_of(
    mixers: Sequence[OptimizerMixer], before: Sequence[Optimizer], live: Sequence[Optimizer]
) -> dict[Optimizer, Optimizer] | None:
    """Match {gone optimizer: new optimizer that trains all its parameters}; None if a parameter has no optimizer."""
    gone = [optimizer for optimizer in before if optimizer not in live]
    new = [optimizer for optimizer in live if optimizer not in before]
    heirs = {}
    for optimizer in gone:
        own = {p for mixer in mixers if mixer.optimizer is optimizer for p in mixer.own}
        heir = next((candidate for candidate in new if own.issubset(parameters_of(candidate))), None)
        if heir is None:
            return None
        new.remove(heir)
        heirs[optimizer] = heir
    return heirs


class Mixers:
    """Mixers of all optimizers, for each optimizer as many as the model has fragments. A parameter is mixed after each
    update of any optimizer that has it. The mixers depend on an optimizer's parameters, not on its identity. `making`
    returns the factory when an optimizer's mixers are made."""

    def __init__(self, making: Callable[[], MixerFactory]) -> None:
        self._making, self.mixed = making, Mixed()  # all mixed parameters; `watch` compares them between workers
        self._all: list[OptimizerMixer] = []
        self._live: list[Optimizer] = []
        self.exact_steps: int | None = None  # of this run, once known
        self._past = Traffic()  # of mixers that were replaced
        self._taken: set[nn.Parameter] = set()
        self._others: dict[Optimizer, tuple[tuple[int, int], list[OptimizerMixer]]] = {}

    def __iter__(self) -> Iterator[OptimizerMixer]:
        return iter(self._all)

    def __getitem__(self, index: int) -> OptimizerMixer:
        return self._all[index]

    def of(self, optimizer: Optimizer) -> list[OptimizerMixer]:
        """Return an optimizer's mixers; makes them for a new optimizer, on all workers in the same step."""
        if found := [mixer for mixer in self._all if mixer.optimizer is optimizer]:
            return found
        self._live.append(optimizer)
        self.mixed.admit(len(self._live))
        made = self._made(optimizer)
        self._all += made
        return made

    def _made(self, optimizer: Optimizer) -> list[OptimizerMixer]:
        making = self._timed()
        mixers, states = making.mixers(), making.states(optimizer)
        made: list[OptimizerMixer] = []
        for place, mixer in enumerate(mixers):
            fragment, mixed = (place, len(mixers)), () if place else states
            own = partial(self._others_sick, mixer), partial(self._place, mixer)
            made.append(OptimizerMixer(optimizer, mixer, making, self._taken, fragment, mixed, *own))
        return made

    def _place(self, own: Mixer) -> int:
        order = list(dict.fromkeys(mixer.optimizer for mixer in self._all))
        return next(order.index(mixer.optimizer) for mixer in self._all if mixer.mixer is own)

    def _others_sick(self, own: Mixer) -> bool:
        return any(mixer.recovery.sick for mixer in self._all if mixer.mixer is not own)

    def traffic(self) -> Traffic:
        """Traffic of all mixers; a healing of several optimizers or fragments counts once."""
        healed = max((mixer.mixer.healing.healed for mixer in self._all), default=0)
        return replace(sum((mixer.traffic() for mixer in self._all), self._past), healed=healed)

    def _timed(self) -> MixerFactory:
        """Return the factory with the exact steps of the first factory, or of the resumed run."""
        # If a run is made longer, a share of it would grow, and a rule that has begun mustn't end.
        making = self._making()
        if self.exact_steps is None:
            self.exact_steps = making.exact_steps
        return replace(making, exact_steps=self.exact_steps, mixed=self.mixed)

    def adopt(self, optimizer: Optimizer) -> None:
        """Add this optimizer's trained parameters to its mixers."""
        for mixer in self.of(optimizer):
            mixer.adopt()

    def follow(self, live: Sequence[Optimizer]) -> None:
        """Use these optimizers from now on, on all workers in the same step. If each new optimizer trains the
        parameters of an old one, the old one's rounds, rule states and messages in flight continue. Otherwise all
        workers are set to their mean, and rules begin anew."""
        if same(live, self._live):
            return
        live = [*dict.fromkeys(live)]
        heirs = heirs_of(self._all, self._live, live)
        if heirs is None:
            self._begin_anew(live)
            return
        if any(mixer.states for mixer in self._all):
            self.mixed.begin_anew(self.mixed.by, len(live))
        making = self._timed()
        for before, optimizer in heirs.items():
            mixers, states = self.of(before), making.states(optimizer)
            for place, mixer in enumerate(mixers):
                self._past += mixer.hand_over(optimizer, () if place else states)
        for optimizer in live:
            self.adopt(optimizer)
        self._all = [mixer for optimizer in live for mixer in self.of(optimizer)]
        self._live = live

    def _begin_anew(self, live: Sequence[Optimizer]) -> None:
        # A parameter is mixed after the updates of the first of the new optimizers that trains it.
        pairs = [(p, place) for place, optimizer in enumerate(live) for p in parameters_of(optimizer)]
        by = {p: place for p, place in reversed(pairs) if p.requires_grad or p.grad is not None}
        self.mixed.begin_anew(by, len(live))
        self.settle()
        # A parameter that is no longer mixed is set to the mean, too: it may be mixed again later.
        self._timed().meet([p for mixer in self._all for bucket in mixer.buckets for p in bucket.parameters])
        self._give_back()
        self._past = self.traffic()
        made = [mixer for optimizer in live for mixer in self._made(optimizer)]
        for new, old in zip(made, self._all, strict=False):
            counted = {key: old.mixer.kept()[key] for key in ("round", "steps", "peak")}
            new.mixer.load_state_dict({**new.mixer.state_dict(), **counted})
            new.mixer.healing.healed = old.mixer.healing.healed
        self._all, self._live = made, [*live]  # at once: other threads may read the rounds meanwhile
        for optimizer in live:
            self.adopt(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Take one round after an update of this optimizer, for all its parameters."""
        own = self.of(optimizer)
        for mixer in own:
            mixer.adopt()
        if any(mixer.strayed for mixer in own):
            self._begin_anew(self._live)
            own = self.of(optimizer)
        for mixer in own:
            for state in mixer.states:
                state.adopt(mixer.own)
            mixer.step()
        for mixer in self._sharing(optimizer, own) if len(self._live) > 1 else ():
            mixer.step(by=optimizer)

    def _sharing(self, optimizer: Optimizer, own: Sequence[OptimizerMixer]) -> list[OptimizerMixer]:
        """Mixers of other optimizers that mix a parameter that this optimizer trains, too."""
        seen = len(self._taken), own[0].looks
        if self._others.get(optimizer, ((), ()))[0] != seen:
            trained = set(parameters_of(optimizer))
            others = [mixer for mixer in self._all if mixer.optimizer is not optimizer and mixer.own & trained]
            self._others[optimizer] = seen, others
        return self._others[optimizer][1]

    def share(self, over: Transport, device: torch.device, meet: Callable[[Callable[[], Any]], Any]) -> float | None:
        """This worker's weight in the mean: w_i / sum_j w_j of the first optimizer; None if equal; collective."""
        if not (shares := [share for mixer in self._all[:1] for share in mixer.mixer.shares()[:1]]):
            return None
        # A poisoned weight would poison all weights: its worker counts 0.
        own = shares[0].double().to(device).nan_to_num(0.0, 0.0, 0.0)
        total = own.clone()
        meet(lambda: over.all_reduce(total).wait())
        return float(own / total)

    def shown(self, standing: bool = False) -> Mapping[int, Tensor]:
        """{address of a parameter: tensor to evaluate instead}, for rules that evaluate anchors."""
        return dict(pair for mixer in self._all for pair in mixer.shown(standing))

    def note(self, written: Sequence[Tensor]) -> None:
        """Note that the parameters replaced the mean again, and which were written to meanwhile."""
        for mixer in self._all:
            mixer.written.note(written)

    def settle(self) -> None:
        for mixer in self._all:
            mixer.drain()

    @torch.no_grad()
    def end(self) -> None:
        """Mix all messages in flight at the end of training; values written since the last step stay."""
        kept = [pair for mixer in self._all for pair in mixer.written.kept()]
        self.settle()
        for parameter, written in kept:
            parameter.copy_(written)
        self.note([parameter for parameter, _ in kept])

    def release(self) -> None:
        """Give every parameter and state its own storage again, instead of a view of a bucket."""
        self._give_back()
        self._all, self._live = [], []
        self.mixed.close()

    def _give_back(self) -> None:
        for mixer in self._all:
            for bucket in chain(mixer.buckets, *(state.buckets for state in mixer.states)):
                bucket.release()
        self._taken.clear()
        self._others.clear()

    def state_dict(self, state_of: Callable[[OptimizerMixer], Any] = OptimizerMixer.state_dict) -> dict[str, Any]:
        """State to save: the mixers' states, and the indices of the parameters that were packed at a time."""
        return {
            "mixers": [state_of(mixer) for mixer in self._all],
            "packs": [mixer.packs for mixer in self._all],
            "exact_steps": self.exact_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Restore what `state_dict` returned. ValueError: the state was saved with another number of optimizers, or
        other buckets."""
        with self.mixed.reading():
            self._give_back()
            self._all, self._live = [], []
            self.exact_steps = state.get("exact_steps")
            optimizers = [*dict.fromkeys(optimizers)]
            mixers = [mixer for optimizer in optimizers for mixer in self.of(optimizer)]
            if len(mixers) != len(state["mixers"]):
                each = len(mixers) // max(1, len(optimizers))
                raise ValueError(
                    f"the checkpoint has {len(state['mixers']) // each} optimizers, this run has {len(optimizers)}: "
                    "resume with the checkpoint's configure_optimizers and topology"
                )
            # Fragment by fragment, packed as when saved: a message in flight has the layout of its buckets.
            for mixer, packs, saved in zip(mixers, state["packs"], state["mixers"], strict=True):
                for pack in packs:
                    mixer.adopt_pack(pack)
                mixer.load_state_dict(saved)
