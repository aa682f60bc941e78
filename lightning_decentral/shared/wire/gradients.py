"""Gradient averaging in buckets over the devices of an island, overlapped with the backward (as DDP's reducer)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.shared.compute.buckets import chunked
from lightning_decentral.shared.wire.gradient_bucket import GradientBucket, Launcher, flag, pack, used
from lightning_decentral.shared.wire.transport import Transport

BUCKET_BYTES = 25 * 2**20  # DDP's


class GradientAverage:
    """p.grad <- (1/L) sum over the L devices of p.grad, for every watched parameter.

    Hooks see when a gradient is complete. The gradients of a bucket travel as one all-reduce as soon as all of them
    are, buckets in the same order on every device, the last parameters first; the backward pass meanwhile goes on. No
    wrapper: the module, its names and its forward stay what they are.

    A parameter that a device did not use counts as zero there; one that no device used keeps no gradient. Who used what
    the hosts tell each other: no host reads what its device computes.

    Args:
        over: the transport of the devices that share gradients, for this alone.
        hosts: the same, for CPU tensors.
        meet: runs what waits for the other devices.
        bucket_bytes: of one all-reduce, at most, unless one parameter has more.

    Raises:
        RuntimeError: in the backward pass, where a gradient grows again after it was sent.
    """

    def __init__(
        self, over: Transport, hosts: Transport, meet: Callable[[Callable[[], None]], Any], bucket_bytes: int
    ) -> None:
        self._over, self._hosts, self._meet, self._bucket_bytes = over, hosts, meet, bucket_bytes
        self._launcher = Launcher(self._launch, self._land_after_backward)
        self._flats: dict[GradientBucket, Tensor] = {}
        self._open = False

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """These are averaged from the next backward pass on; those that are already cost a look-up."""
        before = self._launcher.watched
        members = [p for p in dict.fromkeys(parameters) if p.requires_grad or p in before]
        if self._launcher.watch(members):
            chunks = chunked(reversed(members), self._bucket_bytes)  # the last parameters have their gradients first
            self._launcher.begin([GradientBucket(chunk) for chunk in chunks])

    def close(self) -> None:
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
        pack(bucket.gradients, bucket.parameters, flat)
        bucket.pending = self._over.all_reduce(flat.div_(self._over.size))

    def _land_after_backward(self) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._land)

    def _land(self) -> None:
        self._meet(self._wait)

    def _wait(self) -> None:
        self._launcher.rest()
        buckets = self._launcher.buckets
        gradients = [gradient for bucket in buckets for gradient in bucket.gradients]
        flags = flag(gradients, torch.empty(len(gradients), dtype=torch.int32))
        some = iter(used(gradients, flags, self._hosts.all_reduce(flags)))
        for bucket in buckets:
            assert bucket.pending is not None
            bucket.pending.wait()
            bucket.store(self._flats.pop(bucket), [next(some) for _ in bucket.parameters])
        self._launcher.begin(buckets)
        self._open = False
