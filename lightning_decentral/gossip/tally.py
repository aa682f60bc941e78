"""What one worker's exchange has done so far: rounds, bytes, seconds."""

from collections.abc import Sequence
from time import perf_counter

import torch

from lightning_decentral.gossip.wire import Traffic
from lightning_decentral.stopwatch import stopwatch
from lightning_decentral.transport import Pending


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
