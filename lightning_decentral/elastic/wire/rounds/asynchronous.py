"""Rounds in which nobody waits: a message leaves when the one before it has, and what has come is mixed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from time import perf_counter

import torch
from torch import Tensor

from lightning_decentral.elastic.plan.asynchronous import Asynchronous, Heard
from lightning_decentral.elastic.wire.rounds.links import Post
from lightning_decentral.gossip.compute.link import Buffers
from lightning_decentral.gossip.wire.exchange import HEADER
from lightning_decentral.gossip.wire.peer import PeerExchange, PeerMessages
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
        self._sizes: dict[int, list[int]] = {}  # {a part's first bucket: bytes of each of its messages}
        self._came: dict[int, list[bytearray]] = {}
        self._weights: Mapping[int, float] = {}

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> PeerMessages:
        if first not in self._sizes:
            like = self.coder.buffers([self.transport.rank], message, first)[self.transport.rank]
            self._sizes[first] = [HEADER * 8, *(t.numel() * t.element_size() for t in like)]
            self.pool.give(like)
        packets = self.coder.encode(message, self.neighbours(step).heard_by, step, first)
        said = stated([step, self._elements], message, self.device).view(1, HEADER)
        return PeerMessages(self, step, first, message, said, packets, {})

    def depart(self, started: Sequence[PeerMessages], step: int) -> None:
        self._tally.bytes_sent += self.transport.post([*chain(*(part.sends() for part in started))])
        for part in started:
            part.departed = perf_counter()

    def _accepted(self, part: PeerMessages) -> tuple[Mapping[int, Buffers], Tensor]:
        if not part.first:
            self._take(part.step)
        begins = sum(len(sizes) for first, sizes in self._sizes.items() if first < part.first)
        part.buffers = self.coder.buffers(self._came, part.message, part.first)
        said = [part.said]
        for j, buffers in part.buffers.items():
            header, *payload = self._came[j][begins : begins + len(self._sizes[part.first])]
            said.append(_read(header, torch.int64).clone().view(1, HEADER))
            said[-1][0, ROUND] = part.step  # of which age it is, is judged already
            for tensor, raw in zip(buffers, payload, strict=True):
                tensor.copy_(_read(raw, tensor.dtype).view(tensor.shape))
        part.said = torch.cat(said)
        return super()._accepted(part)

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

    def _row(self, part: PeerMessages) -> Mapping[int, float]:
        return self._weights


def _read(raw: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(raw, dtype=dtype)
