"""One worker's ends of all its links: what it sends to each target, and what it makes of what each source sent."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_decentral.gossip.compute.codec.codec import check_codec
from lightning_decentral.gossip.compute.codec.quantize import Plain
from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.shared.compute.buckets import Matrix, Pool

Buffers = list[Tensor]


class Coder(ABC):
    """Turns messages, a list of buckets, into what travels and back. Estimates, where a codec has them, live here.

    `first` is the place of a message's first bucket among those admitted.
    """

    estimates: bool = False
    """Whether it keeps estimates, which start at the references."""

    learns: bool = False
    """Whether landing changes what is encoded next."""

    @abstractmethod
    def admit(self, references: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        """More buckets. `references` are as long, and where there are estimates equal on all workers; the rule says how
        much of a message is not encoded."""

    @abstractmethod
    def encode(
        self, message: Sequence[Tensor], targets: Mapping[int, float], step: int, first: int
    ) -> dict[int, Buffers]:
        """{target: what it gets}; targets of one audience share it.

        The message is overwritten by what those targets decode: sum_k w_ki decoded_ik / sum_k w_ki where they differ.
        """

    @abstractmethod
    def buffers(self, source: int, message: Sequence[Tensor], first: int) -> Buffers:
        """Where what the source sends is received."""

    @abstractmethod
    def decode(self, source: int, buffers: Buffers, message: Sequence[Tensor], first: int) -> Buffers:
        """The buckets that the source meant; the buffers are used up."""

    @abstractmethod
    def remember(self, source: int, decoded: Sequence[Tensor], healthy: Tensor, first: int) -> None:
        """Keep what was decoded as the estimate of the source, if it is healthy."""

    @abstractmethod
    def release(self, sent: Mapping[int, Buffers]) -> None:
        """What `encode` returned has left."""

    def error(self) -> float | None:
        """How much of what was to be sent got lost, relative; None where nothing is encoded or was measured."""
        return None

    @abstractmethod
    def bytes(self, message: Sequence[Tensor]) -> int:
        """Of one message on the wire."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The estimates."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them."""


@dataclass
class Direct(Coder):
    """The buckets travel as they are: no copy is made."""

    pool: Pool

    def admit(self, references: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        """Nothing to know."""

    def encode(
        self, message: Sequence[Tensor], targets: Mapping[int, float], step: int, first: int
    ) -> dict[int, Buffers]:
        """The message itself."""
        return {target: list(message) for target in targets}

    def buffers(self, source: int, message: Sequence[Tensor], first: int) -> Buffers:
        """One like each bucket."""
        return [self.pool.take(m) for m in message]

    def decode(self, source: int, buffers: Buffers, message: Sequence[Tensor], first: int) -> Buffers:
        """The buffers themselves."""
        return buffers

    def remember(self, source: int, decoded: Sequence[Tensor], healthy: Tensor, first: int) -> None:
        """Nothing."""

    def release(self, sent: Mapping[int, Buffers]) -> None:
        """The mixer gives the message back."""

    def bytes(self, message: Sequence[Tensor]) -> int:
        """Of the buckets."""
        return sum(m.numel() * m.element_size() for m in message)

    def state_dict(self) -> dict[str, Any]:
        """The codec's name."""
        return {"codec": repr(Plain())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore; another codec's messages are refused."""
        check_codec(state, repr(Plain()))
