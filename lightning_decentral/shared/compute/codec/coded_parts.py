"""Compressed all-reduce: each worker owns a part of a message, averages all workers' codes of it, and encodes the mean.

    q_i = Q(x_i)                       worker i encodes each part that another worker owns, not its own part
    s = (1/n) sum_i q_i + f            the owner of a part
    r = Q(s)      f <- s - r           the mean that all workers decode, and the error that is added to the next mean

A worker sends 2 (n - 1) / n times the bytes of its codes, as an all-reduce does with numbers; sending all codes to all
other workers would take n - 1 times the bytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.codec.blocks import key
from lightning_decentral.shared.compute.codec.codec import Codec, Frame, Payload, PayloadPart

Encode = Callable[[Tensor, Payload, Frame], None]
GRAIN = 256  # parts begin at multiples of it: few blocks of a codec are cut
TO_OWNER, FROM_OWNER = 0, 1


@dataclass
class CodedParts:
    """Encodes and decodes one worker's part in compressed all-reduces."""

    codec: Codec  # a codec that keeps no estimates
    rank: int
    size: int
    pool: Pool  # pool of the buffers for codes
    _spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict, init=False)
    _payloads: dict[tuple[int, torch.dtype], tuple[PayloadPart, ...]] = field(default_factory=dict, init=False)

    @property
    def share(self) -> float:
        """Weight of each worker in the mean: applied before the sum, which could overflow in half precision."""
        return 1 / self.size

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Return (start, stop) of each worker's part of a message of `length` elements."""
        if length not in self._spans:
            ends = [min(length, i * -(-length // (self.size * GRAIN)) * GRAIN) for i in range(self.size + 1)]
            self._spans[length] = [*pairwise(ends)]
        return self._spans[length]

    def of(self, owner: int, message: Tensor) -> Tensor:
        """Return the owner's part of the message, a view."""
        return message[slice(*self.spans(message.numel())[owner])]  # (elements of the part,)

    def views(self, message: Tensor) -> list[Tensor]:
        """Return every worker's part of the message, as views in order of rank."""
        return [message[start:stop] for start, stop in self.spans(message.numel())]  # workers x (elements,)

    def payload(self, length: int, like: Tensor) -> list[Tensor]:
        """Return buffers for the codes of a part of this length."""
        if (parts := self._payloads.get((length, like.dtype))) is None:
            parts = self._payloads[length, like.dtype] = self.codec.checked_parts(length, like.dtype)
        return [self.pool.take_new(torch.Size([p.elements]), p.dtype, like.device) for p in parts]

    def to_owners(self, message: Tensor, encode: Encode, *noise: int) -> dict[int, list[Tensor]]:
        """Return {owner: codes of its part}; `encode` also overwrites these parts of the message. `noise`: integers
        that seed the rounding, and that differ in each mean of this worker."""
        return {
            owner: self._coded(part, encode, *noise, owner, TO_OWNER)
            for owner, part in enumerate(self.views(message))
            if owner != self.rank and part.numel()
        }

    def own(self, message: Tensor, encode: Encode, *noise: int) -> None:
        """Overwrite this worker's own part by `encode`, too, though no codes of it are sent. For codecs that send a few
        elements in each round (`whole` is False): an unencoded part would be complete in each round, and most of it
        would pile up in f, the owner's error, which no worker's x contains."""
        if (part := self.of(self.rank, message)).numel():
            self.pool.give(self._coded(part, encode, *noise, self.rank, TO_OWNER))

    def from_others(self, message: Tensor) -> dict[int, list[Tensor]]:
        """Return {worker: buffers for its codes of this worker's part}."""
        mine = self.of(self.rank, message)
        return {j: self.payload(mine.numel(), mine) for j in range(self.size) if j != self.rank and mine.numel()}

    def reduced(self, mean: Tensor, owned: Tensor, *noise: int) -> list[Tensor]:
        """Return the codes of the mean (1/n) sum_i q_i.  mean <- r;  owned, f before, <- s - r, or 0 if not finite."""
        mean.copy_(owned.add_(mean))  # s, in both
        codes = self._coded(mean, self.codec.replace, *noise, self.rank, FROM_OWNER) if mean.numel() else []
        drop_if_sick(owned.sub_(mean))  # s - r, which the next mean gets
        return codes

    def from_owners(self, message: Tensor) -> dict[int, list[Tensor]]:
        """Return {owner: buffers for its codes of the mean}."""
        lengths = [stop - start for start, stop in self.spans(message.numel())]
        return {j: self.payload(n, message) for j, n in enumerate(lengths) if j != self.rank and n}

    def decode(self, codes: Sequence[Tensor], out: Tensor) -> None:
        self.codec.decode(codes, out, Frame())

    def _coded(self, message: Tensor, encode: Encode, *noise: int) -> list[Tensor]:
        payload = self.payload(message.numel(), message)
        encode(message, payload, Frame(key(self.rank, *noise)))  # different noise for each worker, mean and part
        return payload


def drop_if_sick(residual: Tensor) -> None:
    """residual <- 0 where it holds NaN or infinity anywhere."""
    healthy = torch.isfinite(residual.sum())  # 0-dim: one pass
    if residual.device.type == "cuda":
        # Computed on the device: reading the result on the host would make the host wait.
        torch.where(healthy, residual, torch.zeros_like(residual), out=residual)
    elif not healthy:
        residual.zero_()
