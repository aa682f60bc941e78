"""What an exchange is: `start(message, step) -> land`, `depart()`, and `land()` waits and returns what was mixed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.codec.codec import check_codec
from lightning_decentral.gossip.compute.codec.quantize import Plain
from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.shared.compute.buckets import Matrix, Pool
from lightning_decentral.shared.compute.device import stopwatch
from lightning_decentral.shared.wire.pending import Pending

Land = Callable[[], list[Tensor]]


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

    def __add__(self, other: "Traffic") -> "Traffic":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Traffic(*(a + b for a, b in pairs))


class Exchange(ABC):
    """One worker's share of every round (or all workers' at once, in a simulation)."""

    pool: Pool
    """Where message buffers come from, and where whoever used what landed gives them back."""

    def admit(self, buckets: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        """These buckets will be mixed, too, from the next start on. Every worker calls it at the same point.

        Args:
            matrices: those in each bucket, for codecs that see them.
            combine: their rule, which says how much of a message no codec may touch.
        """
        return

    @abstractmethod
    def silent(self, step: int) -> bool:
        """Whether this worker neither sends nor hears anything at this step."""

    @property
    def learns(self) -> bool:
        """Whether what lands changes what is made ready next, so that the one must not run ahead of the other."""
        return False

    @property
    def encodes(self) -> bool:
        """Whether messages travel otherwise than as they are."""
        return False

    def copies_sent(self, step: int) -> float:
        """Bytes sent at this step in units of the message's."""
        return 0.0

    @abstractmethod
    def own(self, step: int) -> Tensor:
        """w_ii of this step: a scalar, or [size, 1] in a simulation."""

    @abstractmethod
    def degree(self, step: int) -> Tensor:
        """How many others are heard at this step, likewise."""

    @abstractmethod
    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> Land:
        """Make the buckets of `message` ready to leave, with `depart` at the latest. They become what the others decode
        of them, by the end of `settle`, and belong to the exchange until landed.

        Args:
            first: which of the admitted buckets `message` begins with. A round may be made ready in several calls, in
                order.
        """

    def depart(self) -> None:
        """Send all that `start` made ready and hasn't left yet, and begin to hear the others'."""
        return

    def settle(self) -> None:
        """Wait until all that was started is ready to leave."""
        return

    def message_bytes(self, message: Sequence[Tensor]) -> int:
        """Bytes of one copy of such a message on the wire, without its header."""
        return sum(m.numel() * m.element_size() for m in message)

    def codec_error(self) -> float | None:
        """||message - decoded|| / ||message - what was known of it|| as last measured; None for plain messages."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """The codec, and what both ends of a link remember of each other."""
        return {"codec": repr(Plain())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            ValueError: it was taken under another codec.
        """
        check_codec(state, repr(Plain()))

    def traffic(self) -> Traffic:
        """Counters since construction."""
        return Traffic()


@dataclass
class Around(Exchange):
    """Another exchange and something more: what a subclass doesn't say is as the inner one does it."""

    inner: Exchange

    @property
    def learns(self) -> bool:
        """The inner one's."""
        return self.inner.learns

    @property
    def encodes(self) -> bool:
        """The inner one's."""
        return self.inner.encodes

    def silent(self, step: int) -> bool:
        """The inner one's."""
        return self.inner.silent(step)

    def copies_sent(self, step: int) -> float:
        """The inner one's."""
        return self.inner.copies_sent(step)

    def own(self, step: int) -> Tensor:
        """The inner one's."""
        return self.inner.own(step)

    def degree(self, step: int) -> Tensor:
        """The inner one's."""
        return self.inner.degree(step)

    def depart(self) -> None:
        """The inner one's."""
        self.inner.depart()

    def settle(self) -> None:
        """The inner one's."""
        self.inner.settle()

    def message_bytes(self, message: Sequence[Tensor]) -> int:
        """The inner one's."""
        return self.inner.message_bytes(message)

    def codec_error(self) -> float | None:
        """The inner one's."""
        return self.inner.codec_error()

    def state_dict(self) -> dict[str, Any]:
        """The inner one's."""
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """To the inner one."""
        self.inner.load_state_dict(state)


def number(value: float, device: torch.device) -> Tensor:
    """A scalar, filled on the device: copying it there would make the host wait."""
    return torch.full((), value, dtype=torch.float64, device=device)


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
        """Wait for these; a round counts with its first bucket.

        Args:
            departed: when they left, by `perf_counter`.
        """
        assert departed, "land only what has departed"
        self._waited.start()
        for part in pending:
            part.wait()
        self._waited.stop()
        if not first:
            self._in_flight_seconds += perf_counter() - departed
            self._rounds += 1

    def traffic(self, refused: int) -> Traffic:
        """With so many refused messages."""
        return Traffic(self._rounds, self.bytes_sent, self._waited.seconds(), self._in_flight_seconds, refused)
