"""Data parallelism of a pipeline's stage: gradients averaged over its replicas, after the backward, or another way.

    AllReduce:   g = (1/n) sum_j g_j     before the update; the replicas stay equal

Another way mixes parameters after the update (`gossip.GossipReplicas`); the replicas then drift, and what is
evaluated and saved is their mean. A worker that has replicas (a stage of several pipelines) sees neither way.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.shared.compute.codec.blocks import real
from lightning_decentral.shared.compute.codec.codec import Codec, Plain
from lightning_decentral.shared.compute.modules import same
from lightning_decentral.shared.plan.arguments import ChoosesStrategy, checked
from lightning_decentral.shared.wire.averaging.equal_replicas import EqualReplicas
from lightning_decentral.shared.wire.averaging.residuals import scale_of
from lightning_decentral.shared.wire.compressed_mean import FlatMean, mean_by, refuse_estimates
from lightning_decentral.shared.wire.gradients import Average, flag, pack, parts, used
from lightning_decentral.shared.wire.mean import mean
from lightning_decentral.shared.wire.meeting.comparison import MakeLayouts, unasked
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Transport

Group = Callable[[], Transport]  # makes a new group of the replicas of each part; collective over all workers


class Bond:
    """One worker's tie to its replicas; this one is of a worker that has none."""

    keeps: bool = False  # true where it has what no other has, and what it needs to go on exactly

    def gradients(self, own: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients that the optimizer gets for this worker's own ones of these parameters. Collective."""
        return list(own)

    def prepare(self, optimizers: Sequence[Optimizer], module: nn.Module, layouts: MakeLayouts = unasked) -> None:
        """The optimizers exist; `module` is of this stage. Collective. By `layouts` replicas see that they go on
        training the same."""

    def replaced(self, optimizers: Sequence[Optimizer]) -> None:
        """Take these optimizers from now on. RuntimeError where another replica goes on with its own."""

    def guard(self, check: Any, scaler: Any) -> None:
        """Skip updates from now on where a check of gradients counts one more as `skipped`, or by a loss scaler; None:
        there is none."""

    def updated(self, optimizer: Optimizer, epoch: int) -> None:
        """Follow up each update of an optimizer, or where it was skipped; on all replicas equally often. Collective."""

    def settle(self) -> None:
        """Land what is in flight; what somebody wrote since the last update stays."""

    def note(self, written: Sequence[Tensor]) -> None:
        """The mean has left the parameters' place; these were written meanwhile."""

    def share(self) -> float | None:
        """This worker's weight in the mean of the replicas; None: all equal. Collective."""
        return None

    def release(self) -> None:
        """Leave the parameters as they were found."""

    def state_dict(self) -> dict[str, Any]:
        """State that is needed to go on exactly, as tensors and primitives."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class Replicas(ChoosesStrategy, ABC):
    """A value: constructing it starts nothing."""

    drifts: ClassVar[bool]  # true where the replicas' parameters may differ between steps

    def strategy(self, cls: type) -> type:
        return cls

    def check(self, size: int, per_node: int) -> None:
        """See that so many replicas, so many of them on a node, can be served. ValueError with the remedy."""
        return

    @abstractmethod
    def join(self, group: Group, hosts: Group, device: torch.device, per_node: int) -> Bond:
        """This worker's tie. Collective. `hosts` is as `group`, between their hosts."""


@checked
@dataclass(frozen=True)
class AverageGradients(Replicas):
    """Replicas average their gradients at every batch, as under DDP, and stay equal.

    Args:
        codec: of the gradients, for slow links between pipelines (`compressed_mean`).
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
    """Gradients are averaged; what a worker didn't use is zero there, what nobody used stays None."""

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

    def _count(self, own: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> tuple[Tensor, Pending]:
        """Count, for each gradient, the replicas that have it; known once the sum is there. Collective."""
        before, self._trained = self._trained, list(parameters)
        if before and not same(before, self._trained):
            self._average.layouts.changed()
        self._average.enter()
        # The hosts report to each other who used what: none reads what its device computes.
        sums = torch.empty(len(own) + 1, dtype=torch.int32)  # [flags, news]
        flags = flag(own, sums[:-1])
        sums[-1] = self._average.news()
        pending = self._hosts.all_reduce(sums)  # with other numbers, sums would be of other lengths
        self._average.report(sums[-1], pending)
        return flags, pending

    def updated(self, optimizer: Optimizer, epoch: int) -> None:
        """The first one's running statistics for all."""
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
    """Averaging by codes, one flat tensor of each type: of all parameters, so that each keeps what was rounded away."""

    keeps = True

    def __init__(self, by: FlatMean, device: torch.device, *others: Transport) -> None:
        super().__init__(*others)
        self._by, self._device = by, device
        self._check: Any = None
        self._skipped = 0  # of the updates that `_check` has counted
        self._keys: dict[Tensor, int] = {}

    def prepare(self, optimizers: Sequence[Optimizer], module: nn.Module, layouts: MakeLayouts = unasked) -> None:
        super().prepare(optimizers, module, layouts)
        # By its number in the stage, under which a file names it, whatever is trained by then.
        self._keys = {parameter: number for number, parameter in enumerate(module.parameters())}

    def guard(self, check: Any, scaler: Any) -> None:
        self._check, self._skipped = check, check.skipped
        if scaler is not None or check.nonfinite == "skip":
            self._by.guard(scale_of(scaler, self._device), scaled=False)  # a stage has taken the scale off

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
