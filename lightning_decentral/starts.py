"""What all workers of a measurement must have in common before they make groups: otherwise one waits for ever in a
collective that another never calls.
"""

from collections.abc import Sequence
from dataclasses import dataclass

WORDS = "start with the same words on every host"
SHARED = {
    "per_node": ("workers of a node", "start equally many on each node"),
    "device": (
        "devices",
        "give each worker a GPU of its own on every host, or set CUDA_VISIBLE_DEVICES= on every host",
    ),
    "sizes": ("--sizes", WORDS),
    "repeats": ("--repeats", WORDS),
    "longest_seconds": ("--longest-seconds", WORDS),
    "hosts": ("--hosts given", WORDS),
}
"""Field -> (its name for the user, the remedy)."""


@dataclass(frozen=True)
class Start:
    """How one worker was started.

    Args:
        host: where it runs.
        mistake: what is wrong with its own words or file; empty where nothing is.
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


def refuse_mistakes(starts: Sequence[Start]) -> None:
    """ValueError with the first worker's mistake and its host.

    Args:
        starts: in order of rank.
    """
    for rank, start in enumerate(starts):
        if start.mistake:
            raise ValueError(f"worker {rank} on {start.host}: {start.mistake}")


def refuse_differences(starts: Sequence[Start]) -> None:
    """ValueError with the first worker that was started otherwise than worker 0.

    Args:
        starts: in order of rank.
    """
    for field, (name, remedy) in SHARED.items():
        first, *others = [(getattr(start, field), f"worker {i} on {start.host}") for i, start in enumerate(starts)]
        for value, where in others:
            if value != first[0]:
                raise ValueError(f"{name}: {first[0]} for {first[1]}, {value} for {where}: {remedy}")
