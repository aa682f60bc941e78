"""Parameters that somebody else than an optimizer and its rounds has written, as callbacks put averages in place."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_decentral.shared.compute.buckets import Bucket
from lightning_decentral.shared.wire.fsdp import local

SAMPLES = 64
"""Elements sampled of each parameter: a pass over all of it in each step would cost as much as a round."""


class Written:
    """Writes to the parameters of one mixer's buckets since its last step.

    A parameter counts its own changes, but for those by `.data`: these show in a sample of its elements.

    Attributes:
        found: their addresses, as far as somebody has looked.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._places: list[Tensor] = []
        self._owners: list[list[int]] = []
        self._versions: list[list[int]] = []
        self._samples: list[Tensor] = []
        self.found: set[int] = set()

    def stepped(self) -> None:
        """Count what was written before as a part of the update."""
        self.found.clear()
        self.note()

    @torch.no_grad()
    def note(self, written: Iterable[Tensor] = ()) -> None:
        """Compare from here on. What was found stays, and what was written while the mean stood in its place."""
        own = {local(p).data_ptr() for bucket in self._buckets for p in bucket.parameters} if written else set()
        self.found.update(own.intersection(local(t).data_ptr() for t in written))
        for bucket in self._buckets[len(self._places) :]:
            self._lay_out(bucket)
        self._versions = [[p._version for p in bucket.parameters] for bucket in self._buckets]
        self._samples = [b.sampled(places) for b, places in zip(self._buckets, self._places, strict=True)]

    @torch.no_grad()
    def look(self) -> set[int]:
        """Addresses of those that were. Waits for a device."""
        for bucket in self._buckets:
            bucket.adopt()  # a parameter may have been given another storage
        found = zip(self._buckets, self._places, self._owners, self._versions, self._samples, strict=False)
        for bucket, places, owners, versions, samples in found:
            changed = [p._version != version for p, version in zip(bucket.parameters, versions, strict=True)]
            for place in (bucket.sampled(places) != samples).nonzero().flatten().tolist():
                changed[owners[place]] = True
            pairs = zip(bucket.parameters, changed, strict=True)
            self.found.update(local(p).data_ptr() for p, was in pairs if was)
        self.note()
        return self.found

    def kept(self) -> list[tuple[Tensor, Tensor]]:
        """(parameter, what was written to it)."""
        found = self.look()
        every = [local(p) for bucket in self._buckets for p in bucket.parameters]
        return [(p, p.clone()) for p in every if p.data_ptr() in found]

    def _lay_out(self, bucket: Bucket) -> None:
        rows, owners = list[Tensor](), list[int]()
        at = next((p.device for p in bucket.parameters), bucket.flat.device)  # a copy would make the host wait
        for number, place in enumerate(bucket.ranges()):
            count = min(SAMPLES, len(place))
            row: Tensor = torch.linspace(place.start, place.stop - 1, count, dtype=torch.float64, device=at).long()
            rows.append(row)
            owners += [number] * len(row)
        self._places.append(torch.cat(rows) if rows else torch.zeros(0, dtype=torch.long, device=at))
        self._owners.append(owners)
