"""Dealing of training examples to members that join and leave: passes over all examples, dealt tick by tick.

`Calendar` maps a round to its epoch and batch, the same for all members whenever they joined.

    epoch, batch = (before + round) // r, (before + round) % r * accumulated,   r = ceil(batches / accumulated)

An epoch has as many batches as the first members need for all examples, for the whole run: so all validate after the
same rounds. Members that join or leave change how fast the examples are used, not the length of an epoch.

    a pass     a permutation of the examples, by (seed, number of the pass)
    a tick     every member takes the next `batch` of the remaining examples, times its weight
    a change   examples of this pass that lost members were dealt are dealt again, after the remaining ones

So every example of a pass is dealt to exactly one of the members at its end. Only the last tick is filled up with
examples of the same pass, as a DistributedSampler does. All follows from the views (memberships) and their first
ticks. A member that learns of a view late has dealt some ticks by the previous view, and deals later ones like all.

The state that is kept, and sent to a newcomer, is the `floor` (a pass from which all later passes follow) and the
views since then: no more in a long run than in a short one."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lightning_decentral.elastic.plan.view import weight_of

Indices = NDArray[np.int64]
LATE_TICKS = 1000  # Ticks by which a member may learn of a view late.
KEPT_VIEWS = 100  # Number of views kept since the floor; older views are applied, and the floor moves to a later pass.

UNBOUNDED = 2**40  # Batches of an epoch of data without an end.


@dataclass(frozen=True)
class Calendar:
    """Position of rounds in epochs, one for the whole run."""

    batches: int  # batches of an epoch
    accumulated: int = 1  # batches of a round
    before: int = 0  # rounds that were complete when the run began, by a checkpoint
    steps: int = 0  # optimizer steps that were complete then
    weights: int = 0  # sum of the first members' weights; 0: unknown

    def place(self, round: int) -> tuple[int, int]:
        """Return (epoch, number of its batches that are complete) at the beginning of this round."""
        epochs, rounds = divmod(self.before + round, -(-self.batches // self.accumulated))
        return epochs, rounds * self.accumulated

    def tick(self, round: int) -> int:
        """Return the number of batches that are complete at the beginning of this round."""
        epochs, batches = self.place(round)
        return epochs * self.batches + batches

    def step(self, round: int) -> int:
        """Return the number of optimizer steps that are complete at the beginning of this round."""
        return self.steps + round


@dataclass
class Pass:
    """State of one pass over the examples."""

    number: int
    start: int  # first tick of the pass
    since: int
    left: Indices | None = None  # examples not dealt before `since`, in order; None: all, in the permutation's order
    dealt: dict[str, list[Indices]] = field(default_factory=dict)  # {member: examples dealt before `since`}


@dataclass
class Dealing:
    """Deals the training examples; all members compute the same dealing."""

    examples: int  # number of examples
    batch: int  # examples that a member of weight 1 takes in a tick
    shuffle: bool = True  # whether a pass is a random permutation; otherwise in order
    seed: int = 0
    views: dict[int, tuple[str, ...]] = field(default_factory=dict)  # {first tick: members}; at first empty
    floor: Pass | None = None  # never changed in place
    _passes: list[Pass] = field(default_factory=list, init=False)
    _starts: list[Pass] = field(default_factory=list, init=False)

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Properties that all members' dealings have in common: examples, batch size, whether they are shuffled."""
        return self.examples, self.batch, self.shuffle

    def enter(self, tick: int, members: Sequence[str]) -> None:
        """Record the members from this tick on; the tick may be in the past."""
        if self.floor is not None:
            tick = max(tick, self.floor.since)
        if self.views.get(tick) != tuple(members):
            self.views[tick] = tuple(members)
            # Passes that the change affects are dealt again; the pass before the last stays as the start.
            self._starts = [p for p in self._starts if p.start <= tick]
            self._passes = [self._begun(p) for p in self._starts[-2:]]

    def copy(self) -> "Dealing":
        """Copy the present state for a newcomer, which deals the passes again from the floor."""
        return replace(self, views=dict(self.views))

    def begin(self, before: "Dealing", tick: int) -> None:
        """Continue after another dealing, of other examples, by a new pass at this tick."""
        self.floor = Pass(before._pass_of(tick).number + 1, tick, tick)
        later = {first: members for first, members in before.views.items() if first > tick}
        self.views = {tick: before._members(tick), **later}

    def share(self, tick: int, name: str) -> Indices:
        """Return the indices [batch * weight] that this member takes in a tick; few examples repeat. KeyError if the
        name isn't a member in that tick."""
        now, members = self._pass_of(tick), self._members(tick)
        if name not in members:
            raise KeyError(name)
        assert now.left is not None
        offset = (tick - now.since) * self._all(members) + self._all(members[: members.index(name)])
        found = now.left[np.arange(offset, offset + self._all([name])) % len(now.left)]
        self._settle(tick - LATE_TICKS)
        return found

    def _all(self, members: Sequence[str]) -> int:
        """Return the number of examples that these members take in a tick."""
        return self.batch * sum(map(weight_of, members))

    def _members(self, tick: int) -> tuple[str, ...]:
        return self.views[max(first for first in self.views if first <= tick)]

    def _pass_of(self, tick: int) -> Pass:
        if not self._passes:
            self._starts = [self.floor or Pass(0, first := min(self.views), first)]
            self._passes = [self._begun(self._starts[0])]
        while (end := self._end(self._passes[-1], tick)) is not None:
            self._starts.append(Pass(self._passes[-1].number + 1, end, end))
            self._passes = [self._passes[-1], self._begun(self._starts[-1])]
        return self._passes[-1]

    def _begun(self, start: Pass) -> Pass:
        begun = replace(start, dealt={name: [*parts] for name, parts in start.dealt.items()})
        if begun.left is None:
            begun.left = np.arange(self.examples)
            if self.shuffle:
                begun.left = np.random.default_rng((self.seed, begun.number)).permutation(self.examples)
        return begun

    def _settle(self, tick: int) -> None:
        """Drop what isn't needed any more: no later view begins before this tick."""
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
            self.views = {first: names for first, names in self.views.items() if first >= last}

    def _end(self, now: Pass, tick: int) -> int | None:
        """Return the tick after the pass's last one; None if it still goes on at `tick`. Applies views until then."""
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
        for name, part in zip(before, rows, strict=True):
            now.dealt.setdefault(name, []).append(part.ravel())
        lost = [now.dealt.pop(name) for name in list(now.dealt) if name not in after]
        now.left = np.concatenate([now.left, *(part for parts in lost for part in parts)])
        now.since = tick
