"""Which groups of workers are measured, and the line through what was measured.

seconds(bytes) = latency + bytes / bandwidth:  min over latency >= 0, bandwidth > 0 of
    sum over points of ((latency + bytes / bandwidth - seconds) / seconds)^2
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
        """Of one group."""
        return len(self.groups[0])

    def __str__(self) -> str:
        flows = f"{len(self.groups)} flows of " if len(self.groups) > 1 else ""
        place = {"inside": "inside a node", "between": "between nodes"}[self.reach]
        return f"{place}, {flows}{self.workers} workers"


def refuse_alone(size: int) -> None:
    """ValueError for one worker."""
    if size < 2:
        raise ValueError(f"a network needs at least 2 workers to be measured, got {size}: start it by torchrun")


def probes(size: int, per_node: int) -> list[Probe]:
    """Inside the first node and between nodes, groups of 2, 4, 8, ... and of all: one flow, and as many as a node has
    workers for; between nodes one worker of each, and last everyone in one group. Workers are numbered node by node.

    Raises:
        ValueError: one worker, or nodes of different size.
    """
    refuse_alone(size)
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
    lines = [line for line in (_free(points), _through_zero(points)) if line[0] >= 0 and line[1] >= slowest]
    lines.append((_constant(points), slowest))
    latency, per_byte = min(lines, key=lambda line: sum(e * e for e in _errors(points, *line)))
    return latency, 1 / per_byte, max(map(abs, _errors(points, latency, per_byte)))


def _errors(points: Sequence[Point], latency: float, per_byte: float) -> list[float]:
    return [(latency + per_byte * size) / seconds - 1 for size, seconds in points]


def _free(points: Sequence[Point]) -> tuple[float, float]:
    """Where the gradient is zero: u = 1 / seconds, v = bytes / seconds; latency u + per_byte v = 1."""
    u, v = [1 / seconds for _, seconds in points], [size / seconds for size, seconds in points]
    uu, uv, vv = (sum(a * b for a, b in zip(x, y, strict=True)) for x, y in ((u, u), (u, v), (v, v)))
    determinant = uu * vv - uv * uv
    if determinant <= 1e-12 * uu * vv:
        return -1.0, -1.0  # one size only
    return (sum(u) * vv - sum(v) * uv) / determinant, (sum(v) * uu - sum(u) * uv) / determinant


def _through_zero(points: Sequence[Point]) -> tuple[float, float]:
    v = [size / seconds for size, seconds in points]
    return 0.0, sum(v) / (sum(x * x for x in v) or 1.0)


def _constant(points: Sequence[Point]) -> float:
    u = [1 / seconds for _, seconds in points]
    return sum(u) / sum(x * x for x in u)
