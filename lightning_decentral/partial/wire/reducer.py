"""Gradient averaging over contributors: each segment's mean over exactly the workers that trained it, overlapped.

    grad_s = (1 / W_s) sum_{i in contributors of s} w_i g_i,s        W_s = sum_{i in contributors of s} w_i

Worker i's weight w_i is its share of the global batch. What it has in `.grad` of segment s is already multiplied by
W / W_s (W over all workers): what flows back across a boundary is scaled there (`factors`). That makes a
parameter used in several segments exact, too: each part of its gradient crossed its own boundaries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from lightning_decentral.partial.plan.cost import sent_bytes
from lightning_decentral.partial.wire.contributor_buckets import ContributorBucket, Packing
from lightning_decentral.shared.compute.modules import same
from lightning_decentral.shared.wire.gradients import Average, Launcher, flag, real, used
from lightning_decentral.shared.wire.transport import Transport

Group = Callable[[Sequence[Sequence[int]] | None], Transport | None]


def factors(contributors: Sequence[Sequence[int]], weights: Sequence[float]) -> list[float]:
    """Gradient factors of the boundaries between segments j and j + 1. By them a gradient that crossed all above
    segment s, and that of the loss, was multiplied by W / W_s. A segment that nobody trains changes nothing."""
    sums = [float(sum(weights[rank] for rank in ranks)) for ranks in contributors]
    assert not sums[-1] or len(contributors[-1]) == len(weights), (
        "what lies above the last boundary is trained by all workers, or by none"
    )
    known = [float(sum(weights))]
    for own in reversed(sums):
        known.insert(0, own or known[0])
    return [above / below for below, above in pairwise(known[:-1])]


@dataclass(frozen=True)
class Rank:
    """A worker's place: its rank, the number of workers, the share of the global batch of each."""

    rank: int
    shares: tuple[float, ...]

    @property
    def size(self) -> int:
        return len(self.shares)


class Reducer(Average):
    """Averages gradients segment by segment, from the top, as soon as the backward has made them.

    A segment with all workers as contributors is all-reduced. With k of n, they reduce it among themselves to one, who
    hands it to all; others send nothing for it. With none, nothing is sent and no gradient appears.

    Args:
        segments: parameters of each segment from the bottom.
        group: makes groups of workers; every worker calls it at the same point.
        hosts: the same for CPU tensors.
        bucket_bytes: gradients that travel together, at most, unless one parameter is larger; by default
            `bucket_bytes_of` them.

    Attributes:
        sent_bytes: this worker's part of what travelled so far (the mean over the workers of a collective).
    """

    def __init__(
        self,
        segments: Sequence[Sequence[nn.Parameter]],
        place: Rank,
        group: Group,
        hosts: Group,
        bucket_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.sent_bytes = 0.0
        self._segments, self._place, self._bucket_bytes = segments, place, bucket_bytes
        self._groups, self._hosts = Groups(place.size, group), of_all(hosts)
        self._launcher = Launcher(self._launch)
        self._packing = Packing([], bucket_bytes)
        self._served: Sequence[nn.Parameter] = ()
        self._contributors: Sequence[tuple[int, ...]] = ()
        self.refresh()

    def refresh(self) -> None:
        """Take in what is trained now: freezing and unfreezing come at any time, on all workers in the same step."""
        trained = [[p for p in segment if p.requires_grad] for segment in self._segments]
        before = self._launcher.watched
        if self._launcher.watch([p for segment in trained for p in segment]):
            if before:
                self.layouts.changed()
            self._packing = Packing(trained, self._bucket_bytes)

    def close(self) -> None:
        """Take the hooks off the parameters."""
        self._launcher.watch(())
        self._told = []  # nobody waits for the last answers

    # ---- one backward -------------------------------------------------------------------------------------------

    def serve(self, parameters: Sequence[nn.Parameter]) -> None:
        """RuntimeError for one that no segment has, and that is trained now."""
        if same(parameters, self._served):
            return
        known = {p for segment in self._segments for p in segment}
        if any(p not in known for p in parameters if p.requires_grad):
            raise RuntimeError(
                "a parameter is trained that wasn't there in the first step, which found the cuts, so that nobody "
                "averages its gradient: replace modules before fit, or train with strategy='compressed'"
            )
        self._served = parameters

    def begin(self, contributors: Sequence[tuple[int, ...]]) -> None:
        """Before the backward whose gradients are to be averaged. Collective where a group is met first."""
        self._contributors = contributors
        self.enter()
        self._groups.prepare(contributors)
        # They start in this order, whatever is complete first: workers with unequal graphs still pair the right ones.
        self._launcher.begin(self._packing.buckets(contributors))

    def _launch(self, bucket: ContributorBucket) -> None:
        if self._place.rank not in bucket.ranks:
            return
        # w_i / W, whatever the segment: `factors` has done the rest.
        bucket.pack(self._place.shares[self._place.rank])
        if len(bucket.ranks) == self._place.size:
            bucket.pending = self._groups.world.all_reduce(real(bucket.flat))
        elif len(bucket.ranks) > 1:
            bucket.pending = self._groups.of(bucket.ranks).reduce(real(bucket.flat), target=0)

    def finish(self) -> None:
        """After the backward: start what is left, hand on, wait, and put the means into `.grad`.

        Raises:
            RuntimeError: a gradient appeared in a segment that this worker doesn't contribute to.
        """
        self._refuse_strays()
        self._launcher.rest()
        buckets, size = self._launcher.buckets, self._place.size
        gradients = [gradient for bucket in buckets for gradient in bucket.gradients]
        # The hosts tell each other who used what: no host reads what its device computes.
        flags = flag(gradients, torch.empty(len(gradients) + 1, dtype=torch.int32))
        flags[-1] = self.news()
        told = self._hosts.all_reduce(flags)
        self.tell(flags[-1], told)
        for bucket in buckets:  # all under way before the first landing waits
            self._hand_on(bucket)
        some = iter(used(gradients, flags, told))
        for bucket in buckets:
            bucket.land([next(some) for _ in bucket.parameters])
            self.sent_bytes += sent_bytes(bucket.bytes, len(bucket.ranks), size)
        self.sent_bytes += sent_bytes(flags.nbytes, size, size)
        self._launcher.begin(())
        self.leave()

    def _hand_on(self, bucket: ContributorBucket) -> None:
        """Broadcast from the first of the contributors to all, where not all are contributors."""
        if len(bucket.ranks) == self._place.size:
            return
        if bucket.pending is not None:
            bucket.pending.wait()
        bucket.pending = self._groups.world.broadcast(real(bucket.flat), source=bucket.ranks[0])

    def _refuse_strays(self) -> None:
        for segment, (ranks, parameters) in enumerate(zip(self._contributors, self._segments, strict=True)):
            # Zeros don't count: a user's zero_grad may leave them.
            trained = [p.grad for p in parameters if p.requires_grad and p.grad is not None]
            if self._place.rank not in ranks and any(bool(gradient.any()) for gradient in trained):
                raise RuntimeError(
                    f"a gradient appeared below the cut, in segment {segment}: the network runs otherwise than "
                    "in the first step; keep its forward the same, or train this part with strategy='ddp'"
                )


def of_all(group: Group) -> Transport:
    """A new group of all workers. Collective."""
    made = group(None)
    assert made is not None
    return made


class Groups:
    """Groups of contributors, each made when it's first met: all workers know the plan, so all meet it together."""

    def __init__(self, size: int, group: Group) -> None:
        self._size, self._group = size, group
        self._made: dict[tuple[int, ...], Transport | None] = {}
        self.world = of_all(group)

    def prepare(self, contributors: Sequence[tuple[int, ...]]) -> None:
        for ranks in contributors:
            if 1 < len(ranks) < self._size and ranks not in self._made:
                self._made[ranks] = self._group([ranks])

    def of(self, ranks: tuple[int, ...]) -> Transport:
        """Transport of these workers, to which this one belongs."""
        found = self._made[ranks]
        assert found is not None
        return found
