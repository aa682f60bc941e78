"""Network probes: who is measured, the line fitted, and refusal of hosts that were started with different options.

seconds(bytes) = latency + bytes / bandwidth:  min over latency >= 0, bandwidth > 0 of
    sum over points of (latency + bytes / bandwidth - seconds)^2 / seconds
"""

from collections.abc import Sequence
from dataclasses import dataclass

MOST_BYTES_PER_SECOND = 1e15  # where larger messages took no longer; a file can't hold infinity

Point = tuple[float, float]


@dataclass(frozen=True)
class Probe:
    """Groups that do the same at the same time.

    Args:
        reach: `inside` a node or `between` nodes.
        per_node: workers of a group on one node.
    """

    reach: str
    groups: tuple[tuple[int, ...], ...]
    per_node: int

    @property
    def workers(self) -> int:
        return len(self.groups[0])

    def __str__(self) -> str:
        flows = f"{len(self.groups)} flows of " if len(self.groups) > 1 else ""
        place = {"inside": "inside a node", "between": "between nodes"}[self.reach]
        return f"{place}, {flows}{self.workers} workers"


def probes(size: int, per_node: int) -> list[Probe]:
    """Inside the first node and between nodes, groups of 2, 4, 8, ... and of all: one flow, and as many as a node has
    workers for; between nodes one worker of each, and last everyone in one group. Workers are numbered node by node.

    Raises:
        ValueError: one worker, or nodes of different size.
    """
    if size < 2:
        raise ValueError(f"a network needs at least 2 workers to be measured, got {size}: start it by torchrun")
    if size % per_node:
        raise ValueError(f"{size} workers don't divide into nodes of {per_node}: start equally many on each node")
    nodes = size // per_node
    found = [probe for width in _widths(per_node) for probe in _inside(width, per_node)]
    found += [probe for width in _widths(nodes) for probe in _between(width, per_node)]
    return found + ([Probe("between", (tuple(range(size)),), per_node)] if nodes > 1 and per_node > 1 else [])


def _widths(most: int) -> list[int]:
    """2, 4, 8, ... below most, and most."""
    powers = [1 << k for k in range(1, most.bit_length()) if 1 << k < most]
    return [*powers, most] if most > 1 else []


def _inside(width: int, per_node: int) -> list[Probe]:
    groups = [tuple(range(start, start + width)) for start in range(0, per_node - width + 1, width)]
    return _alone_and_together("inside", groups, width)


def _between(width: int, per_node: int) -> list[Probe]:
    groups = [tuple(range(local, width * per_node, per_node)) for local in range(per_node)]
    return _alone_and_together("between", groups, 1)


def _alone_and_together(reach: str, groups: Sequence[tuple[int, ...]], per_node: int) -> list[Probe]:
    alone = Probe(reach, (groups[0],), per_node)
    return [alone, Probe(reach, tuple(groups), per_node)] if len(groups) > 1 else [alone]


def fit(points: Sequence[Point]) -> tuple[float, float, float]:
    """(latency in seconds, bytes per second, largest relative distance of a point from the line).

    Args:
        points: (bytes, seconds), at least one; seconds > 0.
    """
    slowest = 1 / MOST_BYTES_PER_SECOND
    # The least under constraints lies where the gradient is zero, or at an end of what is allowed.
    lines = [line for line in (_free(points), _through_zero(points)) if line[0] >= 0 and line[1] >= slowest]
    lines.append((_constant(points), slowest))
    latency, per_byte = min(lines, key=lambda line: _distance(points, *line))
    return latency, 1 / per_byte, max(abs((latency + per_byte * size) / seconds - 1) for size, seconds in points)


def _distance(points: Sequence[Point], latency: float, per_byte: float) -> float:
    # Weights between those of equal errors, which would forget the latency, and of equal relative errors, which would
    # take a bandwidth from small messages that a buffer on the way swallows whole.
    return sum((latency + per_byte * size - seconds) ** 2 / seconds for size, seconds in points)


def _free(points: Sequence[Point]) -> tuple[float, float]:
    """Line where the gradient is zero: with weights w = 1 / seconds,
    latency sum w + per_byte sum w bytes = points;   latency sum w bytes + per_byte sum w bytes^2 = sum bytes."""
    w, wb, wbb = (sum(size**k / seconds for size, seconds in points) for k in range(3))
    determinant = w * wbb - wb * wb
    if determinant <= 1e-12 * w * wbb:
        return -1.0, -1.0  # one size only
    count, whole = len(points), sum(size for size, _ in points)
    return (count * wbb - whole * wb) / determinant, (whole * w - count * wb) / determinant


def _through_zero(points: Sequence[Point]) -> tuple[float, float]:
    return 0.0, sum(size for size, _ in points) / (sum(size**2 / seconds for size, seconds in points) or 1.0)


def _constant(points: Sequence[Point]) -> float:
    return len(points) / sum(1 / seconds for _, seconds in points)


SAME = "start with the same options on every host"
SHARED = {
    "per_node": ("workers of a node", "start equally many on each node"),
    "device": (
        "devices",
        "give each worker a GPU of its own on every host, or set CUDA_VISIBLE_DEVICES= on every host",
    ),
    "sizes": ("--sizes", SAME),
    "repeats": ("--repeats", SAME),
    "longest_seconds": ("--longest-seconds", SAME),
    "hosts": ("--hosts given", SAME),
}
"""Field -> (its name for the user, the remedy)."""


@dataclass(frozen=True)
class Start:
    """Start of one worker: its host, its devices and what it was asked to measure.

    Args:
        host: where it runs.
        mistake: what is wrong with its own options or file; empty where nothing is.
        per_node: workers of its node.
        device: type of its device.
        hosts: whether pairs of hosts are measured, too.
    """

    host: str
    mistake: str
    per_node: int
    device: str
    sizes: tuple[int, ...]
    repeats: int
    longest_seconds: float
    hosts: bool


def refuse_starts(starts: Sequence[Start]) -> None:
    """ValueError with the first worker's mistake, or the first worker that was started otherwise than worker 0.

    Args:
        starts: in order of rank.
    """
    names = [f"worker {rank} on {start.host}" for rank, start in enumerate(starts)]
    for name, start in zip(names, starts, strict=True):
        if start.mistake:
            raise ValueError(f"{name}: {start.mistake}")
    for field, (option, remedy) in SHARED.items():
        first, *others = [getattr(start, field) for start in starts]
        for name, value in zip(names[1:], others, strict=True):
            if value != first:
                raise ValueError(f"{option}: {first} for {names[0]}, {value} for {name}: {remedy}")
