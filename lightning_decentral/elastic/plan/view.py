"""Views: the workers that train together, numbered; the quorum of the last view that a new one needs; all times from
one; and the settings of one worker.

    number   1, 2, 3, ...: rises with every view
    needed   min(n // 2 + 1, least) of the n members of the last view; of two, one

More than half can be on one side of a cut network only, so views on both sides can't be. The operator's `least` may
allow a smaller side, too: then the lobby alone decides which side goes on, and a worker that doesn't reach the lobby
goes on only while those it doesn't reach either are too few for a view of their own.
"""

import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass

from lightning_decentral.elastic.plan.asynchronous import Asynchronous
from lightning_decentral.shared.plan.arguments import at_least, checked


def name_of(title: str, token: str, weight: int, place: str) -> str:
    """Name of one start of one worker: "title token *weight @place". From a view follows what its members take of the
    examples, and how to reach them."""
    return f"{title}{token}{f'*{weight}' if weight > 1 else ''}@{place}"


def place_of(name: str) -> str:
    """Address at which a member is reached."""
    return name.partition("@")[2]


def weight_of(name: str) -> int:
    """Weight of a member: how many times the examples of one of weight 1 it takes."""
    _, starred, weight = name.partition("@")[0].rpartition("*")
    return int(weight) if starred and weight.isdigit() else 1


def shown(name: str) -> str:
    """Name of a member for a reader: host:number of one that a starter started, else host:pid, or its place."""
    title, _, place = name.partition("@")
    host = place.rpartition(":")[0]
    if number := re.match(r"w(\d+)-", title):
        return f"{'localhost' if host.startswith('127.') else host}:{number[1]}"
    pid = re.match(r"(.+)-(\d+)-\w+", title)
    return f"{pid[1]}:{pid[2]}" if pid else place or name


def waiting_at(place: str, why: str) -> str:
    """A line on what a worker waits for at a lobby."""
    return f"waiting at {place}" + (why.removeprefix("waiting") if why.startswith("waiting ") else f": {why}")


@dataclass(frozen=True)
class View:
    """The members from `first_round` on, the oldest first: a member's place is its rank."""

    number: int
    members: tuple[str, ...]
    first_round: int
    # The members of the view before, more than half of whom must know this one before it is in force.
    before: tuple[str, ...]
    origin: str  # the worker whose parameters the run began with; who has others belongs to another run
    # Members of the first view: how the run's examples and steps are counted, no matter who comes and goes.
    founders: int
    left: tuple[str, ...] = ()  # of the view before, those who announced that they end; others that are gone were lost

    @property
    def key(self) -> int:
        """number * 2^31 + a checksum of the rest: what messages carry. Below 2^63 for 2^32 views."""
        rest = f"{self.members} {self.first_round} {self.before} {self.origin} {self.left}"
        return self.number << 31 | zlib.crc32(rest.encode()) >> 1

    def line(self, ended: Collection[str], dead_after: float) -> str:
        """A line for a reader: who joined, left, was lost and why: its connection to the lobby has `ended`, or it was
        silent for `dead_after` seconds."""
        why = {True: "connection ended", False: f"silent for {dead_after:g} s"}
        lost = [name for name in self.before if name not in (*self.members, *self.left)]
        joined = [name for name in self.members if self.number == 1 or name not in self.before]
        changes = {
            "joined": map(shown, joined),
            "left": map(shown, self.left),
            "lost": (f"{shown(name)} ({why[name in ended]})" for name in lost),
        }
        texts = [f"; {change}: {', '.join(found)}" for change, names in changes.items() if (found := list(names))]
        return f"view {self.number}: {len(self.members)} workers from round {self.first_round}{''.join(texts)}"


@checked
@dataclass(frozen=True)
class Bounds:
    """Bounds on the number of workers of a run.

    Raises:
        ValueError: not 1 <= least <= most.
    """

    least: int  # a run begins with; and what a lobby lets go on where it isn't more than half of the last view
    most: int  # members of a view. Others wait

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"workers must be LEAST:MOST with 1 <= LEAST <= MOST, got {self.least}:{self.most}")

    def needed(self, size: int) -> int:
        """Number of members of a view of this size that the next one has at least."""
        return min(size // 2 + 1, self.least) if size > 2 else 1

    def may_follow(self, stay: int, size: int, wanted: int) -> bool:
        """Return whether a view of `wanted` members, `stay` of them from the last one of `size`, may follow it."""
        return 2 * stay > size or (stay >= self.needed(size) and wanted >= self.least)

    def may_go_on_alone(self, reached: int, size: int) -> bool:
        """Return whether members that reach each other, but no lobby, are sure that no view is made without them."""
        return 2 * reached > size and size - reached < self.needed(size)


@checked
@dataclass(frozen=True)
class Times:
    """All times of an elastic run, in seconds, from one.

    Raises:
        ValueError: it isn't positive.
    """

    dead_after: float = 10.0  # of silence, a worker counts as dead

    def __post_init__(self) -> None:
        if not self.dead_after > 0:
            raise ValueError(f"dead_after must be more than 0 seconds, got {self.dead_after}: 10 suits most networks")

    @property
    def beat(self) -> float:
        """Seconds between two signs of life: several may be late."""
        return self.dead_after / 5

    @property
    def ended(self) -> float:
        """Seconds of silence of a worker whose connection to the lobby has ended: one that lives makes another with its
        next beat."""
        return 2 * self.beat

    @property
    def alone(self) -> float:
        """Seconds without the lobby, until members ask each other."""
        return self.dead_after / 2

    @property
    def minority(self) -> float:
        """Seconds of silence of those who are missing, until fewer than half go on: a lobby that was cut off gets their
        beats again."""
        return 3 * self.dead_after

    def rounds_ahead(self, pace: float) -> int:
        """Rounds until a view begins: every member should know it by then, and all get it at once. A round takes `pace`
        seconds; 0: unknown."""
        return 2 + self.rounds_in(self.beat, pace)

    def rounds_in(self, seconds: float, pace: float) -> int:
        """Whole rounds; 0 where nobody knows how long they take."""
        return int(min(seconds / pace, 100_000)) if pace > 0 else 0


@dataclass(frozen=True)
class ElasticSettings:
    """The value that `elastic.Elastic` is, for floors that know no strategies. Fields and errors: `Elastic`'s."""

    lobby: str = ""
    workers: tuple[int, int] = (2, 16)
    dead_after: float = 10.0
    host: str = ""
    weight: int = 1
    asynchronous: Asynchronous | None = None

    def __post_init__(self) -> None:
        Bounds(*self.workers), Times(self.dead_after)
        at_least(1, "1 takes batches as the DataLoader makes them", weight=self.weight)
