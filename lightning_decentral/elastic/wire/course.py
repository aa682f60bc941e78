"""History of a run as a member knows it: its memberships (views), its calendar of rounds, and the dealing of examples.

The history is the run's, not this worker's: a newcomer copies it from a member of its first view."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial, reduce
from operator import add
from typing import Any

from lightning_decentral.elastic.plan.chronicle import Missed, ViewCounts, kept, new
from lightning_decentral.elastic.plan.dealing import Calendar, Dealing
from lightning_decentral.elastic.plan.view import View
from lightning_decentral.elastic.wire.joining import Endpoint
from lightning_decentral.shared.wire.transport import Transport

ASK_SECONDS, LOOK_SECONDS = 5.0, 0.05  # members send the views that they have begun with each heartbeat


class Course:
    """Keeps a run's history for one member. This worker's devices take `batches` batches in a step, and all call the
    same methods in the same order `over` their transport (None: a single device)."""

    def __init__(self, worker: Endpoint, batches: int = 1, over: Transport | None = None) -> None:
        self.worker, self._batches, self._over = worker, batches, over
        self.round, self.next_round = -1, 0  # (round that began last, or -1; round whose batches are drawn next)
        self.view: View | None = None  # the view in force in `round`
        self.calendar: Calendar | None = None  # None before the first view
        self.seed: int | None = None  # seed of the examples' order, the same for all members; None: not set yet
        self._views: dict[int, View] = {}
        self._tally = ViewCounts()
        self._missed: View | None = None
        self._dealings: dict[int, Dealing] = {}
        self._given: dict[int, Dealing] = {}  # of loaders that this worker hasn't made yet

    def given(self) -> dict[str, Any]:
        """Return the history for a newcomer. Call `knows` first if the newcomer begins to take part with it."""
        self._listen()
        return {
            "views": dict(self._views),
            "tally": self._tally,
            "calendar": self.calendar,
            "seed": self.seed,
            "dealings": {place: dealing.copy() for place, dealing in self._dealings.items()},
        }

    def learn(self, given: Mapping[str, Any]) -> None:
        """Replace this worker's history by the one that a member has sent, and keep newer views."""
        newer = self._views.values()
        self._views, self._tally, self._missed = dict(given["views"]), given["tally"], None
        self.calendar, self.seed = given["calendar"], given["seed"]
        self._given = {place: dealing.copy() for place, dealing in given["dealings"].items()}
        last = max(self._views, default=0)
        for view in newer:
            if view.number > last:
                self._learn_of(view)

    def so_far(self) -> list[View]:
        """Return the remembered views (memberships) up to the one in force, by number."""
        assert self.view is not None
        return [self._views[number] for number in sorted(self._views) if number <= self.view.number]

    def counts(self) -> ViewCounts:
        """Return the counts of members that joined, were lost and left since the run began."""
        return reduce(add, self.so_far(), self._tally)

    def _listen(self) -> None:
        """Learn the views that the lobby has sent so far, though not all are in force."""
        if self._over is None:  # several devices get the views before a round, so that all know the same ones
            for _, view in sorted(dict(self.worker.lobby_client.state.views).items()):
                self._learn_of(view)

    def _learn_of(self, view: View) -> None:
        try:
            found = self._new(view)
        except Missed:
            self._missed, found = view, [view]
        self._add(found)
        if found:
            self._views, self._tally = kept(self._views, self._tally)

    def _new(self, view: View) -> list[View]:
        """Return the view after the views missed before it. Missed if no member has sent those yet."""
        before = {number: known for number, known in self._views.items() if number < view.number}
        known = self._views if view is not self._missed else before
        return new(known, view, *self._reported(view))

    def knows(self) -> None:
        """Wait until members have sent the views that this worker missed. Missed if they don't."""
        end = time.monotonic() + ASK_SECONDS
        while self._missed is not None:
            try:
                missed = self._new(self._missed)[:-1]
            except Missed:
                if time.monotonic() > end:
                    raise
                time.sleep(LOOK_SECONDS)
                continue
            self._missed = None  # known now
            self._add(missed)

    def _add(self, views: list[View]) -> None:
        for view in views:
            self._views[view.number] = view
            for dealing in (*self._dealings.values(), *self._given.values()):
                self._enter(dealing, view)

    def _reported(self, view: View) -> tuple[Callable[[int], list[int]], bool]:
        """Return (map from a view's number to its first rounds as members remember them, whether all other members
        have sent their history up to this view)."""
        entered, others = self.worker.lobby_client.state.entered, set(view.members) - {self.worker.name}
        complete = all(any(number >= view.number for number, _ in entered.get(name, ())) for name in others)
        return lambda number: [first for begun in entered.values() for n, first in begun if n == number], complete

    def _enter(self, dealing: Dealing, view: View) -> None:
        assert self.calendar is not None
        dealing.enter(self.calendar.tick(view.first_round), view.members)

    # ---- data -------------------------------------------------------------------------------------------------------

    def deals(self, dealing: Dealing, place: int = 0) -> Callable[[], Iterator[Any]]:
        """Return the iterator function over this worker's examples of the rest of an epoch, batch by batch, for the
        `place`-th combined loader. A loader that is loaded again continues; with other data it begins a new pass.

        Raises:
            ValueError: the members' loaders have other data.
            RuntimeError: no member has sent this worker the views before it joined.
        """
        before, given = self._dealings.get(place), self._given.pop(place, None)
        if before is not None and before.kind == dealing.kind:
            dealing = before
        elif before is not None:
            assert self.calendar is not None
            dealing.begin(before, self.calendar.tick(self.next_round))
        elif given is None:
            for view in self._views.values():
                self._enter(dealing, view)
        elif dealing.kind == given.kind:
            dealing = given
        else:
            own, theirs = ("{} examples in batches of {}, shuffle={}".format(*d.kind) for d in (dealing, given))
            raise ValueError(
                f"this worker's loader has {own}, and the run's has {theirs}: give every worker the same data"
            )
        dealing.seed = self.seed or 0  # the run's seed, so that all deal alike
        self._dealings[place] = dealing
        return partial(self._shares, dealing)

    def _shares(self, dealing: Dealing) -> Iterator[Any]:
        calendar, last = self.calendar, -1  # tick drawn last; -1: none
        assert calendar is not None
        part = 0 if self._over is None else self._over.rank % self._batches  # this device's part of a batch
        while last < 0 or (last + 1) % calendar.batches:
            # Loaders with processes of their own draw ahead of the rounds.
            tick = max(last + 1, calendar.tick(self.next_round))
            self._listen()
            self.knows()
            yield dealing.share(tick, self.worker.name).reshape(self._batches, -1)[part]
            last = tick
