"""Memory of a worker for means in codes, bucket by bucket: a `CodedParts' residuals, and how much a codec loses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.error_feedback import measured
from lightning_decentral.gossip.compute.link import Buffers, CodecError, check_codec
from lightning_decentral.shared.compute.codec.blocks import real
from lightning_decentral.shared.compute.codec.coded_parts import CodedParts
from lightning_decentral.shared.compute.health import squared_norm


@dataclass
class CodedMean:
    """State that a worker keeps for the means of a mixer's buckets: an exchange's `coder`.

    Attributes:
        owned: of each bucket, what the last mean of the own part was rounded by.
        bytes: of the codes of all buckets.
    """

    parts: CodedParts
    encodes: bool = field(default=True, init=False)
    bytes: int = field(default=0, init=False)
    owned: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.lost = CodecError()

    def admit(self, buckets: Sequence[Tensor]) -> None:
        for bucket in map(real, buckets):
            self.owned.append(torch.zeros_like(self.parts.of(self.parts.rank, bucket)))
            self.bytes += self.parts.codec.bytes(bucket.numel(), bucket.dtype)

    def encode(self, message: Tensor, step: int, place: int) -> dict[int, Buffers]:
        """Encode a bucket to {owner: codes of its part};  message <- what was sent."""
        watched = message.clone() if measured(step) else None
        codec, numbers = self.parts.codec, real(message)
        codes = self.parts.to_owners(numbers, codec.replace, step, place)
        self.parts.own(numbers, codec.replace, step, place)
        if watched is not None:
            gap = squared_norm([watched])
            self.lost.add(squared_norm([watched.sub_(message)]), gap)
            if place + 1 == len(self.owned):
                self.lost.complete(step)
        return codes

    def error(self) -> float | None:
        return self.lost.value()

    def state_dict(self) -> dict[str, Any]:
        return {"codec": repr(self.parts.codec), "owned": [owned.clone() for owned in self.owned]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_codec(state, repr(self.parts.codec))
        # None in a checkpoint from before means were coded.
        for owned, saved in zip(self.owned, state.get("owned", self.owned), strict=True):
            owned.copy_(saved)
