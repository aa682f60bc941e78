"""Interface of exchanges: a message of each bucket goes to the neighbours, and a mixture of their messages comes back.

    launch        ->  MessageInFlight   depart          land, or correct
    copy, encode      .                 send, receive   wait, decode, mix

A message in flight is one object: the caller of `launch` passes it to `depart`, and lands it (mixes it) or saves it."""

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
"""Links of one step: a worker's neighbours, or the matrix of all workers in a simulation, with columns [size, 1]."""
HEADER = 3  # Numbers before a message: its round, the elements of all buckets, its largest magnitude.


@dataclass
class Copied:
    """Buffers for a bucket's next message and its header, both written in the pass that corrects the bucket."""

    message: Tensor  # the message, which gets the values of the bucket
    headers: Tensor | None = None  # int64 [rows, HEADER]; the first row gets the header. None: made later
    step: int = 0
    elements: int = 0  # number of elements of all buckets

    def of(self, x: Tensor) -> "Copied":
        """Write message and header from x, in one pass."""
        assert self.headers is not None
        state_(self.message, self.headers[0], x, self.step, self.elements)
        return self


class Dropped(Exception):
    """Raised by `land` if a round has no mixture: the rule's state and the parameters stay as they are."""


class MessageInFlight(ABC):
    """One bucket's message of a round in flight, and the mixture that comes back for it."""

    sent: Tensor  # the message, which belongs to the caller again after `land`; from `settle` on the decoded message
    # Whether the other workers must land the message at the same time, because no thread does so during training.
    together: bool = False
    corrects: bool = False  # whether `correct` may be called instead of `land`

    @abstractmethod
    def land(self) -> Tensor:
        """Wait for the messages to this worker, and return the mixture. Call once."""

    def correct(self, x: Tensor, rate: float, copied: Copied | None = None) -> None:
        """x <- x + rate (mixed - sent), and fill `copied` from x. Called instead of `land` if `corrects` is true."""
        x.add_(self.land() - self.sent, alpha=rate)
        if copied:
            copied.of(x)

    def keep(self, corrects: bool) -> "Landed":
        """Wait for the messages to this worker; return a message that can be saved and lands with the same bits later.
        Call once. `corrects`: keep what `correct` needs, if possible."""
        return Landed(self.sent, self.land())

    def settle(self) -> Tensor:
        """Wait until the message is encoded, and return it: from then on its value is the decoded message."""
        return self.sent


class EarlyArrival(MessageInFlight):
    """Message that a GPU's second stream may receive before training's stream mixes it."""

    outgoing: Sequence[Pending] = ()  # its transfers, once it is sent
    incoming: Sequence[Pending] = ()

    @abstractmethod
    def sends(self) -> list[Message]:
        """Messages to send to other workers: a header, then the payload."""

    @abstractmethod
    def receives(self) -> list[Message]:
        """Buffers for the messages to this worker, in the order of the senders' `sends`: NCCL pairs by order, gloo by
        tag."""

    @abstractmethod
    def arrive(self) -> list[Tensor]:
        """Wait for the messages to this worker, decode and check them, on the current stream; return tensors in that
        stream's memory, which `land` reads. Call once, before `land`."""


@dataclass
class Landed(MessageInFlight):
    """Message whose mixture has arrived; if it `corrects`, keeps mixed - sent."""

    sent: Tensor
    mixed: Tensor | None
    corrects: bool = field(default=False, kw_only=True)
    sick: Sick | None = field(default=None, kw_only=True)  # raised by `land`: this worker's own message was refused

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
    """One round in flight, bucket by bucket, which can be saved with its received mixtures, and restored."""

    round: int
    step: int
    messages: list[MessageInFlight] = field(default_factory=list)
    departed: float = 0.0  # time of sending, by `perf_counter`; 0 before, and after a restore

    def state_dict(self, keep: Callable[[int], Landed]) -> dict[str, Any]:
        """State to save, as tensors and primitives. The mixture received for a bucket (`keep` of its index) replaces
        the launched message, as a round arrives once."""
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
        """Restore a saved round in flight, on the devices of the buckets."""
        mixed = state["mixed"]
        # Missing in older checkpoints.
        differences = state.get("differences", [False] * len(mixed))
        refused = state.get("refused", [None] * len(mixed))
        landed = [
            Landed(
                sent.to(x.device, copy=True),
                next((tensor.to(x.device, copy=True) for tensor in tensors), None),
                corrects=corrects,
                sick=sick and Sick(**{**sick, **{k: sick[k][0].to(x.device, copy=True) for k in ("sent", "mixed")}}),
            )
            # A round in flight may be older than the last buckets, and then shorter than `like`.
            for sent, tensors, corrects, sick, x in zip(state["sent"], mixed, differences, refused, like, strict=False)
        ]
        return cls(state["round"], state["step"], [*landed])


M = TypeVar("M", bound=MessageInFlight)


class Exchange(ABC, Generic[M]):
    """Base of exchanges: one worker's messages in every round (in a simulation all workers')."""

    pool: Pool  # Buffers of messages; the user of a mixture returns its buffer.
    coder: Memory  # State of the coder: estimates of both ends of a link, bytes of a message.
    neighbours: Callable[[int], StepLinks]  # Links of a step.

    @abstractmethod
    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        """Add buckets, to be mixed from the next launch on; every worker must call it at the same point. The rule sets
        how many elements of a message no codec may round."""

    def copied(self, x: Tensor, step: int, place: int) -> Copied:
        """Take buffers for the next message of bucket `place`, the corrected x; pass them to `launch`."""
        return Copied(self.pool.take(x), torch.empty(1, HEADER, dtype=torch.int64, device=x.device), step)

    @abstractmethod
    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> M:
        """Copy and encode one bucket's message for sending. By the end of `settle` the copy has the decoded values; it
        belongs to the exchange until `land`. `place` is the bucket's index among the admitted; the buckets of a round
        are launched in order. `copied`: the copy, if it exists already."""

    def _copy(self, message: Tensor, copied: Copied | None) -> Tensor:
        return copied.message if copied else self.pool.take(message).copy_(message)

    def depart(self, launched: Sequence[M], step: int) -> None:
        """Send all launched messages of a complete round that haven't been sent, and start to receive. In a simulation
        nothing is sent."""
        return

    def traffic(self) -> "Traffic":
        """Bytes sent, seconds waited and messages refused so far; the mixer counts rounds."""
        return Traffic()


@dataclass(frozen=True)
class Traffic:
    """Counters of one worker's communication; in an island of one device, which sends a part of a worker's bytes.
    `wait_seconds` are the host's, or the GPU's if the GPU waits; `in_flight_seconds` are between sending and mixing of
    a round's first bucket, as the host sees them."""

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
