"""Views (numbered memberships: the workers that train together), the quorum that a new view needs, the times of an
elastic run, and the settings of one worker.

    number   1, 2, 3, ...: one more for every view
    needed   members of the last view's n that the next one must keep: min(n // 2 + 1, least); 1 if n = 2

Only one side of a cut network can have more than half of the members, so both sides can't make a view. The operator's
minimum `least` may allow a smaller side: then the lobby alone decides which side continues. A worker that doesn't reach
the lobby continues only while the members that it doesn't reach are too few for a view."""

import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from lightning_decentral.elastic.plan.asynchronous import Asynchronous
from lightning_decentral.shared.plan.arguments import at_least, checked


def name_of(title: str, token: str, weight: int, place: str) -> str:
    """Make the name of one start of one worker, "title token *weight @host:port": names in a view contain the members'
    weights and addresses."""
    return f"{title}{token}{f'*{weight}' if weight > 1 else ''}@{place}"


def place_of(name: str) -> str:
    """Return a member's address (host:port), by its name."""
    return name.partition("@")[2]


def weight_of(name: str) -> int:
    """Return a member's weight, the multiple of the batch that it takes, by its name."""
    _, starred, weight = name.partition("@")[0].rpartition("*")
    return int(weight) if starred and weight.isdigit() else 1


def shown(name: str) -> str:
    """Return a member's name for messages: host:number if a starter started it, else host:pid, or its address."""
    title, _, place = name.partition("@")
    host = place.rpartition(":")[0]
    if number := re.match(r"w(\d+)-", title):
        return f"{'localhost' if host.startswith('127.') else host}:{number[1]}"
    pid = re.match(r"(.+)-(\d+)-\w+", title)
    return f"{pid[1]}:{pid[2]}" if pid else place or name


def waiting_at(place: str, why: str) -> str:
    """Make the line that names what a worker waits for at a lobby."""
    return f"waiting at {place}" + (why.removeprefix("waiting") if why.startswith("waiting ") else f": {why}")


@dataclass(frozen=True)
class View:
    """Numbered membership: the members from `first_round` on, the oldest first. A member's index is its rank."""

    number: int
    members: tuple[str, ...]
    first_round: int
    # Members of the view before, more than half of which must know this view before it is in force.
    before: tuple[str, ...]
    origin: str  # founder, whose parameters the run began with; workers with another origin belong to another run
    # Number of members of the first view, by which the run's examples and steps are counted.
    founders: int
    left: tuple[str, ...] = ()  # members of the view before that announced their end; other missing ones were lost

    @cached_property
    def key(self) -> int:
        """Key of this view in messages: number * 2^31 + a checksum of the rest. Below 2^63 for 2^32 views."""
        rest = f"{self.members} {self.first_round} {self.before} {self.origin} {self.left}"
        return self.number << 31 | zlib.crc32(rest.encode()) >> 1

    def line(self, ended: Collection[str], dead_after: float) -> str:
        """Make the line about this view: members that joined, left or were lost, and why (the lobby's connection has
        `ended`, or the member was silent for `dead_after` seconds)."""
        why = {True: "connection ended", False: f"silent for {dead_after:g} s"}
        lost = [name for name in self.before if name not in (*self.members, *self.left)]
        joined = [name for name in self.members if self.number == 1 or name not in self.before]
        changes = {
            "joined": map(shown, joined),
            "left": map(shown, self.left),
            "lost": (f"{shown(name)} ({why[name in ended]})" for name in lost),
        }
        texts = [f"; {change}: {', '.join(found)}" for change, names in changes.items() if (found := list(names))]
        count = f"{len(self.members)} worker{'s' * (len(self.members) > 1)}"
        return f"view {self.number}: {count} from round {self.first_round}{''.join(texts)}"


@checked
@dataclass(frozen=True)
class Bounds:
    """Bounds on the number of workers of a run.

    Raises:
        ValueError: not 1 <= least <= most.
    """

    least: int  # minimum to begin a run, and to continue with less than half of the last view
    most: int  # maximum of members of a view; other workers wait

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"workers must be LEAST:MOST with 1 <= LEAST <= MOST, got {self.least}:{self.most}")

    def needed(self, size: int) -> int:
        """Return how many members of a view of this size the next view must keep."""
        return min(size // 2 + 1, self.least) if size > 2 else 1

    def may_follow(self, stay: int, size: int, wanted: int) -> bool:
        """Return whether a view of `wanted` members, `stay` of them from the last view's `size`, may follow."""
        return 2 * stay > size or (stay >= self.needed(size) and wanted >= self.least)

    def may_go_on_alone(self, reached: int, size: int) -> bool:
        """Return whether `reached` members without a lobby are sure that no view can be made without them."""
        return 2 * reached > size and size - reached < self.needed(size)


@checked
@dataclass(frozen=True)
class Times:
    """Times of an elastic run in seconds, all derived from `dead_after`.

    Raises:
        ValueError: `dead_after` isn't positive.
    """

    dead_after: float = 10.0  # seconds of silence after which a worker counts as dead

    def __post_init__(self) -> None:
        if not self.dead_after > 0:
            raise ValueError(f"dead_after must be more than 0 seconds, got {self.dead_after}: 10 suits most networks")

    @property
    def beat(self) -> float:
        """Seconds between two heartbeats; several may be late before a worker counts as dead."""
        return self.dead_after / 5

    @property
    def ended(self) -> float:
        """Seconds of silence after which a worker whose connection to the lobby has ended counts as dead: a live worker
        connects again at once."""
        return self.beat / 2

    @property
    def late(self) -> float:
        """Seconds of silence after which no newcomer fetches from a member: it may soon be lost."""
        return 2 * self.beat

    @property
    def alone(self) -> float:
        """Seconds without an answer of the lobby after which members ask each other."""
        return self.dead_after / 2

    @property
    def minority(self) -> float:
        """Seconds of silence of the missing members after which fewer than half continue: a lobby that was cut off gets
        heartbeats again by then."""
        return 3 * self.dead_after

    def rounds_ahead(self, pace: float, trip: float = 0.0) -> int:
        """Return the number of rounds until a view begins, when every member should know it. A round takes `pace`
        seconds, a message to the lobby and its answer `trip` (0: unknown)."""
        # Half a trip to the members, one more until enough have answered and all are told; the rest is a margin.
        known = min(self.beat, 4 * trip + self.beat / 10) if trip else self.beat
        return 2 + self.rounds_in(known, pace)

    def rounds_in(self, seconds: float, pace: float) -> int:
        """Return the whole rounds of `pace` seconds in a time; 0 if the pace is unknown."""
        return int(min(seconds / pace, 100_000)) if pace > 0 else 0


@dataclass(frozen=True)
class ElasticSettings:
    """Fields of `elastic.Elastic`, for modules that import no strategies; documented there."""

    lobby: str = ""
    workers: tuple[int, int] = (2, 16)
    dead_after: float = 10.0
    host: str = ""
    weight: int = 1
    asynchronous: Asynchronous | None = None
    key: str = ""

    def __post_init__(self) -> None:
        Bounds(*self.workers), Times(self.dead_after)
        at_least(1, "1 takes batches as the DataLoader makes them", weight=self.weight)
