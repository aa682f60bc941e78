"""Where a round is waited for, mixed and gathered: where it lands, or meanwhile, on a stream of the device's own."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from lightning_decentral.gossip.wire import Land, Traffic
from lightning_decentral.stopwatch import DeviceStopwatch
from lightning_decentral.transport import Transport

Start = Callable[[], Land]


class AtLanding:
    """Where it lands, for transports whose wait is the host's: waiting sooner would block."""

    def begin(self, start: Start, depart: Callable[[], None], message: Sequence[Tensor], encoded: bool) -> Land:
        """Start it; it departs with the others."""
        return start()

    def traffic(self, counted: Traffic) -> Traffic:
        """As counted."""
        return counted


class Aside:
    """On a second stream, as soon as it starts; the caller's stream waits for the outcome where it lands.

        caller   message |     forward, backward, update     | mixed
        aside            | send, wait, mix, gather |

    All that the exchanges keep (their pools, a codec's estimates) is touched on this stream alone.

    Args:
        device: a CUDA one, its transfers by NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._waited = DeviceStopwatch()
        self._in_flight_seconds = 0.0

    def begin(self, start: Start, depart: Callable[[], None], message: Sequence[Tensor], encoded: bool) -> Land:
        """Start, send and land it on this stream.

        Args:
            encoded: starting overwrites the message, which the caller reads next.
        """
        caller = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)  # for the message, and for readers of the buffers that went back to a pool
        with torch.cuda.stream(self._stream):
            land = start()
            depart()
            if encoded:
                caller.wait_stream(self._stream)
            mixed = land()
            done = self._stream.record_event()
        for tensor in message:
            tensor.record_stream(self._stream)
        return self._landing(mixed, done)

    def _landing(self, mixed: list[Tensor], done: torch.cuda.Event) -> Land:
        launched = perf_counter()

        def land() -> list[Tensor]:
            caller = torch.cuda.current_stream(self._stream.device)
            self._waited.start()
            caller.wait_event(done)
            self._waited.stop()
            self._in_flight_seconds += perf_counter() - launched
            for tensor in mixed:
                tensor.record_stream(caller)
            return mixed

        return land

    def traffic(self, counted: Traffic) -> Traffic:
        """With the seconds that the caller's stream waited: this one's are hidden."""
        return replace(counted, wait_seconds=self._waited.seconds(), in_flight_seconds=self._in_flight_seconds)


def aside(transport: Transport, device: torch.device) -> AtLanding | Aside:
    """What rounds over such a transport allow."""
    return Aside(device) if transport.queued else AtLanding()
