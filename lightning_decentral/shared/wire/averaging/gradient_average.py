"""Averages gradients over devices in buckets, overlapped with the backward pass, before other hooks see them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.shared.compute.buckets import chunked
from lightning_decentral.shared.compute.codec.blocks import real
from lightning_decentral.shared.wire.compressed_mean import FlatMean
from lightning_decentral.shared.wire.gradients import UNSEEN, Average, GradientBucket, Launcher, flag, used
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Transport

Place = tuple[int, int]  # (batches, updates)


class GradientAverage(Average):
    """p.grad <- (1/L) sum over the L devices of p.grad, for every watched parameter.

    Hooks see when a gradient is complete. A bucket is sent as soon as all its gradients are complete, in the same order
    on every device, the last parameters first, while the backward pass goes on. There is no wrapper around the module.

    A parameter that a device did not use counts as zero there; one that no device used keeps no gradient.

    Raises:
        RuntimeError: in the backward pass, where a gradient grows again after it was sent, or where a parameter was
            unfrozen without a call that the strategy sees; in the next one, where devices averaged different batches.
    """

    def __init__(
        self,
        mean: FlatMean,  # averages flat gradients over the devices
        hosts: Transport,  # a group of the same devices for CPU tensors, used for this alone
        meet: Callable[[Callable[[], None]], Any],  # runs calls that wait for the other devices
        bucket_bytes: int,  # bytes of one message, unless one parameter has more
        where: Callable[[], Place] = lambda: (0, 0),  # (batches, updates) so far, equal on all devices in an average
    ) -> None:
        super().__init__()
        self._mean, self._hosts, self._meet, self._bucket_bytes = mean, hosts, meet, bucket_bytes
        self._launcher = Launcher(self._launch, self._land_after_backward)
        self._flats: dict[GradientBucket, Tensor] = {}
        self._all: Sequence[nn.Parameter] = ()
        self._needed: list[nn.Parameter] = []
        self._members: list[nn.Parameter] = []
        self._keys: dict[nn.Parameter, int] = {}  # by which a file names what was rounded away of each
        self._open = self._lands = False  # a step without an average yet; whether the backward's end is waited for
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._averaged: dict[nn.Parameter, int] = {}  # since their last update: the version that it would change
        self._where = where
        self._last: tuple[Place, int, Tensor, Pending] | None = None  # last: place, code, sums of (code, code^2)

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients of these parameters from the next backward pass on; known parameters cost a look-up."""
        self._all = parameters
        self.look()

    def look(self) -> None:
        """Watch parameters that were unfrozen since, too."""
        parameters = self._all
        needed = [p for p in parameters if p.requires_grad]
        if [(p.shape, p.dtype) for p in self._members] != self._forms:
            self._launcher.refuse_changed()
        if len(needed) == len(self._needed) and all(map(is_, needed, self._needed)):
            return  # hashes would run Python code
        self._needed = needed
        before = self._launcher.watched
        self._members = members = [p for p in dict.fromkeys(parameters) if p.requires_grad or p in before]
        self._forms = [(p.shape, p.dtype) for p in members]
        if self._launcher.watch(members):
            if before:
                self.layouts.changed()
            chunks = chunked(reversed(members), self._bucket_bytes)  # the last parameters have their gradients first
            self._launcher.begin([GradientBucket(chunk) for chunk in chunks])
            # A key is the number in its module, under which a file names it, or a free one.
            for number, p in [(number, p) for number, p in enumerate(self._all) if p not in self._keys]:
                taken = self._keys.values()
                self._keys[p] = number if number not in taken else max(taken) + 1
            rows = [[(self._keys[p], real(p).numel()) for p in bucket.parameters] for bucket in self._launcher.buckets]
            self._mean.lay([tuple(row) for row in rows])

    def updated(self, optimizer: Optimizer, skipped: bool) -> None:
        """Note that an optimizer has used the averaged gradients, or that a loss scaler has skipped its update."""
        groups = optimizer.param_groups
        keys = lambda: {self._keys[p] for group in groups for p in group["params"] if p in self._keys}  # noqa: E731
        self._mean.updated(keys, skipped)
        for parameter in (p for group in groups for p in group["params"]):
            self._averaged.pop(parameter, None)

    def _withdraw_cleared(self) -> None:
        """Withdraw averages whose gradients were cleared without an update (in another optimizer's turn)."""
        gone = {p: version for p, version in self._averaged.items() if p.grad is None}
        for parameter in gone:
            del self._averaged[parameter]
        # A parameter whose version has changed was updated by something else, a part of an optimizer.
        if cleared := [p for p, version in gone.items() if p._version == version]:
            self._mean.updated(lambda: {self._keys[p] for p in cleared if p in self._keys}, True)

    def state_dict(self) -> dict[str, Any]:
        """Return the mean's state, without averages that no update has used: a resumed run won't have these."""
        waiting = {self._keys[p] for p, version in self._averaged.items() if p._version == version}
        return self._mean.state_dict(waiting)

    def close(self) -> None:
        self._all, self._needed, self._members, self._forms = (), [], [], []
        self._reported, self._last = [], None  # the last comparison is still to be read
        self._launcher.watch(())
        self._launcher.begin(())

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Context in which gradients are only accumulated."""
        self._launcher.paused = True
        try:
            yield
        finally:
            self._launcher.paused = False

    def begin(self) -> None:
        """Begin a step, which averages at least once on every device."""
        self._open = True

    def around(self, closure: Callable[[], Any]) -> Any:
        """Run the closure that computes the gradients of one update."""
        self.begin()
        output = closure()
        # Also where this worker had no loss: the others wait for its part of the average.
        self.finish()
        return output

    def before(self, loss: Tensor) -> None:
        """Prepare this loss's backward pass: it ends with averaged gradients, even if it computes none here."""
        self.look()
        self._withdraw_cleared()
        if not self._launcher.paused and loss.requires_grad:
            self.enter()
            loss.register_hook(lambda _: self._land_after_backward())

    def finish(self) -> None:
        """Average gradients, if no backward pass has averaged them since `begin`."""
        if self._open:
            self.look()
            self.enter()
            self._land()

    @torch.no_grad()
    def _launch(self, bucket: GradientBucket) -> None:
        first = bucket.parameters[0]
        flat = self._flats[bucket] = torch.empty(bucket.elements, dtype=first.dtype, device=first.device)
        bucket.pack_as_views(flat)
        bucket.pending = self._mean.start(real(flat), self._launcher.buckets.index(bucket))

    def _land_after_backward(self) -> None:
        # At the loss or the first gradient: a callback for a backward pass's end can only be queued within it.
        if not self._lands:
            self._lands = self._launcher.begun = True
            if not self.under_way:
                self.enter()
            torch.autograd.Variable._execution_engine.queue_callback(self._land)

    def _land(self) -> None:
        self._lands = False
        self._meet(self._wait)

    def _wait(self) -> None:
        self._launcher.rest()
        if not self._launcher.watched.issuperset(p for p in self._all if p.requires_grad and p.grad is not None):
            raise RuntimeError(UNSEEN)
        buckets = self._launcher.buckets
        gradients = [gradient for bucket in buckets for gradient in bucket.gradients]
        # The hosts exchange which parameters have gradients: no host waits for its device.
        sums = torch.empty(len(gradients) + 3, dtype=torch.int32)  # [flags, news, code of the place, its square]
        flags = flag(gradients, sums[:-3])
        self._check_last()
        sums[-3] = self.news()
        place = self._where()
        sums[-2] = code = _code(place)
        sums[-1] = code**2
        reported = self._hosts.all_reduce(sums)
        self._last = place, code, sums[-2:], reported
        self.report(sums[-3], reported)
        device = buckets[0].parameters[0].device if buckets else sums.device
        # for each gradient: whether any worker has it
        some = iter(used(gradients, flags, partial(self.wait, reported, device)))
        for number, bucket in enumerate(buckets):
            assert bucket.pending is not None
            self.wait(bucket.pending, device)
            flat, by = self._flats.pop(bucket), [next(some) for _ in bucket.parameters]
            if not all(by):
                self._mean.put_back(real(flat), number, [i for i, workers in enumerate(by) if not workers])
            bucket.store(flat, by)
            self._averaged |= {p: p._version for p, workers in zip(bucket.parameters, by, strict=True) if workers}
        self._launcher.begin(buckets)
        self.leave()
        self._open = False

    def _check_last(self) -> None:
        """Raise RuntimeError where devices were in different steps in the last average; checked late, to wait less."""
        if self._last is None:
            return
        place, code, sums, reported = self._last
        reported.wait()
        size = self._hosts.size
        # n sum c^2 > (sum c)^2 unless all are equal.
        if sums.tolist() != [size * code, size * code**2]:
            batches, updates = place
            raise RuntimeError(
                f"worker {self._hosts.rank} averaged gradients of its batch {batches} after {updates} updates, another "
                "worker in a different step: one skipped optimizer.step(), or a batch. Let all workers take the same "
                "updates (a step without gradients may return None)"
            )


def _code(place: Place) -> int:
    """Return a number for (batches, updates), small enough to sum its squares over any number of devices."""
    return (place[0] + 37 * place[1]) % 1009
