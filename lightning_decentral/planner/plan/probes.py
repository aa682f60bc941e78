"""Network probes: groups of workers to measure, the fitted line, and a check that all hosts have the same options.

seconds(bytes) = latency + bytes / bandwidth:  min over latency >= 0, bandwidth > 0 of
    sum over points of (latency + bytes / bandwidth - seconds)^2 / seconds
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_BYTES_PER_SECOND = 1e15  # bandwidth where larger messages took no longer, as a file can't hold infinity

Point = tuple[float, float]


@dataclass(frozen=True)
class Probe:
    """Groups of workers that are measured at the same time."""

    reach: str  # `inside` a node or `between` nodes
    groups: tuple[tuple[int, ...], ...]
    per_node: int  # workers of a group that share a node

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
    ValueError: one worker, or nodes of different size."""
    if size < 2:
        raise ValueError(f"a network needs at least 2 workers to be measured, got {size}: start it by torchrun")
    if size % per_node:
        raise ValueError(f"{size} workers don't divide into nodes of {per_node}: start equally many on each node")
    nodes, found = size // per_node, list[Probe]()
    for reach, most in (("inside", per_node), ("between", nodes)):
        for width in sorted({most, *(1 << k for k in range(1, most.bit_length()))} - {0, 1}):
            starts = range(0, per_node - width + 1, width) if reach == "inside" else range(per_node)
            step, on_node = (1, width) if reach == "inside" else (per_node, 1)
            groups = tuple(tuple(range(start, start + width * step, step)) for start in starts)
            found.append(Probe(reach, groups[:1], on_node))
            found += [Probe(reach, groups, on_node)] if len(groups) > 1 else []
    return found + ([Probe("between", (tuple(range(size)),), per_node)] if nodes > 1 and per_node > 1 else [])


def fit(points: Sequence[Point]) -> tuple[float, float, float]:
    """(latency in seconds, bytes per second, largest relative distance of a point from the line). `points`: (bytes,
    seconds), at least one; seconds > 0."""
    sizes, seconds = np.array(points).T
    # Weights between those of equal errors, which would forget the latency, and of equal relative errors, which would
    # take a bandwidth from small messages that a buffer on the way swallows whole.
    weights = 1 / seconds
    # The least error lies where its gradient is zero, or on the border: a line through zero, or a level line.
    slowest = 1 / MOST_BYTES_PER_SECOND
    lines = [(0.0, sizes.sum() / (weights @ sizes**2 or 1.0)), (len(points) / weights.sum(), slowest)]
    if len(set(sizes)) > 1:
        per_byte, latency = np.polyfit(sizes, seconds, 1, w=weights**0.5)
        lines.append((latency, per_byte))
    allowed = [line for line in lines if line[0] >= 0 and line[1] >= slowest]
    latency, per_byte = min(allowed, key=lambda line: weights @ (line[0] + line[1] * sizes - seconds) ** 2)
    return float(latency), float(1 / per_byte), float(abs((latency + per_byte * sizes) / seconds - 1).max())


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
    """Options with which one worker was started: its host, its devices and the measurements."""

    host: str  # the host on which it runs
    mistake: str  # error in its own options or file; empty if there is none
    per_node: int  # workers of its node
    device: str  # type of its device
    sizes: tuple[int, ...]
    repeats: int
    longest_seconds: float
    hosts: bool  # whether pairs of hosts are measured, too


def refuse_starts(starts: Sequence[Start]) -> None:
    """Raise ValueError for the first worker with an error, or with other options than worker 0.
    `starts`: in order of rank."""
    names = [f"worker {rank} on {start.host}" for rank, start in enumerate(starts)]
    for name, start in zip(names, starts, strict=True):
        if start.mistake:
            raise ValueError(f"{name}: {start.mistake}")
    for field, (option, remedy) in SHARED.items():
        first, *others = [getattr(start, field) for start in starts]
        for name, value in zip(names[1:], others, strict=True):
            if value != first:
                raise ValueError(f"{option}: {first} for {names[0]}, {value} for {name}: {remedy}")
