"""Network benchmark: measures the seconds of collectives and of messages between neighbours.

seconds = median over repeats of the slowest worker's seconds"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from lightning_decentral.planner.plan.probes import Point, Probe, fit
from lightning_decentral.shared.compute.hardware import duration
from lightning_decentral.shared.plan.profile import LinkCost
from lightning_decentral.shared.wire.objects import gather_rows
from lightning_decentral.shared.wire.transport import Message, Transport, Wire

WARM_UP = 1
SIZES = (4096, 65_536, 1_048_576, 8_388_608, 33_554_432)

Call = Callable[[], object]
Operation = Callable[[Transport, int, torch.device], Call]
"""(group, bytes of the message, device) -> what one worker of the group does."""


def all_reduce(over: Transport, message_bytes: int, device: torch.device) -> Call:
    """All-reduce of messages of `message_bytes` bytes."""
    tensor = _floats(message_bytes, device)
    return lambda: over.all_reduce(tensor).wait()


def exchange(over: Transport, message_bytes: int, device: torch.device, peers: int = 1) -> Call:
    """Exchange: worker i sends `message_bytes` in total to i + 1, i + 2, i + 4, ..., and receives from i - 1, ..."""
    sends, receives = (
        [Message((over.rank + way * 2**k) % over.size, _floats(message_bytes / peers, device), 0) for k in range(peers)]
        for way in (1, -1)
    )
    return lambda: _all(over, sends, receives)


def all_gather(over: Transport, message_bytes: int, device: torch.device) -> Call:
    """All-gather of the parts of all workers, `message_bytes` bytes together."""
    part = _floats(message_bytes / over.size, device)
    whole = part.repeat(over.size)
    return lambda: over.all_gather_into(whole, part).wait()


def reduce_scatter(over: Transport, message_bytes: int, device: torch.device) -> Call:
    """Reduce-scatter of messages of `message_bytes` bytes: every worker gets its part of the sum."""
    part = _floats(message_bytes / over.size, device)
    whole = part.repeat(over.size)
    return lambda: over.reduce_scatter(part, whole).wait()


def broadcast(over: Transport, message_bytes: int, device: torch.device) -> Call:
    """Broadcast of the first worker's message to all workers."""
    tensor = _floats(message_bytes, device)
    return lambda: over.broadcast(tensor).wait()


def neighbours(workers: int) -> list[int]:
    """Numbers of neighbours to measure an exchange with: one, two, and the number in an exponential graph."""
    most = (workers - 1).bit_length()
    return sorted({1, min(2, most), most})


OPERATIONS: dict[str, Operation] = {
    o.__name__: o for o in (all_reduce, exchange, all_gather, reduce_scatter, broadcast)
}


def _floats(size_bytes: float, device: torch.device) -> torch.Tensor:
    return torch.zeros(max(1, round(size_bytes / 4)), device=device)


@dataclass(frozen=True)
class NetworkMeter:
    """Measures collectives in process groups of a world. Collective: every worker makes the same calls."""

    wire: Wire
    device: torch.device
    sizes: Sequence[int] = SIZES  # bytes of the messages, ascending
    repeats: int = 5
    longest_seconds: float = 0.5  # seconds of a message after which no larger message is measured
    say: Callable[[str], None] = lambda text: None  # called with a description of the next measurement

    def costs(self, probes: Sequence[Probe]) -> list[LinkCost]:
        """Fit a line for every operation and probe; for exchanges one for every number of neighbours."""
        joined = {groups: self.wire.group(groups) for groups in dict.fromkeys(probe.groups for probe in probes)}
        mine = [joined[probe.groups] for probe in probes]
        return [
            self._cost(name, probe, over, peers)
            for probe, over in zip(probes, mine, strict=True)
            for name in OPERATIONS
            for peers in (neighbours(probe.workers) if name == exchange.__name__ else [1])
        ]

    def _cost(self, name: str, probe: Probe, over: Transport | None, peers: int) -> LinkCost:
        operation = OPERATIONS[name] if peers == 1 else partial(exchange, peers=peers)

        def call(size: int) -> Call | None:
            return operation(over, size, self.device) if over else None

        points = self._points(call, f"{name} {probe}" + (f", {peers} neighbours each" if peers > 1 else ""))
        flows = len(probe.groups)
        return LinkCost(name, probe.reach, probe.workers, flows, *fit(points), tuple(points), probe.per_node, peers)

    def _points(self, call: Callable[[int], Call | None], title: str) -> list[Point]:
        points: list[Point] = []
        for size in self.sizes:
            self.say(f"{title}, {size:,} bytes")
            points.append((float(size), self._seconds(call(size))))
            if points[-1][1] > self.longest_seconds:
                break
        return points

    def _seconds(self, call: Call | None) -> float:
        """Measure the seconds of a call, equal on all workers; workers without a call only wait."""
        own = []
        for _ in range(WARM_UP + self.repeats):
            # A barrier, so that a late worker doesn't add to the seconds of the others.
            self.wire.flags.all_reduce(torch.zeros(1)).wait()
            own.append(duration(call, self.device) if call else 0.0)
        rows = gather_rows(self.wire.flags, torch.tensor(own[WARM_UP:], dtype=torch.float64))
        return float(rows.amax(0).quantile(0.5))

    def links(self, leaders: Sequence[int]) -> list[list[tuple[float, float]]]:
        """[i][j] -> (latency in seconds, bytes per second) of messages in both directions between these workers, pair
        after pair; the diagonal costs nothing."""
        over = self.wire.world
        found = [[(0.0, float("inf")) for _ in leaders] for _ in leaders]
        for i, a in enumerate(leaders):
            for j, b in enumerate(leaders[:i]):
                other = {a: b, b: a}.get(over.rank)
                points = self._points(partial(self._pair, other), f"host {j} and host {i}")
                found[i][j] = found[j][i] = fit(points)[:2]
        return found

    def _pair(self, other: int | None, size: int) -> Call | None:
        if other is None:
            return None
        sent, received = _floats(size, self.device), _floats(size, self.device)
        return lambda: _all(self.wire.world, [Message(other, sent, 0)], [Message(other, received, 0)])


def _all(over: Transport, sends: Sequence[Message], receives: Sequence[Message]) -> None:
    for pending in (part for parts in over.exchange(sends, receives) for part in parts):
        pending.wait()
