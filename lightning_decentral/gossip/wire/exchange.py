"""Exchange of messages: one of each bucket goes to the neighbours, a mixture of theirs comes back.

    launch        ->  MessageInFlight   depart          land, or correct
    copy, encode      .                 send, receive   wait, decode, mix

What is in flight is one object: who launched it hands it to `depart`, lands it or saves it; nothing else remembers it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.link import Memory
from lightning_decentral.gossip.compute.mixing import Sick, apply_difference
from lightning_decentral.gossip.plan.weights import Entries, Neighbours
from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.health import state_
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Message

Number = float | NDArray[np.float64]
StepLinks = Neighbours | Entries
"""Links of one step: a worker's, or all workers' matrix in a simulation, where numbers are columns [size, 1]."""
HEADER = 3  # Numbers before a message: its round, the elements of all buckets, its largest magnitude.


@dataclass
class Copied:
    """A bucket's next message: its copy, and its header, both made where the bucket is corrected."""

    message: Tensor  # gets the values of the bucket
    headers: Tensor | None = None  # int64 [rows, HEADER]; the first row gets the header. None: it is made later
    step: int = 0
    elements: int = 0  # of all buckets

    def of(self, x: Tensor) -> "Copied":
        """Make both of x, in one pass."""
        assert self.headers is not None
        state_(self.message, self.headers[0], x, self.step, self.elements)
        return self


class MessageInFlight(ABC):
    """One bucket's message of a round, and what comes back for it, between launch and landing."""

    sent: Tensor
    """The message, which is the caller's again after the landing; from `settle` on what the others decode of it."""

    together: bool = False
    """True where the others must land it while this worker does, and it isn't done during the training."""

    corrects: bool = False  # True where `correct` may take the place of a landing.

    @abstractmethod
    def land(self) -> Tensor:
        """Wait for what was sent to this worker, and return the mixture. Once."""

    def correct(self, x: Tensor, rate: float, copied: Copied | None = None) -> None:
        """x <- x + rate (mixed - sent), and `copied` of it, too. In place of `land`, where it `corrects`."""
        x.add_(self.land() - self.sent, alpha=rate)
        if copied:
            copied.of(x)

    def keep(self, corrects: bool) -> "Landed":
        """Wait for what was sent to this worker; return what lands with the same bits later, and can be saved. Once.
        Where it `corrects`, by `correct`, if it can."""
        return Landed(self.sent, self.land())

    def settle(self) -> Tensor:
        """Wait until the message is ready to leave, and return it: from then on it is what the others decode of it."""
        return self.sent


class EarlyArrival(MessageInFlight):
    """A message that a device's second stream may receive before it lands on the training's."""

    outgoing: Sequence[Pending] = ()  # its transfers, from the departure on
    incoming: Sequence[Pending] = ()

    @abstractmethod
    def sends(self) -> list[Message]:
        """Messages to other workers: a header, then the payload."""

    @abstractmethod
    def receives(self) -> list[Message]:
        """Buffers for the messages to this worker, in the order of the senders' `sends`: NCCL pairs by order, gloo by
        tag."""

    @abstractmethod
    def arrive(self) -> list[Tensor]:
        """Wait for what was sent to this worker, decode and judge it, on the current stream. Before it lands, once.

        Returns:
            Tensors of that stream's memory, which the landing reads.
        """


@dataclass
class Landed(MessageInFlight):
    """A message whose round was mixed already; where it `corrects`, mixed - sent."""

    sent: Tensor
    mixed: Tensor | None
    corrects: bool = field(default=False, kw_only=True)
    sick: Sick | None = field(default=None, kw_only=True)  # this worker's own message was refused: landing raises it

    def land(self) -> Tensor:
        if self.sick:
            raise self.sick
        assert self.mixed is not None
        return self.mixed

    def correct(self, x: Tensor, rate: float, copied: Copied | None = None) -> None:
        apply_difference(x, self.land(), rate)
        if copied:
            copied.of(x)

    def keep(self, corrects: bool) -> "Landed":
        if self.sick:
            raise self.sick
        return self


@dataclass
class Flight:
    """One round between launch and landing, bucket by bucket; saved with what has come of it, and restored."""

    round: int
    step: int
    messages: list[MessageInFlight] = field(default_factory=list)
    departed: float = 0.0  # when it left, by `perf_counter`; 0 before, and where it was restored

    def state_dict(self, keep: Callable[[int], Landed]) -> dict[str, Any]:
        """State to save, as tensors and primitives. What came for a bucket (`keep` of its place) stands in for what was
        launched from then on: a round arrives once."""
        landed = [keep(place) for place in range(len(self.messages))]
        self.messages = [*landed]
        return {
            "round": self.round,
            "step": self.step,
            "sent": [one.sent for one in landed],
            "mixed": [[] if one.mixed is None else [one.mixed] for one in landed],
            "differences": [one.corrects for one in landed],
            "refused": [one.sick and one.sick.state_dict() for one in landed],
        }

    @classmethod
    def of(cls, state: Mapping[str, Any], like: Sequence[Tensor]) -> "Flight":
        """Flight as it was saved, on the devices of the buckets."""
        mixed = state["mixed"]
        # In checkpoints from before there were any, none.
        differences = state.get("differences", [False] * len(mixed))
        refused = state.get("refused", [None] * len(mixed))
        landed = [
            Landed(
                sent.to(x.device, copy=True),
                next((tensor.to(x.device, copy=True) for tensor in tensors), None),
                corrects=corrects,
                sick=sick and Sick(**{**sick, **{k: sick[k][0].to(x.device, copy=True) for k in ("sent", "mixed")}}),
            )
            # A flight may be older than the last buckets, and then shorter than `like`.
            for sent, tensors, corrects, sick, x in zip(state["sent"], mixed, differences, refused, like, strict=False)
        ]
        return cls(state["round"], state["step"], [*landed])


M = TypeVar("M", bound=MessageInFlight)


class Exchange(ABC, Generic[M]):
    """One worker's share of every round (or all workers' at once, in a simulation)."""

    pool: Pool  # Buffers of messages; the user of what landed gives them back to it.

    coder: Memory  # Coder of messages: what both ends of a link remember of each other, and what of a message travels.

    neighbours: Callable[[int], StepLinks]  # Links of a step.

    @abstractmethod
    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        """Add buckets, to be mixed from the next launch on. Every worker calls it at the same point. Their rule states
        how much of a message no codec may touch."""

    def copied(self, x: Tensor, step: int, place: int) -> Copied:
        """Buffers for the next message of bucket `place`, which is x as a correction leaves it; then to be launched."""
        return Copied(self.pool.take(x), torch.empty(1, HEADER, dtype=torch.int64, device=x.device), step)

    @abstractmethod
    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> M:
        """Make a copy of one bucket's message ready to leave. It becomes what the others decode of it, by the end of
        `settle`, and belongs to the exchange until landed. `place` is the bucket's among the admitted; a round's are
        launched in order. `copied`: the copy, where it was made already."""

    def _copy(self, message: Tensor, copied: Copied | None) -> Tensor:
        return copied.message if copied else self.pool.take(message).copy_(message)

    def depart(self, launched: Sequence[M], step: int) -> None:
        """The round is complete: send all of it that hasn't left, and begin to receive the others'. In a simulation
        nothing travels."""
        return

    def traffic(self) -> "Traffic":
        """Bytes, waits and refusals so far; rounds are counted by the mixer."""
        return Traffic()


@dataclass(frozen=True)
class Traffic:
    """Counters of one worker's exchange so far; in an island of its device's, which sends a part of what is planned.

    `wait_seconds` are the host's, or the device's where the device waits; `in_flight_seconds` lie between launch and
    landing of a round's first bucket as the host sees them.
    """

    rounds: int = 0
    bytes_sent: int = 0
    wait_seconds: float = 0.0
    in_flight_seconds: float = 0.0
    refused: int = 0
    left_out: int = 0
    healed: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Traffic(*(a + b for a, b in pairs))
