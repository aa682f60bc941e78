"""Data parallelism of a pipeline's stage: its replicas average gradients after the backward pass.

    AllReduce:   g = (1/n) sum_j g_j     before the update; the replicas stay equal

`gossip.GossipReplicas` instead mixes parameters after the update; the replicas then differ, and their mean is evaluated
and saved. A stage of several pipelines works alike with both."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.shared.compute.codec.blocks import real
from lightning_decentral.shared.compute.codec.codec import Codec, Plain
from lightning_decentral.shared.compute.layout import same
from lightning_decentral.shared.plan.arguments import ChoosesStrategy, checked
from lightning_decentral.shared.wire.averaging.equal_replicas import EqualReplicas
from lightning_decentral.shared.wire.averaging.residuals import scale_of
from lightning_decentral.shared.wire.compressed_mean import FlatMean, mean_by, refuse_estimates
from lightning_decentral.shared.wire.gradients import Average, flag, pack, parts, used
from lightning_decentral.shared.wire.mean import mean
from lightning_decentral.shared.wire.meeting.comparison import MakeLayouts, unasked
from lightning_decentral.shared.wire.transport import Transport

Group = Callable[[], Transport]  # makes a new group of the replicas of each part; collective over all workers


class Bond:
    """Connects one worker (a stage) to its replicas; the base class is for a worker without replicas."""

    keeps: bool = False  # true where a worker has state that no other has, and that exact resuming needs

    def gradients(self, own: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients that the optimizer gets, from this worker's own gradients. Collective."""
        return list(own)

    def prepare(self, optimizers: Sequence[Optimizer], module: nn.Module, layouts: MakeLayouts = unasked) -> None:
        """Prepare training of this stage's `module`, once the optimizers exist. Collective. `layouts` makes the
        comparison by which replicas check that they train the same parameters."""

    def replaced(self, optimizers: Sequence[Optimizer]) -> None:
        """Use these optimizers from now on. RuntimeError: another replica keeps its own."""

    def guard(self, check: Any, scaler: Any) -> None:
        """Expect updates to be skipped from now on: where `check.skipped` grows, or by a loss scaler (None: there is
        none)."""

    def updated(self, optimizer: Optimizer, epoch: int) -> None:
        """Hook after an optimizer's update, also a skipped one; called equally often on all replicas. Collective."""

    def settle(self) -> None:
        """Wait for messages in flight and apply them; values written since the last update stay."""

    def note(self, written: Sequence[Tensor]) -> None:
        """Take note of tensors that were written while the mean was swapped in; the mean is swapped out after this."""

    def share(self) -> float | None:
        """Return this worker's weight in the mean of the replicas; None: all are equal. Collective."""
        return None

    def release(self) -> None:
        """Restore the parameters' own storage, as before `prepare`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that exact resuming needs, as tensors and primitives."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class Replicas(ChoosesStrategy, ABC):
    """Base class of the ways to keep a stage's replicas together, for `replicas=`; constructing one starts nothing."""

    drifts: ClassVar[bool]  # true where the replicas' parameters may differ between steps

    def strategy(self, cls: type) -> type:
        return cls

    def check(self, size: int, per_node: int) -> None:
        """Raise ValueError, with the remedy, where `size` replicas, `per_node` on a node, can't be served."""
        return

    @abstractmethod
    def join(self, group: Group, hosts: Group, device: torch.device, per_node: int) -> Bond:
        """Return this worker's `Bond`. Collective. `hosts` makes the same groups as `group`, for CPU tensors."""


@checked
@dataclass(frozen=True)
class AverageGradients(Replicas):
    """Replicas average their gradients at every batch, as under DDP, and stay equal.

    Args:
        codec: codec of the gradients, for slow links between pipelines (`compressed_mean`).
    """

    drifts: ClassVar[bool] = False
    codec: Codec = Plain()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        refuse_estimates(self.codec)

    def join(self, group: Group, hosts: Group, device: torch.device, per_node: int) -> Bond:
        if not self.codec.encodes:
            return _Averaging(group(), hosts(), group())
        return _CompressedAveraging(mean_by(self.codec, group, device), device, hosts(), group())


class _Replicated(Bond):
    """Averages gradients; a gradient that a worker lacks counts as zero, a gradient that all lack stays None."""

    def __init__(self, hosts: Transport, buffers: Transport) -> None:
        self._hosts, self._over_buffers = hosts, buffers
        self._equal, self._average = EqualReplicas(), Average()
        self._optimizers: Sequence[Optimizer] = ()
        self._trained: list[Tensor] = []

    def prepare(self, optimizers: Sequence[Optimizer], module: nn.Module, layouts: MakeLayouts = unasked) -> None:
        self._optimizers = optimizers
        self._equal.begin(module, self._over_buffers, layouts, lambda: self._optimizers)
        self._equal.join(self._average)

    def replaced(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._equal.replaced()

    def _count(self, own: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Return, for each gradient, how many replicas have it, and the wait for these numbers. Collective."""
        before, self._trained = self._trained, list(parameters)
        if before and not same(before, self._trained):
            self._average.layouts.changed()
        self._average.enter()
        # The hosts exchange which parameters have gradients: no host waits for its device.
        sums = torch.empty(len(own) + 1, dtype=torch.int32)  # [flags, news]
        flags = flag(own, sums[:-1])
        sums[-1] = self._average.news()
        pending = self._hosts.all_reduce(sums)  # unequal numbers of parameters would give sums of unequal lengths
        self._average.report(sums[-1], pending)
        return flags, pending.wait

    def updated(self, optimizer: Optimizer, epoch: int) -> None:
        """Share the first replica's running statistics with all."""
        if self._equal.updates is not None:
            self._equal.advance(epoch)

    def release(self) -> None:
        self._equal.close()
        self._average = Average()


class _Averaging(_Replicated):
    def __init__(self, over: Transport, *others: Transport) -> None:
        super().__init__(*others)
        self._over = over

    def gradients(self, own: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
        some = used(own, *self._count(own, parameters))
        pairs = zip(own, parameters, some, strict=True)
        filled = [torch.zeros_like(p) if gradient is None else gradient for gradient, p, one in pairs if one]
        means = iter(mean(filled, self._over))
        self._average.leave()
        return [next(means) if one else None for one in some]


class _CompressedAveraging(_Replicated):
    """Averages compressed gradients, one flat tensor of each type over all parameters, with error feedback for each."""

    keeps = True

    def __init__(self, by: FlatMean, device: torch.device, *others: Transport) -> None:
        super().__init__(*others)
        self._by, self._device = by, device
        self._check: Any = None
        self._skipped = 0  # skipped updates that `_check` has counted
        self._keys: dict[Tensor, int] = {}

    def prepare(self, optimizers: Sequence[Optimizer], module: nn.Module, layouts: MakeLayouts = unasked) -> None:
        super().prepare(optimizers, module, layouts)
        # A parameter's key is its number in the stage, by which a file names it, whichever parameters are trained.
        self._keys = {parameter: number for number, parameter in enumerate(module.parameters())}

    def guard(self, check: Any, scaler: Any) -> None:
        self._check, self._skipped = check, check.skipped
        if scaler is not None or check.nonfinite == "skip":
            self._by.guard(scale_of(scaler, self._device), scaled=False)  # the stage's gradients are unscaled already

    def updated(self, optimizer: Optimizer, epoch: int) -> None:
        own = [p for group in optimizer.param_groups for p in group["params"]]
        before, self._skipped = self._skipped, 0 if self._check is None else self._check.skipped
        self._by.updated(lambda: {self._keys[p] for p in own if p in self._keys}, self._skipped > before)
        super().updated(optimizer, epoch)

    @torch.no_grad()
    def gradients(self, own: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
        counts = self._count(own, parameters)
        kinds = sorted({p.dtype for p in parameters}, key=str)  # on all replicas in the same order
        rows = [[i for i, p in enumerate(parameters) if p.dtype == kind] for kind in kinds]
        key = {i: self._keys.setdefault(p, len(self._keys)) for i, p in enumerate(parameters)}
        self._by.lay([tuple((key[i], real(parameters[i]).numel()) for i in row) for row in rows])
        flats = []  # (elements of all parameters of a type,) each
        for row in rows:
            like = [parameters[i] for i in row]
            flats.append(like[0].new_empty(sum(p.numel() for p in like)))
            pack([own[i] for i in row], like, flats[-1])
        for pending in [self._by.start(real(flat), place) for place, flat in enumerate(flats)]:
            pending.wait()
        some, found = used(own, *counts), list(own)
        for place, (row, flat) in enumerate(zip(rows, flats, strict=True)):
            self._by.put_back(real(flat), place, [number for number, i in enumerate(row) if not some[i]])
            for i, part in zip(row, parts(flat, [parameters[i] for i in row]), strict=True):
                found[i] = torch.empty_like(parameters[i]).copy_(part) if some[i] else None
        self._average.leave()
        return found

    def state_dict(self) -> dict[str, Any]:
        return self._by.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._by.load_state_dict(state)
