"""Course of a run as a member knows it: who trained together, which epoch a round is, which examples are whose.

It is the run's, not this worker's: a newcomer has it from a member of the view in which it begins, as it is then.
"""

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

ASK_SECONDS, LOOK_SECONDS = 5.0, 0.05  # members send which views they have begun with each of their beats


class Course:
    """Course of a run as one member knows it. The devices of this worker take so many `batches` in a step, and all
    call the same in the same order `over` their transport; None: it is the only one."""

    def __init__(self, worker: Endpoint, batches: int = 1, over: Transport | None = None) -> None:
        self.worker, self._batches, self._over = worker, batches, over
        self.round, self.next_round = -1, 0  # that began last, -1: none; whose batches are drawn next
        self.view: View | None = None  # in force in `round`
        self.calendar: Calendar | None = None  # None before the first view
        self.seed: int | None = None  # of the order of the examples, the same for all; None: this worker's own
        self._views: dict[int, View] = {}
        self._tally = ViewCounts()
        self._missed: View | None = None
        self._dealings: dict[int, Dealing] = {}
        self._given: Mapping[int, Dealing] = {}
        self._given_until = 0  # views after this one aren't in the given dealings

    def given(self) -> dict[str, Any]:
        """The history that a newcomer is given. Call `knows` before where it begins to take part."""
        self._listen()
        return {
            "views": dict(self._views),
            "tally": self._tally,
            "calendar": self.calendar,
            "seed": self.seed,
            "dealings": {place: dealing.copy() for place, dealing in self._dealings.items()},
        }

    def learn(self, given: Mapping[str, Any]) -> None:
        """Take what a member has given, in the place of what this one knew."""
        newer = self._views.values()
        self._views, self._tally, self._missed = dict(given["views"]), given["tally"], None
        self.calendar, self.seed, self._given = given["calendar"], given["seed"], given["dealings"]
        self._given_until = max(self._views, default=0)
        for view in newer:
            if view.number > self._given_until:
                self._learn_of(view)

    def so_far(self) -> list[View]:
        """Views up to the one in force, by their numbers: the newest."""
        assert self.view is not None
        return [self._views[number] for number in sorted(self._views) if number <= self.view.number]

    def counts(self) -> ViewCounts:
        """Counts since the run began."""
        return reduce(add, self.so_far(), self._tally)

    def _listen(self) -> None:
        """Views that are known by now, though not all are in force."""
        if self._over is None:  # several devices are passed them before a round: so none knows more than another
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
        """It, and what was missed before it. Missed where nobody has sent that."""
        before = {number: known for number, known in self._views.items() if number < view.number}
        known = self._views if view is not self._missed else before
        return new(known, view, *self._reported(view))

    def knows(self) -> None:
        """Wait for what members send of views that were missed. Missed where they don't."""
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
            for dealing in self._dealings.values():
                self._enter(dealing, view)

    def _reported(self, view: View) -> tuple[Callable[[int], list[int]], bool]:
        """The first rounds of views that this worker wasn't sent, as members remember them; whether all others have
        sent which they have begun, up to this one."""
        entered, others = self.worker.lobby_client.state.entered, set(view.members) - {self.worker.name}
        complete = all(any(number >= view.number for number, _ in entered.get(name, ())) for name in others)
        return lambda number: [first for of in entered.values() for n, first in of if n == number], complete

    def _enter(self, dealing: Dealing, view: View) -> None:
        assert self.calendar is not None
        dealing.enter(self.calendar.tick(view.first_round), view.members)

    # ---- data -------------------------------------------------------------------------------------------------------

    def deals(self, dealing: Dealing, place: int = 0) -> Callable[[], Iterator[Any]]:
        """Return what gives this worker's examples of the rest of an epoch, batch by batch: of the `place`-th of
        the loaders that are combined. One that is loaded again goes on, with other examples by a new pass.

        Raises:
            ValueError: the members have other data.
            RuntimeError: nobody has sent this worker what was dealt before it came.
        """
        before, given = self._dealings.get(place), self._given.get(place)
        if before is not None and before.kind == dealing.kind:
            dealing = before
        elif before is not None:
            assert self.calendar is not None
            dealing.begin(before, self.calendar.tick(self.next_round))
        else:
            if given is not None:
                if dealing.kind != given.kind:
                    own, theirs = ("{} examples in batches of {}, shuffle={}".format(*d.kind) for d in (dealing, given))
                    raise ValueError(
                        f"this worker's loader has {own}, and the run's has {theirs}: give every worker the same data"
                    )
                dealing = given.copy()
            for number, view in self._views.items():
                if given is None or number > self._given_until:
                    self._enter(dealing, view)
        dealing.seed = self.seed or 0  # the run's: all deal alike
        self._dealings[place] = dealing
        return partial(self._shares, dealing)

    def _shares(self, dealing: Dealing) -> Iterator[Any]:
        calendar, last = self.calendar, -1  # -1: nothing is drawn yet
        assert calendar is not None
        part = 0 if self._over is None else self._over.rank % self._batches  # this device's of a batch
        while last < 0 or (last + 1) % calendar.batches:
            # Loaders with processes of their own draw ahead of the rounds.
            tick = max(last + 1, calendar.tick(self.next_round))
            self._listen()
            self.knows()
            yield dealing.share(tick, self.worker.name).reshape(self._batches, -1)[part]
            last = tick
