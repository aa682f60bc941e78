"""Gradient averaging in buckets: who has a gradient, packed and launched when complete, as DDP's reducer does.

    message = [g_p for p in parameters]     0 where this worker has no gradient
    flag_p  = 1 where it has one, else 0    summed over the workers: how many have, a sparse one as `SPARSE`

What a mean divides by and over whom it goes is left to those who use it: `GradientAverage` (all devices of an island,
while the backward runs), `replicas` (all replicas of a stage, after it), `partial.wire.reducer` (each segment's
contributors, while it runs).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_decentral.shared.compute.buckets import chunked
from lightning_decentral.shared.compute.modules import same
from lightning_decentral.shared.wire.compressed_mean import Mean
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Transport

BUCKET_BYTES = 25 * 2**20  # DDP's
SPARSE = 2**15
"""The flag of a sparse gradient: more than there are workers."""
UNSEEN = (
    "a parameter was unfrozen within a step whose backward the strategy doesn't see, so its gradient isn't averaged: "
    "call self.manual_backward(loss) (with Fabric, fabric.backward), not loss.backward()"
)


@torch.no_grad()
def pack(tensors: Sequence[Tensor | None], like: Sequence[Tensor], flat: Tensor) -> None:
    """flat <- the tensors one behind the other, zeros in the place of None; sparse ones as dense ones."""
    rows = [flat.new_zeros(other.numel()) if t is None else _dense(t) for t, other in zip(tensors, like, strict=True)]
    torch.cat(rows, out=flat)


def parts(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of what `pack` packed."""
    rows = flat.split([other.numel() for other in like])
    # Of one dimension a row is what it has to be.
    return [row if other.dim() == 1 else row.view(other.shape) for row, other in zip(rows, like, strict=True)]


def _dense(tensor: Tensor) -> Tensor:
    return (tensor.to_dense() if tensor.is_sparse else tensor).reshape(-1)


def flag(gradients: Sequence[Tensor | None], flags: Tensor) -> Tensor:
    """flags <- 1 where there is a gradient, `SPARSE` where it is sparse, else 0."""
    flags.fill_(1)  # not a tensor from a list, which a device would wait for
    for index, gradient in enumerate(gradients):
        if gradient is None or gradient.is_sparse:
            flags[index] = 0 if gradient is None else SPARSE
    return flags


def used(gradients: Sequence[Tensor | None], flags: Tensor, pending: Pending) -> list[int]:
    """Of which some worker has a gradient, from the sum of the flags: 0 if none has, `SPARSE` if one is sparse."""
    # Only who lacks one waits for the others, and reads what may lie on a device.
    if all(gradient is not None for gradient in gradients):
        return [SPARSE if gradient is not None and gradient.is_sparse else 1 for gradient in gradients]
    pending.wait()
    return [SPARSE if workers >= SPARSE else min(workers, 1) for workers in flags.tolist()]


class GradientBucket:
    """Gradients of parameters of one type on one device, which travel together.

    Attributes:
        waiting: parameters whose gradient the backward hasn't made yet.
        pending: the message under way.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.elements = sum(p.numel() for p in parameters)
        self.members = frozenset(parameters)
        self.waiting = set(self.members)
        self.pending: Pending | None = None
        self._views: list[Tensor] = []

    @property
    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.parameters]

    @torch.no_grad()
    def pack_as_views(self, flat: Tensor) -> None:
        """flat <- the gradients, which are views of it from then on: what becomes of it needn't be copied back."""
        pack(self.gradients, self.parameters, flat)
        self._views = parts(flat, self.parameters)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            # A gradient has the strides of its parameter, which fused optimizers ask for.
            if parameter.grad is not None and not parameter.grad.is_sparse and parameter.is_contiguous():
                parameter.grad = view

    @torch.no_grad()
    def store(self, means: Tensor, used: Sequence[int]) -> None:
        """.grad <- its mean, where some worker has a gradient; sparse where one is, for optimizers that ask for it."""
        rows, self._views = self._views or parts(means, self.parameters), []
        for parameter, mean, some in zip(self.parameters, rows, used, strict=True):
            if parameter.grad is mean:
                continue  # it is a view
            own = parameter.grad
            if own is not None and not own.is_sparse:
                own.copy_(mean)
            elif some == SPARSE:  # an embedding's rows, unless this worker's own says otherwise
                parameter.grad = mean.to_sparse(1 if own is None else own.sparse_dim())
            elif some:
                parameter.grad = torch.empty_like(parameter).copy_(mean)


Kind = TypeVar("Kind", bound=GradientBucket)


class Launcher(Generic[Kind]):
    """Starts buckets in their order, each as soon as the backward has made all gradients of it and of those before it.

    Args:
        launch: starts a bucket's message.
        first: called at the first gradient since `begin`.

    Attributes:
        paused: gradients are only accumulated meanwhile.

    Raises:
        RuntimeError: in the backward, where a gradient grows again after it was sent.
    """

    def __init__(self, launch: Callable[[Kind], None], first: Callable[[], None] = lambda: None) -> None:
        self.paused = False
        self._launch, self._first = launch, first
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        self.buckets: tuple[Kind, ...] = ()
        self._of: dict[nn.Parameter, int] = {}
        self.begin(())

    def watch(self, parameters: Sequence[nn.Parameter]) -> bool:
        """See the gradients of these and of no others; whether that is new. Without any, all hooks are gone."""
        if set(parameters) == self._hooks.keys():
            return False
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {p: p.register_post_accumulate_grad_hook(self._ready) for p in parameters}
        return True

    @property
    def watched(self) -> frozenset[nn.Parameter]:
        return frozenset(self._hooks)

    def begin(self, buckets: Sequence[Kind]) -> None:
        """Before the backward whose gradients travel in these."""
        if self.buckets != (now := tuple(buckets)):
            self.buckets, self._of = now, {p: index for index, bucket in enumerate(now) for p in bucket.members}
        self._launched, self._begun = 0, False
        for bucket in buckets:
            bucket.waiting, bucket.pending = set(bucket.members), None

    def rest(self) -> None:
        """After the backward: start those that aren't complete."""
        for bucket in self.buckets[self._launched :]:
            self._launched += 1
            self._launch(bucket)

    def _ready(self, parameter: nn.Parameter) -> None:
        index = self._of.get(parameter)
        if self.paused or index is None:
            return
        if not self._begun:
            self._begun = True
            self._first()
        if index < self._launched:
            raise RuntimeError(
                "a gradient grew again after it was sent to the other workers: "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        self.buckets[index].waiting.discard(parameter)
        # Never past one that waits: workers with unequal graphs still pair the right ones.
        while self._launched < len(self.buckets) and not self.buckets[self._launched].waiting:
            self._launched += 1
            self._launch(self.buckets[self._launched - 1])


class GradientAverage:
    """p.grad <- (1/L) sum over the L devices of p.grad, for every watched parameter.

    Hooks see when a gradient is complete. The gradients of a bucket travel together as soon as all of them
    are, buckets in the same order on every device, the last parameters first; the backward pass meanwhile goes on. No
    wrapper: the module, its names and its forward stay what they are.

    A parameter that a device did not use counts as zero there; one that no device used keeps no gradient.

    Args:
        mean: of the gradients over the devices that share them.
        hosts: the transport of the same devices for CPU tensors, for this alone.
        meet: runs what waits for the other devices.
        bucket_bytes: of one message, at most, unless one parameter has more.

    Raises:
        RuntimeError: in the backward pass, where a gradient grows again after it was sent, or is new since `watch`.
    """

    news: Callable[[], bool] = bool
    """Asked after each backward whether this device has some; any device's are known to all (`heard`)."""

    def __init__(
        self, mean: Mean, hosts: Transport, meet: Callable[[Callable[[], None]], Any], bucket_bytes: int
    ) -> None:
        self._mean, self._hosts, self._meet, self._bucket_bytes = mean, hosts, meet, bucket_bytes
        self._told: list[tuple[Tensor, Pending]] = []
        self._every: Sequence[nn.Parameter] = ()
        self._launcher = Launcher(self._launch, self._land_after_backward)
        self._flats: dict[GradientBucket, Tensor] = {}
        self._needed: list[nn.Parameter] = []
        self._open = False

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """These are averaged from the next backward pass on; those that are already cost a look-up."""
        self._every = parameters
        needed = [p for p in parameters if p.requires_grad]
        if same(needed, self._needed):
            return
        self._needed = needed
        before = self._launcher.watched
        members = [p for p in dict.fromkeys(parameters) if p.requires_grad or p in before]
        if self._launcher.watch(members):
            chunks = chunked(reversed(members), self._bucket_bytes)  # the last parameters have their gradients first
            self._launcher.begin([GradientBucket(chunk) for chunk in chunks])
            if before:
                self._mean.forget()

    def again(self) -> None:
        """Some may have been unfrozen since `watch`."""
        self.watch(self._every)

    def heard(self) -> bool:
        """Whether any device has had news since the last call; the same on all of them."""
        told, self._told = self._told, []
        for _, pending in told:
            pending.wait()
        return any(bool(flags[-1]) for flags, _ in told)

    def close(self) -> None:
        self._needed, self._every = [], ()
        self._launcher.watch(())
        self._launcher.begin(())

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Gradients are only accumulated meanwhile."""
        self._launcher.paused = True
        try:
            yield
        finally:
            self._launcher.paused = False

    def begin(self) -> None:
        """Before a step: it averages at least once, on every device."""
        self._open = True

    def finish(self) -> None:
        """Average what no backward pass has averaged since `begin`."""
        if self._open:
            self._land()

    @torch.no_grad()
    def _launch(self, bucket: GradientBucket) -> None:
        first = bucket.parameters[0]
        flat = self._flats[bucket] = torch.empty(bucket.elements, dtype=first.dtype, device=first.device)
        bucket.pack_as_views(flat)
        bucket.pending = self._mean.start(flat, self._launcher.buckets.index(bucket))

    def _land_after_backward(self) -> None:
        # At the first gradient: only within a backward can its end be waited for.
        torch.autograd.Variable._execution_engine.queue_callback(self._land)

    def _land(self) -> None:
        self._meet(self._wait)

    def _wait(self) -> None:
        self._launcher.rest()
        if not self._launcher.watched.issuperset(p for p in self._every if p.requires_grad and p.grad is not None):
            raise RuntimeError(UNSEEN)
        buckets = self._launcher.buckets
        gradients = [gradient for bucket in buckets for gradient in bucket.gradients]
        # The hosts tell each other who used what: no host reads what its device computes.
        flags = flag(gradients, torch.empty(len(gradients) + 1, dtype=torch.int32))
        flags[-1] = self.news()
        told = self._hosts.all_reduce(flags)
        self._told = [*self._told[-31:], (flags, told)]
        some = iter(used(gradients, flags, told))
        for bucket in buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            bucket.store(self._flats.pop(bucket), [next(some) for _ in bucket.parameters])
        self._launcher.begin(buckets)
        self._open = False
