"""What an exchange is: a message of a few buckets goes to the neighbours, a mixture of theirs comes back.

    launch        ->  Started     depart          land, or correct
    copy, encode      .           send, receive   wait, decode, mix

Who launched a round keeps what `start` returned, hands it to `depart`, and lands it: nothing else remembers it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.correction import apply_difference
from lightning_decentral.gossip.compute.integrity import Sick
from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.device import stopwatch
from lightning_decentral.shared.compute.health import state_
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Transport

Number = float | NDArray[np.float64]
HEADER = 3
"""Numbers before a message: its round, the elements of all buckets, its largest magnitude."""


class Hearing(Protocol):
    """Who hears whom at one step: a worker's `Neighbours`, or the `Entries` of all workers' matrix in a simulation,
    where numbers are columns [size, 1]."""

    @property
    def silent(self) -> bool: ...
    @property
    def own(self) -> Number: ...
    @property
    def degree(self) -> Number: ...


class Memory(Protocol):
    """What is asked of a coder from outside: bytes of a message, the error as last measured, and what it remembers."""

    @property
    def encodes(self) -> bool: ...
    @property
    def bytes(self) -> int: ...
    def error(self) -> float | None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Copied:
    """A bucket's next message: its copy, and what its header says, both made where the bucket is corrected.

    Attributes:
        message: gets the values of the bucket.
        said: int64 [rows, HEADER]; the first row gets the header.
        elements: of all buckets.
    """

    message: Tensor
    said: Tensor
    step: int
    elements: int = 0

    def of(self, x: Tensor) -> "Copied":
        """Made of x, in a pass of its own."""
        state_(self.message, self.said[0], x, self.step, self.elements)
        return self


Brought = tuple[list[Tensor], Copied | None]


class Correction(Protocol):
    """What may take the place of a landing, for one bucket."""

    def correct(self, x: Tensor, rate: float, copied: Copied | None = None) -> None:
        """x <- x + rate (mixed - sent), in one pass, which makes `copied` of it, too. Once."""

    def keep(self) -> "Landed":
        """Wait for what was sent to this worker; what `correct`s with the same bits later. Once."""


class Started(ABC):
    """Buckets of one round between start and landing."""

    together: bool = False
    """Whether the others must land it while this worker does, and it isn't done beside the training."""

    @property
    def correction(self) -> Correction | None:
        """Of what can be corrected without a mixture."""
        return None

    @abstractmethod
    def land(self) -> list[Tensor]:
        """Wait for what was sent to this worker, and return the mixture, bucket by bucket. Once."""

    def settle(self) -> None:
        """Wait until the message is ready to leave: from then on it is what the others decode of it."""
        return


class Arriving(Started):
    """Buckets that a device's second stream may hear before they land on the training's."""

    @abstractmethod
    def arrive(self) -> None:
        """Wait for what was sent to this worker, decode and judge it, on the current stream. Once, before it lands."""

    @abstractmethod
    def belongings(self) -> list[Tensor]:
        """What arrived, that stream's memory, which the landing reads."""


@dataclass
class Landed(Started):
    """What was mixed already; where it `corrects`, mixed - sent.

    Args:
        sick: why nothing was: this worker's own message was refused, which its landing says.
    """

    mixed: list[Tensor]
    corrects: bool = field(default=False, kw_only=True)
    sick: Sick | None = field(default=None, kw_only=True)

    @property
    def correction(self) -> Correction | None:
        return self if self.corrects else None

    def land(self) -> list[Tensor]:
        if self.sick:
            raise self.sick
        return self.mixed

    def correct(self, x: Tensor, rate: float, copied: Copied | None = None) -> None:
        for difference in self.mixed:
            apply_difference(x, difference, rate)
        if copied:
            copied.of(x)

    def keep(self) -> "Landed":
        return self


def brought(x: Tensor, rate: float | None, copied: Copied | None, started: Started) -> Brought:
    """(the mixture, None); (nothing, `copied`) where x was corrected at once, as a rule that is one pass lets it."""
    if rate is None or (correction := started.correction) is None:
        return started.land(), None
    correction.correct(x, rate, copied)
    return [], copied


def kept(rate: float | None, started: Started) -> Landed:
    """What stands in for what was started, once it has come."""
    if rate is None or (correction := started.correction) is None:
        return Landed(started.land())
    return correction.keep()


S = TypeVar("S", bound=Started)


class Exchange(ABC, Generic[S]):
    """One worker's share of every round (or all workers' at once, in a simulation)."""

    pool: Pool
    """Where message buffers come from, and where whoever used what landed gives them back."""

    coder: Memory
    """What both ends of a link remember of each other, and what of a message travels."""

    neighbours: Callable[[int], Hearing]
    """Who hears whom at a step."""

    @abstractmethod
    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        """These buckets will be mixed, too, from the next start on. Every worker calls it at the same point.

        Args:
            combine: their rule, which says how much of a message no codec may touch.
        """

    @abstractmethod
    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> S:
        """Make the buckets of `message` ready to leave. They become what the others decode of them, by the end of
        `settle`, and belong to the exchange until landed.

        Args:
            first: which of the admitted buckets `message` begins with. A round may be made ready in several calls, in
                order.
        """

    def copied(self, x: Tensor, step: int, place: int) -> Copied:
        """Where a correction puts the next message of bucket `place`, which is x as corrected; then to be launched."""
        return Copied(self.pool.take(x), torch.empty(1, HEADER, dtype=torch.int64, device=x.device), step)

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> tuple[Tensor, S]:
        """Start a copy of one bucket's message, which is the caller's as long as a round is in flight: (copy, started).

        Args:
            place: of the bucket among the admitted.
            copied: the copy, where a correction has made it.
        """
        sent = copied.message if copied else self.pool.take(message).copy_(message)
        return sent, self.start([sent], step, place)

    @abstractmethod
    def depart(self, started: Sequence[S], step: int) -> None:
        """The round is complete: send all of it that hasn't left, and begin to receive the others'."""

    def traffic(self) -> "Traffic":
        return Traffic()


@dataclass(frozen=True)
class Traffic:
    """What one worker's exchange did so far.

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


class Arrivals(Exchange[S]):
    """One whose rounds are `Arriving`.

    Attributes:
        transport: that their messages leave by.
    """

    transport: Transport
    device: torch.device


class Tally:
    """Counters since construction.

    Args:
        device: whose stream waits for messages.
    """

    def __init__(self, device: torch.device) -> None:
        self.bytes_sent = 0
        self._waited = stopwatch(device)
        self._rounds, self._in_flight_seconds = 0, 0.0

    def land(self, pending: Sequence[Pending], departed: float, first: int) -> None:
        """Wait for these.

        Args:
            departed: when they left, by `perf_counter`.
        """
        assert departed, "land only what has departed"
        self._waited.during(part.wait for part in pending)
        # A round counts once, with its first bucket.
        if not first:
            self._in_flight_seconds += perf_counter() - departed
            self._rounds += 1

    def wait(self, pending: Sequence[Pending]) -> None:
        """Once more for these, of a round that has been counted."""
        self._waited.during(part.wait for part in pending)

    def traffic(self, refused: int) -> Traffic:
        return Traffic(self._rounds, self.bytes_sent, self._waited.seconds(), self._in_flight_seconds, refused)
