"""Gradient averaging over contributors: each segment's mean over exactly the workers that trained it, overlapped.

    grad_s = (1 / W_s) sum_{i in contributors of s} w_i g_i,s        W_s = sum_{i in contributors of s} w_i

Worker i's weight w_i is its share of the global batch. Its `.grad` of segment s is already multiplied by W / W_s (W
over all workers): gradients across a boundary are scaled there (`depth_controller.factors`). So a parameter used in
several segments is exact, too: each part of its gradient crossed its own boundaries."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn

from lightning_decentral.shared.compute.buckets import bucket_bytes_of, chunked
from lightning_decentral.shared.compute.layout import same
from lightning_decentral.shared.wire.gradients import Average, GradientBucket, Launcher, flag, pack, used
from lightning_decentral.shared.wire.transport import Transport, of_all

Ranks = tuple[int, ...]
Group = Callable[[Sequence[Sequence[int]] | None], Transport | None]


def sent_bytes(piece_bytes: float, contributors: int, size: int) -> float:
    """Mean bytes that a worker sends to average a piece over k contributors of n workers: (k + n - 2) / n of the piece.

    The contributors reduce it to one of them (k - 1 messages), which sends it to all (n - 1 messages). With k = n this
    is an all-reduce's 2 (n - 1) / n, without a contributor nothing. Over n equal pieces with 1, 2, ..., n contributors
    the sum is exactly 3/4 of a full all-reduce."""
    return (contributors + size - 2) / size * piece_bytes if contributors and size > 1 else 0.0


@dataclass(frozen=True)
class Rank:
    """Rank of a worker, the number of workers, and each worker's share of the global batch."""

    rank: int
    shares: tuple[float, ...]

    @property
    def size(self) -> int:
        return len(self.shares)


class ContributorBucket(GradientBucket):
    """Bucket of gradients that have the same contributors."""

    def __init__(
        self,
        ranks: Ranks,
        parameters: Sequence[nn.Parameter],
        flat: Tensor,  # (elements of all gradients,), for this backward
        place: int,  # position of the last of them in the order of backward
    ) -> None:
        super().__init__(parameters)
        self.ranks, self.flat, self.place = ranks, flat, place
        self.bytes = flat.numel() * flat.element_size()


class Packing:
    """Bucket layout: which gradients are sent together. All gradients of a dtype and device share one tensor.
    `bucket_bytes`: most of a bucket, unless one parameter is larger; by default `bucket_bytes_of` them."""

    def __init__(self, segments: Sequence[Sequence[nn.Parameter]], bucket_bytes: int | None) -> None:
        self._most = bucket_bytes or bucket_bytes_of(p for segment in segments for p in segment)
        self._pieces = [  # never split; the last parameters first, as in the backward
            (segment, members, sum(p.numel() for p in members))
            for segment in reversed(range(len(segments)))
            for members in chunked(reversed(segments[segment]), self._most)
        ]
        self._stores: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def buckets(self, contributors: Sequence[Ranks]) -> list[ContributorBucket]:
        """Buckets in the order in which the backward completes them; without segments that have no contributor."""
        # Parameters that share a bucket: (contributors, position of the last one, parameters, elements)
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[Ranks, int, list[nn.Parameter], int]]] = {}
        for place, (segment, members, elements) in enumerate(self._pieces):
            ranks, size = contributors[segment], members[0].element_size()
            if not ranks:
                continue
            rows = kinds.setdefault((members[0].dtype, members[0].device), [])
            # Segments share a bucket: a message for each would cost a worker more than its bytes do.
            if rows and rows[-1][0] == ranks and (rows[-1][3] + elements) * size <= self._most:
                _, _, former, count = rows.pop()
                members, elements = former + members, count + elements
            rows.append((ranks, place, members, elements))
        found: list[ContributorBucket] = []
        for (dtype, device), rows in kinds.items():
            sizes = [elements for *_, elements in rows]
            # As large as needed so far: contributors, and so the sizes, change from step to step.
            store = self._stores.get((dtype, device))
            if store is None or store.numel() < sum(sizes):
                store = self._stores[dtype, device] = torch.empty(sum(sizes), dtype=dtype, device=device)
            flats = store[: sum(sizes)].split(sizes)
            found += [ContributorBucket(r, ps, flat, at) for (r, at, ps, _), flat in zip(rows, flats, strict=True)]
        return sorted(found, key=attrgetter("place"))


class Reducer(Average):
    """Averages gradients segment by segment, from the top, as soon as the backward has computed them.

    A segment with all workers as contributors is all-reduced. With k of n, they reduce it to one contributor, which
    sends it to all; other workers send nothing. Without contributors nothing is sent and no gradient appears."""

    def __init__(
        self,
        segments: Sequence[Sequence[nn.Parameter]],  # parameters of each segment from the bottom
        place: Rank,
        group: Group,  # makes process groups; every worker calls it at the same point
        hosts: Group,  # the same for CPU tensors
        bucket_bytes: int | None = None,  # of gradients sent together, at most; as in `Packing`
    ) -> None:
        super().__init__()
        self.sent_bytes = 0.0  # this worker's part of the traffic so far (in a collective, the mean over workers)
        self._segments, self._place, self._bucket_bytes = segments, place, bucket_bytes
        self._group, self._world, self._hosts = group, of_all(group), of_all(hosts)
        self._groups: dict[Ranks, Transport | None] = {}  # groups by contributors
        self._launcher = Launcher(self._launch)
        self._packing = Packing([], bucket_bytes)
        self._served: Sequence[nn.Parameter] = ()
        self._contributors: Sequence[Ranks] = ()
        self.refresh()

    def refresh(self) -> None:
        """Update which parameters are trained: freezing may change at any step, on all workers alike."""
        trained = [[p for p in segment if p.requires_grad] for segment in self._segments]
        before = self._launcher.watched
        if self._launcher.watch([p for segment in trained for p in segment]):
            if before:
                self.layouts.changed()
            self._packing = Packing(trained, self._bucket_bytes)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        self._launcher.watch(())
        self._reported = []  # the last comparison is still to be read

    def serve(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise RuntimeError for a trained parameter that belongs to no segment."""
        if same(parameters, self._served):
            return
        known = {p for segment in self._segments for p in segment}
        if any(p not in known for p in parameters if p.requires_grad):
            raise RuntimeError(
                "a parameter is trained that didn't exist in the first step, which found the cuts, so no worker "
                "averages its gradient: replace modules before fit, or train with strategy='compressed'"
            )
        self._served = parameters

    def begin(self, contributors: Sequence[Ranks]) -> None:
        """Prepare a backward whose gradients are to be averaged. Collective when a group is first needed."""
        self._contributors = contributors
        self.enter()
        for ranks in contributors:  # all workers know the plan, so all make a group together
            if 1 < len(ranks) < len(self._place.shares) and ranks not in self._groups:
                self._groups[ranks] = self._group([ranks])
        # They start in this order, whichever is complete first: unequal graphs still pair equal buckets.
        self._launcher.begin(self._packing.buckets(contributors))

    def _launch(self, bucket: ContributorBucket) -> None:
        if self._place.rank not in bucket.ranks:
            return
        pack(bucket.gradients, bucket.parameters, bucket.flat)
        # w_i / W, whatever the segment: `factors` has scaled the rest.
        bucket.flat.mul_(self._place.shares[self._place.rank])
        if len(bucket.ranks) == len(self._place.shares):
            bucket.pending = self._world.all_reduce(bucket.flat)
        elif (group := self._groups.get(bucket.ranks)) is not None:  # else this worker is the only contributor
            bucket.pending = group.reduce(bucket.flat, target=0)

    def finish(self) -> None:
        """Start remaining buckets after the backward, send on, wait, and put the means into `.grad`. RuntimeError:
        a gradient appeared in a segment to which this worker doesn't contribute."""
        self._refuse_strays()
        self._launcher.rest()
        buckets, size = self._launcher.buckets, len(self._place.shares)
        gradients = [gradient for bucket in buckets for gradient in bucket.gradients]
        # The hosts exchange which parameters were used: no host reads what its device computes.
        flags = flag(gradients, torch.empty(len(gradients) + 1, dtype=torch.int32))
        flags[-1] = self.news()
        exchanged = self._hosts.all_reduce(flags)
        self.report(flags[-1], exchanged)
        for bucket in buckets:  # all are under way before the first wait
            self.sent_bytes += sent_bytes(bucket.bytes, len(bucket.ranks), size)
            if len(bucket.ranks) < size:  # from the first contributor to all
                if bucket.pending is not None:
                    self.wait(bucket.pending, bucket.flat.device)
                bucket.pending = self._world.broadcast(bucket.flat, source=bucket.ranks[0])
        self.sent_bytes += sent_bytes(flags.nbytes, size, size)
        some = iter(used(gradients, flags, partial(self.wait, exchanged, flags.device)))
        for bucket in buckets:
            if bucket.pending is not None:
                self.wait(bucket.pending, bucket.flat.device)  # on a device the stream waits
            bucket.store(bucket.flat, [next(some) for _ in bucket.parameters])
        self._launcher.begin(())
        self.leave()

    def _refuse_strays(self) -> None:
        for segment, (ranks, parameters) in enumerate(zip(self._contributors, self._segments, strict=True)):
            # Zeros don't count: a user's zero_grad may leave them.
            trained = [p.grad for p in parameters if p.requires_grad and p.grad is not None]
            if self._place.rank not in ranks and any(bool(gradient.any()) for gradient in trained):
                raise RuntimeError(
                    f"a gradient appeared below the cut, in segment {segment}, so the network ran differently from the "
                    "first step: keep its forward the same, or train this part with strategy='ddp'"
                )
