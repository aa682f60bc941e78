"""A network of channels, in virtual time: each keeps its order, may be held or broken, and takes time of its own."""

import heapq
import random
from collections.abc import Callable
from itertools import count


class Network:
    """Time, channels and their cuts.

    A cut holds what is sent until it ends, as TCP does, or breaks the channel: what was under way is lost, the
    receiver sees the end of the connection, and the sender makes a new one.
    """

    def __init__(self, rng: random.Random) -> None:
        self.now = 0.0
        self._rng, self._order = rng, count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._last: dict[tuple[str, str], float] = {}
        self._epoch: dict[tuple[str, str], int] = {}
        self._held: dict[frozenset[str], float] = {}

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), do))

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, do = heapq.heappop(self._heap)
            do()
        self.now = until

    def send(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        channel = (source, target)
        epoch = self._epoch.get(channel, 0)
        delay = self._rng.expovariate(50) if self._rng.random() < 0.95 else self._rng.uniform(0, 0.3)
        begin = max(self.now, self._held.get(frozenset(channel), 0.0))
        when = max(self._last.get(channel, 0.0), begin + delay)
        self._last[channel] = when
        self.at(when - self.now, lambda: arrive() if self._epoch.get(channel, 0) == epoch else None)

    def hold(self, a: str, b: str, seconds: float) -> None:
        self._held[frozenset((a, b))] = self.now + seconds

    def broken(self, source: str, target: str) -> None:
        channel = (source, target)
        self._epoch[channel] = self._epoch.get(channel, 0) + 1

    def is_held(self, a: str, b: str) -> bool:
        return self._held.get(frozenset((a, b)), 0.0) > self.now
