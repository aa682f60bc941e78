"""Dealing of examples to members, where members come and go: passes over all of them, dealt tick by tick.

Which epoch and batch a round is (`Calendar`), is the same for all members, whenever they came.

    epoch, batch = (before + round) // r, (before + round) % r * accumulated,   r = ceil(batches / accumulated)

An epoch has as many batches as the first members needed for all examples, and keeps them: so all validate after the
same rounds. Members that come or go change how fast examples are gone through, not how long an epoch is.

    a pass     a permutation of the examples, by (seed, number of the pass)
    a tick     every member of the view in force takes the next `batch` of what is left, times its weight
    a change   what those that are lost were dealt in this pass is dealt again, behind what is left

So every example of a pass is dealt to exactly one of those that are there when it ends, but for the last tick's: it is
filled up with examples of the same pass, as a DistributedSampler does. All of it follows from the views and their first
ticks; a member that learns of one late has dealt some ticks by the view before, and goes on as the others.

What is kept, and what a newcomer is given, is the `floor`, a pass from which all are dealt, and the views since: not
more in a long run than in a short one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lightning_decentral.elastic.plan.view import weight_of

Indices = NDArray[np.int64]
LATE_TICKS = 1000  # Ticks by which a member may learn of a view late.
KEPT_VIEWS = 100  # Views kept since the floor; of more, the floor is what they made of a pass.

UNBOUNDED = 2**40  # Batches of an epoch that has no end.


@dataclass(frozen=True)
class Calendar:
    """The run's.

    Args:
        batches: of an epoch.
        accumulated: batches of a round.
        before: rounds' worth of epochs that were over when the run began, as a checkpoint states.
        steps: that were over then.
        weights: of those that began the run, together; 0: nobody knows.
    """

    batches: int
    accumulated: int = 1
    before: int = 0
    steps: int = 0
    weights: int = 0

    def place(self, round: int) -> tuple[int, int]:
        """(epoch, batches of it that are over) where this round begins."""
        epochs, rounds = divmod(self.before + round, -(-self.batches // self.accumulated))
        return epochs, rounds * self.accumulated

    def tick(self, round: int) -> int:
        """Batches that are over where this round begins."""
        epochs, batches = self.place(round)
        return epochs * self.batches + batches

    def step(self, round: int) -> int:
        """Number of optimizer steps that are over where this round begins."""
        return self.steps + round


@dataclass
class Pass:
    """One pass, as far as it is dealt.

    Args:
        start: its first tick.
        left: what wasn't dealt before `since`, in order; None: all, as the permutation has it.
        dealt: before `since`, to whom.
    """

    number: int
    start: int
    since: int
    left: Indices | None = None
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
    floor: Pass | None = None  # a value, which nobody changes
    _passes: list[Pass] = field(default_factory=list, init=False)
    _starts: list[Pass] = field(default_factory=list, init=False)

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Properties that all members' dealings have in common: examples, batch size, whether they are shuffled."""
        return self.examples, self.batch, self.shuffle

    def enter(self, tick: int, members: Sequence[str]) -> None:
        """Enter the members from this tick on, which may be over."""
        if self.floor is not None:
            tick = max(tick, self.floor.since)
        if self.views.get(tick) != tuple(members):
            self.views[tick] = tuple(members)
            # Those that it changes are dealt anew; the one before the last stays, to begin there.
            self._starts = [p for p in self._starts if p.start <= tick]
            self._passes = [self._begun(p) for p in self._starts[-2:]]

    def copy(self) -> "Dealing":
        """One for a newcomer, as it is now: passes are dealt anew from the floor."""
        return replace(self, views=dict(self.views))

    def begin(self, before: "Dealing", tick: int) -> None:
        """Go on from another one, of other examples, by a new pass at this tick."""
        self.floor = Pass(before._pass_of(tick).number + 1, tick, tick)
        later = {first: members for first, members in before.views.items() if first > tick}
        self.views = {tick: before._members(tick), **later}

    def share(self, tick: int, name: str) -> Indices:
        """[batch * weight]: what this member takes; fewer examples are repeated. Ticks from the first view on. KeyError
        where it is no member then."""
        now, members = self._pass_of(tick), self._members(tick)
        if name not in members:
            raise KeyError(name)
        assert now.left is not None
        offset = (tick - now.since) * self._all(members) + self._all(members[: members.index(name)])
        found = now.left[np.arange(offset, offset + self._all([name])) % len(now.left)]
        self._settle(tick - LATE_TICKS)
        return found

    def _all(self, members: Sequence[str]) -> int:
        """Number of examples that these members take in a tick."""
        return self.batch * sum(map(weight_of, members))

    def _members(self, tick: int) -> tuple[str, ...]:
        return self.views[max(first for first in self.views if first <= tick)]

    def _pass_of(self, tick: int) -> Pass:
        if not self._passes:
            self._starts = [self.floor or self._first()]
            self._passes = [self._begun(self._starts[0])]
        while (end := self._end(self._passes[-1], tick)) is not None:
            self._starts.append(Pass(self._passes[-1].number + 1, end, end))
            self._passes = [self._passes[-1], self._begun(self._starts[-1])]
        return self._passes[-1]

    def _first(self) -> Pass:
        return Pass(0, min(self.views), min(self.views))

    def _begun(self, of: Pass) -> Pass:
        begun = replace(of, dealt={name: [*parts] for name, parts in of.dealt.items()})
        if begun.left is None:
            begun.left = np.arange(self.examples)
            if self.shuffle:
                begun.left = np.random.default_rng((self.seed, begun.number)).permutation(self.examples)
        return begun

    def _settle(self, tick: int) -> None:
        """No view begins before this tick any more: what was before isn't needed."""
        over = [p for p in self._starts if p.since <= tick]
        if not over:
            return
        floor, before = over[-1], self.floor
        changes = sorted(first for first in self.views if floor.since < first <= tick)
        if len(changes) > KEPT_VIEWS:
            floor = self._begun(floor)
            for change in changes:
                self._change(floor, change)
            floor.dealt = {name: [np.concatenate(parts)] for name, parts in floor.dealt.items()}
        if floor is not before:
            self.floor = floor
            self._starts = [floor, *self._starts[len(over) :]]
            last = max(first for first in self.views if first <= floor.since)
            self.views = {first: of for first, of in self.views.items() if first >= last}

    def _end(self, now: Pass, tick: int) -> int | None:
        """The tick after its last one; None: it goes on at `tick`, and stands where the last view before that began."""
        for change in sorted(first for first in self.views if now.since < first <= tick):
            if (end := self._last(now)) <= change:
                return end
            self._change(now, change)
        return end if (end := self._last(now)) <= tick else None

    def _last(self, now: Pass) -> int:
        assert now.left is not None
        return now.since + -(-len(now.left) // self._all(self._members(now.since)))

    def _change(self, now: Pass, tick: int) -> None:
        assert now.left is not None
        before, after = self._members(now.since), self._members(tick)
        taken, now.left = np.split(now.left, [(tick - now.since) * self._all(before)])
        rows = np.split(taken.reshape(-1, self._all(before)), np.cumsum([self._all([n]) for n in before])[:-1], axis=1)
        for name, of in zip(before, rows, strict=True):
            now.dealt.setdefault(name, []).append(of.ravel())
        lost = [now.dealt.pop(name) for name in list(now.dealt) if name not in after]
        now.left = np.concatenate([now.left, *(part for parts in lost for part in parts)])
        now.since = tick
