"""Rounds in which nobody waits: a message leaves when the one before it has, and what has come is mixed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean

import torch
from torch import Tensor

from lightning_decentral.elastic.plan.asynchronous import Asynchronous, Heard
from lightning_decentral.elastic.wire.rounds.links import Post
from lightning_decentral.gossip.wire.exchange import HEADER, Copied
from lightning_decentral.gossip.wire.peer import PeerExchange, PeerMessage
from lightning_decentral.shared.compute.health import stated

ROUND, ELEMENTS = 0, 1
"""Places in a header."""


@dataclass
class AsynchronousExchange(PeerExchange):
    """`PeerExchange` over what has come by the time a round lands: of each member its newest whole message, once.

    Args:
        order: how much each counts.

    Attributes:
        age: mean rounds by which what was mixed last was late.
    """

    transport: Post  # type: ignore[assignment]  # what waits for messages, or for all workers, isn't called
    order: Asynchronous = Asynchronous()  # noqa: RUF009 - a frozen value
    age: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sizes: dict[int, list[int]] = {}  # {a bucket's place: bytes of each of its tensors}
        self._came: dict[int, list[bytearray]] = {}
        self._weights: Mapping[int, float] = {}

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> PeerMessage:
        sent, rank = self._copy(message, copied), self.transport.rank
        if place not in self._sizes:
            like = self.coder.buffers([rank], sent, place)[rank]
            self._sizes[place] = [HEADER * 8, *(t.numel() * t.element_size() for t in like)]
            self.pool.give(like)
        packets = self.coder.encode(sent, self.neighbours(step).heard_by, step, place)
        headers = stated([step, self._elements], [sent], self.device).view(1, HEADER)
        return PeerMessage(self, step, place, {}, sent, headers, packets, {})

    def depart(self, launched: Sequence[PeerMessage], step: int) -> None:
        self._bytes_sent += self.transport.post([*chain(*(message.sends() for message in launched))])

    def receive(self, message: PeerMessage) -> tuple[Mapping[int, Tensor], Tensor]:
        if not message.place:
            self._take(message.step)
        begins = sum(len(sizes) for place, sizes in self._sizes.items() if place < message.place)
        message.buffers, message.row = self.coder.buffers(self._came, message.sent, message.place), self._weights
        headers = [message.headers]
        for j, buffers in message.buffers.items():
            header, *payload = self._came[j][begins : begins + len(self._sizes[message.place])]
            headers.append(_read(header, torch.int64).clone().view(1, HEADER))
            headers[-1][0, ROUND] = message.step  # of which age it is, is judged already
            for tensor, raw in zip(buffers, payload, strict=True):
                tensor.copy_(_read(raw, tensor.dtype).view(tensor.shape))
        message.headers = torch.cat(headers)
        return super().receive(message)

    def _take(self, step: int) -> None:
        """Take what has come of whole rounds, and set the weight of each sender."""
        sizes = [size for _, of in sorted(self._sizes.items()) for size in of]
        found = {
            j: (round, came)
            for j, (round, came) in self.transport.newest(len(sizes)).items()
            # A sender that trains other parameters by now, or sent to another, is left out.
            if [*map(len, came)] == sizes
            and _read(came[0], torch.int64)[ELEMENTS] == self._elements
            and j in self.neighbours(round).row
        }
        heard = [Heard(j, round, self.neighbours(round)) for j, (round, _) in found.items()]
        self._weights = self.order.row(self.transport.rank, step, heard)
        self._came = {j: came for j, (_, came) in found.items()}
        self.age = fmean([max(0, step - h.round) for h in heard] or [0.0])


def _read(raw: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(raw, dtype=dtype)
