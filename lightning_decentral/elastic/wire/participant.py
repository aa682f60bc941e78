"""One elastic worker of a fit: its place among members, its rounds, what it gives newcomers and computes with others.

member = Participant(elastic, timeout)
value = member.healed()            everything a member has; None: the run begins with this worker's own
member.begin(copy)                 before each round: waits where nobody may go on
member.together(value, made)       the same for all members: `made` of what each has given
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, TypeVar

from lightning_decentral.elastic.compute.gathered import Unlike, named, of_alike, of_each
from lightning_decentral.elastic.plan.chronicle import Watch
from lightning_decentral.elastic.plan.view import ElasticSettings, View, shown, waiting_at, weight_of
from lightning_decentral.elastic.wire.course import Course
from lightning_decentral.elastic.wire.joining import Endpoint
from lightning_decentral.elastic.wire.rounds.exchange import ElasticExchange
from lightning_decentral.shared.wire.objects import gather_objects
from lightning_decentral.shared.wire.transport import Transport

Found = TypeVar("Found")


class Participant(Course):
    """Participant of a run, from a fit's set-up to its end."""

    leads = True  # True where this device talks to other members

    def __init__(
        self,
        elastic: ElasticSettings,
        seconds: float,  # how long it waits for others, anywhere
        worker: Endpoint,
        batches: int = 1,  # as `Course`'s
        over: Transport | None = None,
    ) -> None:
        super().__init__(worker, batches, over)
        self.elastic, self._seconds = elastic, seconds
        self.entered: View | None = None  # the view in force, if it wasn't in force in the round before
        self.live = False  # whether what it computes, it computes with the others
        self.left_out = 0  # rounds that it was late for, and didn't take part in
        self._exchange: ElasticExchange | None = None
        self._began, self._met = 0.0, 0
        self._watch = Watch()

    def healed(self) -> Any:
        """Wait for what its donor gives; None: it is the first. TimeoutError: nobody came. ValueError: the run's
        workers were given other things, or the lobby another least number of workers."""
        value = self._passed_on(lambda: self._in_time(self.worker.healed))
        if value is not None:  # what was before it takes part: where nobody is left to be asked when it does
            self.learn(value["run"])
        return value

    def founds(self) -> bool:
        """Return whether the run begins with this worker, as soon as that is known. As `healed`."""
        return bool(self._passed_on(lambda: self._in_time(self.worker.founds)))

    def as_founded(self, value: Any) -> Any:
        """Return the n-th value of the worker with whom the run began, in the n-th call of all. As `healed`."""
        return self._passed_on(lambda: self._in_time(partial(self.worker.as_founded, value)))

    def _passed_on(self, call: Callable[[], Any]) -> Any:
        """Return on all devices of this worker what `call` returns on the first one; raise its error on all."""
        return call()

    def _in_time(self, call: Callable[[float], Found]) -> Found:
        try:
            found = call(self._seconds)
        except TimeoutError as error:
            raise self._late(error) from None
        least, lobbys = self.elastic.workers[0], self.worker.lobby_client.state.least
        if lobbys != least:
            raise ValueError(f"the lobby has {lobbys} workers at least, this worker {least}: give both one number")
        return found

    def _late(self, error: TimeoutError) -> TimeoutError:
        return TimeoutError(f"{waiting_at(self.elastic.lobby, str(error))}; gave up after {self._seconds:g} s")

    def begin(self, copy: Callable[[], Any], until: int = 0) -> int:
        """The next round, or where nobody waits and this worker is late, a later one, `until` the last that it may go
        on in. Return how many were left out.

        Raises:
            TimeoutError: it is no member yet, and nobody has made it one.
            RuntimeError: this worker was away for so long that it can't go on.
        """
        now, before = time.monotonic(), self.view
        if self._began:
            self._watch.took(now - self._began)
        goes_on, order = 0, self.elastic.asynchronous  # where nobody waits, in the newest that it isn't late by
        if order is not None and before is not None:
            newest = max((self.worker.mesh.begun.get(name, 0) for name in self.present()), default=0)
            goes_on = order.next_round(self.round + 1, newest)
        try:
            self.view, round = self.worker.begin(self._watch.pace, copy, self._seconds, min(goes_on, until))
        except TimeoutError as error:
            raise (self._late if before is None else _away)(error) from None
        left_out = round - self.round - 1 if self.round >= 0 else 0
        if left_out and round > until:
            raise RuntimeError(
                f"the others are in round {round}, this worker in {self.round + 1}: start it again, it joins as a "
                "new one"
            )
        self.left_out += left_out
        self.entered = self.view if self.view != before else None  # newcomers of this view need `agreed`
        self.round = self.next_round = round
        self.worker.collective.begins((round, -1))  # nobody waits for it in an earlier round
        self._began, self._met = time.monotonic(), 0  # calls are counted anew in each round
        self._learn_of(self.view)
        self._watch.began(len(self.present()), self.counts().most)
        return left_out

    def attendance(self) -> dict[str, float]:
        """Numbers of members that take part, came and went, by the names under which they are logged."""
        if self.view is None:
            return {}
        counts = self.counts()
        late = {"left_out_rounds": float(self.left_out), "age": self._exchange.age if self._exchange else 0.0}
        return {
            "members": float(len(self.present())),
            "view": float(self.view.number),
            "joins": float(counts.came),
            "losses": float(counts.lost),
            "leaves": float(counts.left),
            "participation": self._watch.participation,
            "stall_seconds": self._watch.stall,
            **(late if self.elastic.asynchronous else {}),
        }

    def agreed(self, own: Callable[[], Any]) -> Any:
        """Return to newcomers of a view `own` of a member that was there before, as it is now; in the first view, to
        all, that of the oldest. None for all others, and where all of those have ended. RuntimeError where they live,
        and don't send it."""
        return self._passed_on(lambda: self._agreed(own))

    def _agreed(self, own: Callable[[], Any]) -> Any:
        assert self.view is not None
        if self.entered is None:
            return None
        if self.view.number == 1:
            # The oldest's, and of those that lose it the next one's: who is older than this worker is asked in order.
            found = self._asked(lambda: [*takewhile(lambda name: name != self.worker.name, self.present())])
            found = own() if found is None else found
            self.worker.collective.keep(1, found)
            return found
        newcomers = set(self.view.members) - set(self.view.before)  # who was there before gives, they take
        if self.worker.name in newcomers:
            return self._asked(lambda: [name for name in self.present() if name not in newcomers])
        return self.worker.collective.keep(self.view.number, own()) if newcomers else None

    def _asked(self, whom: Callable[[], list[str]]) -> Any:
        assert self.view is not None
        found = self.worker.collective.kept(self.view.number, whom, self._seconds)
        if found is None and (silent := whom()):
            names = ", ".join(map(shown, silent))
            raise RuntimeError(
                f"{names} didn't say within {self._seconds:g} s what the run is: give the strategy a longer timeout"
            )
        return found

    @property
    def share(self) -> float:
        """w_i / mean_j w_j over the members: what an update of this worker counts in the mean."""
        return self.elastic.weight * self._batches * len(self._weights) / sum(self._weights)

    @property
    def founders(self) -> int:
        """The weight of those that began the run."""
        assert self.view is not None
        return self.view.founders * sum(self._weights) // len(self._weights)

    @property
    def _weights(self) -> list[int]:
        own = self.elastic.weight * self._batches
        return [weight_of(name) for name in self.view.members] if self.view else [own]

    def present(self) -> list[str]:
        """Members that are reached, the oldest first."""
        assert self.view is not None
        lost, state, own = self.worker.mesh.lost, self.worker.lobby_client.state, self.worker.name
        return [n for n in self.view.members if n == own or not (n in lost or state.without(self.view, n))]

    def together(self, value: Any, made: Callable[[Sequence[Any]], Any]) -> Any:
        """`made` of what the members of this moment have given, the oldest first: the same for all of them. Of each
        device of a member, one after the other. RuntimeError where this worker was away meanwhile, and the others have
        another result."""
        rows = [value] if self._over is None else gather_objects(self._over, value)
        return self.of_members(rows, of_each(made))

    def of_members(self, value: Any, made: Callable[[Sequence[Any]], Any]) -> Any:
        """The same of the members' first devices alone."""
        return self._passed_on(lambda: self._meet(value, made))

    of_first = of_members  # the same for the first device alone; what is returned elsewhere means nothing

    def _meet(self, value: Any, made: Callable[[Sequence[Any]], Any]) -> Any:
        if not self.live:
            return made([value])
        key, self._met = (self.round, self._met), self._met + 1  # the n-th call in a round is the same on all
        name = named(value, made)  # sent along: who calls something else is found
        given = [name, value], of_alike(name, made), self.present, self._seconds
        theirs, result = self.worker.collective.meet(key, *given)
        try:
            # Who slept meanwhile has one of its own, and would save it over the run's.
            self.worker.lobby_client.sure(self._seconds)
        except TimeoutError as error:
            raise _away(error) from None
        if theirs != name:
            raise Unlike(name, theirs)
        return result

    def enter(self, exchange: ElasticExchange) -> None:
        """Enter the view in force: its rounds are over that from now on."""
        assert self.view is not None
        self._exchange = exchange
        exchange.enter(self.view, self.round)

    def leave(self) -> None:
        """Leave: nobody waits for it from now on."""
        self.live = False
        self.worker.leave()


def _away(error: TimeoutError) -> RuntimeError:
    return RuntimeError(f"{error}: start this worker again, it joins as a new one")
