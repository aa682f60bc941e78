"""Gradient averaging in buckets, which are packed and sent when complete, as DDP's reducer does.

    message = [g_p for p in parameters]     0 where this worker has no gradient
    flag_p  = 1 where it has one, else 0    summed over workers: how many have a gradient; `SPARSE` for a sparse one

The callers choose the divisor and the group: `averaging` (all devices of an island, during the backward pass),
`pipeline_replicas` (all replicas of a stage, after the backward pass), `partial.wire.reducer` (each segment's
contributors, during the backward pass)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_decentral.shared.compute.device import HostStopwatch, stopwatch
from lightning_decentral.shared.compute.layout import Place, dense_strides
from lightning_decentral.shared.wire.meeting.comparison import TrainingComparison
from lightning_decentral.shared.wire.pending import Pending

BUCKET_BYTES = 25 * 2**20  # DDP's default
SPARSE = 2**15  # the flag of a sparse gradient: more than there are workers
UNSEEN = (
    "a parameter was unfrozen within a step whose backward the strategy doesn't see, so its gradient isn't averaged: "
    "call self.manual_backward(loss) (with Fabric, fabric.backward), not loss.backward()"
)


@torch.no_grad()
def pack(tensors: Sequence[Tensor | None], like: Sequence[Tensor], flat: Tensor) -> None:
    """Pack the tensors into `flat`, one behind the other, None as zeros, and sparse tensors as dense tensors."""
    dense = [t.to_dense() if t is not None and t.is_sparse else t for t in tensors]
    pairs = zip(dense, like, strict=True)
    torch.cat([flat.new_zeros(other.numel()) if t is None else t.reshape(-1) for t, other in pairs], out=flat)


def parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the tensors that `pack` packed."""
    rows = flat.split([other.numel() for other in like])
    # tensors of one dimension need no view
    return [row if other.dim() == 1 else row.view(other.shape) for row, other in zip(rows, like, strict=True)]


def flag(gradients: Sequence[Tensor | None], flags: Tensor) -> Tensor:
    """Fill the flags: 1 where there is a gradient, `SPARSE` where it is sparse, else 0."""
    flags.fill_(1)  # (gradients,): not a tensor from a list, which a device would wait for
    for index, gradient in enumerate(gradients):
        if gradient is None or gradient.is_sparse:
            flags[index] = 0 if gradient is None else SPARSE
    return flags


def used(gradients: Sequence[Tensor | None], flags: Tensor, wait: Callable[[], None]) -> list[int]:
    """Return for each gradient, from the flags' sum: 0 if no worker has it, `SPARSE` if one is sparse, else 1.
    `wait` waits for the sum."""
    # Only a worker without some gradient waits for the sum, and reads it from the device.
    if all(gradient is not None for gradient in gradients):
        return [SPARSE if gradient is not None and gradient.is_sparse else 1 for gradient in gradients]
    wait()
    return [SPARSE if workers >= SPARSE else min(workers, 1) for workers in flags.tolist()]


class GradientBucket:
    """Bucket of gradients of one type on one device, which are sent as one message."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.elements = sum(p.numel() for p in parameters)
        self.members = frozenset(parameters)
        self.waiting = set(self.members)  # parameters whose gradients aren't computed yet
        self.pending: Pending | None = None  # the message under way
        self._views: list[Tensor] = []  # views of the flat message, one for each parameter

    @property
    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.parameters]

    @torch.no_grad()
    def pack_as_views(self, flat: Tensor) -> None:
        """Pack the gradients into `flat` and make them views of it, so that the mean needn't be copied back."""
        pack(self.gradients, self.parameters, flat)
        self._views = parts(flat, self.parameters)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            # A gradient gets the strides of its parameter, as fused optimizers need.
            if parameter.grad is not None and not parameter.grad.is_sparse and parameter.is_contiguous():
                parameter.grad = view

    @torch.no_grad()
    def store(self, means: Tensor, used: Sequence[int]) -> None:
        """Set .grad to its mean, where some worker has a gradient; sparse where one is, for optimizers that need it."""
        rows, self._views = self._views or parts(means, self.parameters), []
        for parameter, mean, some in zip(self.parameters, rows, used, strict=True):
            if parameter.grad is mean:
                continue  # `.grad` is a view of the message
            own = parameter.grad
            if own is not None and not own.is_sparse:
                own.copy_(mean)
            elif some == SPARSE:  # sparse in rows (an embedding's), unless this worker's own gradient shows otherwise
                parameter.grad = mean.to_sparse(1 if own is None else own.sparse_dim())
            elif some:
                parameter.grad = torch.empty_like(parameter).copy_(mean)


class Average:
    """Base class of averages of gradients, with which workers also learn whether any of them has news to compare."""

    news: Callable[[], bool] = bool  # called after each backward pass: news for `any_news` on all workers
    layouts = TrainingComparison()  # called where the trained parameters have changed
    under_way = False  # true from a backward pass's begin until its gradients are averaged

    def __init__(self) -> None:
        self._reported: list[tuple[Tensor, Pending]] = []  # news of the last 32 averages
        self._waited: HostStopwatch | None = None

    def enter(self) -> None:
        """Begin an average, which every worker must enter; does nothing within one."""
        self.under_way = True
        self.layouts.begin()

    def leave(self) -> None:
        self.under_way = False
        self.layouts.done()

    def wait(self, pending: Pending, device: torch.device) -> None:
        """Wait for a message with gradients on `device`, and count the seconds."""
        self._waited = self._waited or stopwatch(device)
        self._waited.during([pending.wait])

    @property
    def wait_seconds(self) -> float:
        """Seconds so far in which training waited for other workers' gradients."""
        return 0.0 if self._waited is None else self._waited.seconds()

    def report(self, news: Tensor, pending: Pending) -> None:
        """Record how many workers have news: known once `pending` has arrived."""
        self._reported = [*self._reported[-31:], (news, pending)]

    def any_news(self) -> bool:
        """Return whether any worker has had news since the last call; the same answer on all workers."""
        reported, self._reported = self._reported, []
        for _, pending in reported:
            pending.wait()
        return any(bool(news) for news, _ in reported)


Kind = TypeVar("Kind", bound=GradientBucket)


class Launcher(Generic[Kind]):
    """Sends buckets in order, each as soon as its gradients and those of earlier buckets are complete. RuntimeError: in
    the backward pass, where a gradient grows again after it was sent."""

    def __init__(self, launch: Callable[[Kind], None], first: Callable[[], None] = lambda: None) -> None:
        self.paused = False  # gradients are only accumulated meanwhile
        self.begun = False  # whether a backward has begun since `begin`
        # Start a bucket's message; follow the first gradient since `begin`, unless `begun` was set before.
        self._launch, self._first = launch, first
        self._hooks: dict[nn.Parameter, tuple[RemovableHandle, Any]] = {}
        self._seen: list[tuple[torch.Size, torch.dtype]] = []  # handles of the hooks, in order of the parameters
        self.buckets: tuple[Kind, ...] = ()
        self._of: dict[nn.Parameter, int] = {}  # {parameter: number of its bucket}
        self.begin(())

    def watch(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Put hooks on these parameters and on no others; return whether that changed any. ValueError: a parameter has
        another shape or type than when it got its hook."""
        if parameters:
            self.refuse_changed()
        if set(parameters) == self._hooks.keys():
            return False
        for parameter in self._hooks.keys() - set(parameters):
            self._hooks.pop(parameter)[0].remove()
        for parameter in (p for p in parameters if p not in self._hooks):
            # As DDP's hooks: after all of the user's own hooks of the parameter. The node is kept here, as autograd
            # makes a new one when no reference is left.
            node = get_gradient_edge(parameter).node
            self._hooks[parameter] = node.register_hook(partial(self._ready, parameter)), node
        self._seen = [(p.shape, p.dtype) for p in self._hooks]
        return True

    def refuse_changed(self) -> None:
        """Raise ValueError where a watched parameter has got another shape or type."""
        # The autograd node that a hook holds has the former shape and type, and so have messages.
        if [(p.shape, p.dtype) for p in self._hooks] != self._seen:
            for parameter, (shape, dtype) in zip(self._hooks, self._seen, strict=True):
                Place(shape, dtype, dense_strides(parameter)).refuse_changed(parameter)

    @property
    def watched(self) -> frozenset[nn.Parameter]:
        return frozenset(self._hooks)

    def begin(self, buckets: Sequence[Kind]) -> None:
        """Prepare a backward pass whose gradients are sent in these buckets."""
        if self.buckets != (now := tuple(buckets)):
            self.buckets, self._of = now, {p: index for index, bucket in enumerate(now) for p in bucket.members}
        self._launched, self.begun = 0, False  # number of sent buckets
        for bucket in buckets:
            bucket.waiting, bucket.pending = set(bucket.members), None

    def rest(self) -> None:
        """Send the incomplete buckets, after the backward pass."""
        for bucket in self.buckets[self._launched :]:
            self._launched += 1
            self._launch(bucket)

    def _ready(self, parameter: nn.Parameter, *_: object) -> None:
        index = self._of.get(parameter)
        if self.paused or index is None:
            return
        if not self.begun:
            self.begun = True
            self._first()
        if index < self._launched:
            raise RuntimeError(
                "a gradient grew again after it was sent to the other workers: "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        self.buckets[index].waiting.discard(parameter)
        # In order, never past an incomplete bucket: so messages match between workers with unequal graphs.
        while self._launched < len(self.buckets) and not self.buckets[self._launched].waiting:
            self._launched += 1
            self._launch(self.buckets[self._launched - 1])
