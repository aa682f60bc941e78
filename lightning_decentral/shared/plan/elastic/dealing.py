"""Who trains with which examples, where members come and go: passes over all of them, dealt tick by tick.

    a pass     a permutation of the examples, by (seed, number of the pass)
    a tick     every member of the view in force takes the next `batch` of what is left, times its weight
    a change   what those that are lost were dealt in this pass is dealt again, behind what is left

So every example of a pass is dealt to exactly one of those that are there when it ends, but for the last tick's: it is
filled up with examples of the same pass, as a DistributedSampler does. All of it follows from the views and their first
ticks; a member that hears of one late has dealt some ticks by the view before, and goes on as the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_decentral.shared.plan.elastic.view import weight_of

Indices = NDArray[np.int64]


@dataclass
class Pass:
    """One pass, as far as it is dealt.

    Args:
        start: its first tick.
        left: what wasn't dealt before `since`, in order.
        dealt: before `since`, to whom.
    """

    number: int
    start: int
    since: int
    left: Indices
    dealt: dict[str, list[Indices]] = field(default_factory=dict)


@dataclass
class Dealing:
    """The same for all members.

    Args:
        examples: how many there are.
        batch: that a member of weight 1 takes in a tick.
        shuffle: whether a pass is a permutation; otherwise it is in order.
        views: {first tick: members}; none before the first.
    """

    examples: int
    batch: int
    shuffle: bool = True
    seed: int = 0
    views: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _passes: list[Pass] = field(default_factory=list)

    def enter(self, tick: int, members: Sequence[str]) -> None:
        """These are the members from this tick on, which may be over."""
        if self.views.get(tick) != tuple(members):
            self.views[tick] = tuple(members)
            # Those that it changes are dealt anew; the one before the last stays, to begin there.
            self._passes = [self._begun(p.number, p.start) for p in self._passes if p.start <= tick]

    def share(self, tick: int, name: str) -> Indices:
        """[batch * weight]: what this member takes; fewer examples are repeated. Ticks from the first view on.

        Raises:
            KeyError: it is no member then.
        """
        now, members = self._pass_of(tick), self._members(tick)
        if name not in members:
            raise KeyError(name)
        offset = (tick - now.since) * self._all(members) + self._all(members[: members.index(name)])
        return now.left[np.arange(offset, offset + self._all([name])) % len(now.left)]

    def _all(self, members: Sequence[str]) -> int:
        """What these take in a tick."""
        return self.batch * sum(map(weight_of, members))

    def _members(self, tick: int) -> tuple[str, ...]:
        return self.views[max(first for first in self.views if first <= tick)]

    def _pass_of(self, tick: int) -> Pass:
        if not self._passes:
            self._passes = [self._begun(0, min(self.views))]
        while (end := self._end(self._passes[-1], tick)) is not None:
            self._passes = [self._passes[-1], self._begun(self._passes[-1].number + 1, end)]
        return self._passes[-1]

    def _begun(self, number: int, tick: int) -> Pass:
        order: Indices = np.arange(self.examples)
        if self.shuffle:
            order = np.random.default_rng((self.seed, number)).permutation(self.examples)
        return Pass(number, tick, tick, order)

    def _end(self, now: Pass, tick: int) -> int | None:
        """The tick after its last one; None: it goes on at `tick`, and stands where the last view before that began."""
        for change in sorted(first for first in self.views if now.since < first <= tick):
            if (end := self._last(now)) <= change:
                return end
            self._change(now, change)
        return end if (end := self._last(now)) <= tick else None

    def _last(self, now: Pass) -> int:
        return now.since + -(-len(now.left) // self._all(self._members(now.since)))

    def _change(self, now: Pass, tick: int) -> None:
        before, after = self._members(now.since), self._members(tick)
        taken, now.left = np.split(now.left, [(tick - now.since) * self._all(before)])
        rows = np.split(taken.reshape(-1, self._all(before)), np.cumsum([self._all([n]) for n in before])[:-1], axis=1)
        for name, of in zip(before, rows, strict=True):
            now.dealt.setdefault(name, []).append(of.ravel())
        lost = [now.dealt.pop(name) for name in list(now.dealt) if name not in after]
        now.left = np.concatenate([now.left, *(part for parts in lost for part in parts)])
        now.since = tick
