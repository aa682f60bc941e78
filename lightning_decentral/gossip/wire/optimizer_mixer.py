"""The mixers of all optimizers: which parameters each mixes, in which buckets, saved and restored together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_decentral.gossip.compute.healing import Healing, first_poisoned, forget_poison
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.shared.compute.buckets import Bucket, with_tail
from lightning_decentral.shared.wire.fsdp import local
from lightning_decentral.shared.wire.transport import Transport

Pack = Callable[[Sequence[nn.Parameter]], list[Bucket]]
"""Parameters as buckets, as their island packs them."""


def healing(most: int, module: nn.Module, incurable: Callable[[], str]) -> Healing:
    """Of a worker that trains this module; as `Healing`."""
    return Healing(most, lambda: first_poisoned((name, local(p)) for name, p in module.named_parameters()), incurable)


class OptimizerMixer:
    """What one optimizer trains, and the mixer that mixes it.

    Args:
        taken: parameters that an optimizer mixes already; a parameter of several is mixed by the first.
    """

    def __init__(self, optimizer: Optimizer, mixer: Mixer, pack: Pack, taken: set[nn.Parameter]) -> None:
        self.optimizer, self.mixer = optimizer, mixer
        self.buckets: list[Bucket] = []
        self.packs: list[int] = []
        self._pack, self._taken = pack, taken

    def adopt(self, number: int | None = None) -> None:
        """Take in what the optimizer got since the last look (gradual unfreezing adds groups); with a number, the next
        so many, frozen or not."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        # With a number a run is resumed, which may not have unfrozen yet what a message in flight holds.
        new = [p for p in dict.fromkeys(parameters) if p not in self._taken and (number or p.requires_grad)][:number]
        if new:
            self._taken.update(new)
            buckets = self._pack(new)
            self.buckets += buckets
            self.packs.append(len(new))
            mixed = with_tail(buckets)
            self.mixer.extend(mixed, [span.matrices for span in mixed])

    def step(self) -> None:
        # Of the first group: schedules change all groups alike.
        healed = self.mixer.healing.healed
        self.mixer.step(float(self.optimizer.param_groups[0].get("lr", 1.0)))
        if self.mixer.healing.healed > healed:
            forget_poison(self.optimizer, local)
        self._store()

    def drain(self) -> None:
        for bucket in self.buckets:
            bucket.adopt()
        self.mixer.drain()
        self._store()

    def _store(self) -> None:
        for bucket in self.buckets:
            bucket.store()


class Mixers:
    """One for each optimizer.

    Args:
        make: a new mixer over a group of its own; collective.
    """

    def __init__(self, make: Callable[[], Mixer], pack: Pack) -> None:
        self._make, self._pack = make, pack
        self._all: list[OptimizerMixer] = []
        self._taken: set[nn.Parameter] = set()

    def __iter__(self) -> Iterator[OptimizerMixer]:
        return iter(self._all)

    def __getitem__(self, index: int) -> OptimizerMixer:
        return self._all[index]

    def of(self, optimizer: Optimizer) -> OptimizerMixer:
        """Of this optimizer; a new one where the optimizers were replaced, on all workers in the same step."""
        for mixer in self._all:
            if mixer.optimizer is optimizer:
                return mixer
        self._all.append(OptimizerMixer(optimizer, self._make(), self._pack, self._taken))
        return self._all[-1]

    def step(self, optimizer: Optimizer) -> None:
        """One round after an update of this optimizer."""
        mixer = self.of(optimizer)
        mixer.adopt()
        mixer.step()

    def share(self, over: Transport, device: torch.device, meet: Callable[[Callable[[], Any]], Any]) -> float | None:
        """w_i / sum_j w_j of push-sum (the first optimizer's where there are several); None: all equal. Collective."""
        shares = [share for mixer in self._all[:1] for share in mixer.mixer.shares()[:1]]
        if not shares:
            return None
        # A poisoned weight would poison all shares: its worker has none.
        own = shares[0].double().to(device).nan_to_num(0.0, 0.0, 0.0)
        total = own.clone()
        meet(lambda: over.all_reduce(total).wait())
        return float(own / total)

    def settle(self) -> None:
        for mixer in self._all:
            mixer.drain()

    def release(self) -> None:
        """Give every parameter a storage of its own again."""
        for mixer in self._all:
            for bucket in mixer.buckets:
                bucket.release()
        self._all = []
        self._taken.clear()

    def state_dict(self) -> dict[str, Any]:
        """The mixers' states, and how many parameters were packed at a time."""
        return {
            "mixers": [mixer.mixer.state_dict() for mixer in self._all],
            "packs": [list(mixer.packs) for mixer in self._all],
        }

    def load_state_dict(self, state: Mapping[str, Any], optimizers: Sequence[Optimizer]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: it was taken with another number of optimizers, or with other buckets.
        """
        if len(optimizers) != len(state["mixers"]):
            raise ValueError(
                f"the checkpoint has {len(state['mixers'])} optimizers, this run has {len(optimizers)}: "
                "resume with the same configure_optimizers"
            )
        self.release()
        for optimizer, packs, saved in zip(optimizers, state["packs"], state["mixers"], strict=True):
            mixer = self.of(optimizer)
            # Packed as they were: a message in flight has the layout of its buckets.
            for number in packs:
                mixer.adopt(number)
            mixer.mixer.load_state_dict(saved)
