"""A strategy's interface to one elastic worker: its rounds, its state for newcomers, and the members' collectives.

member = Participant(elastic, timeout)
value = member.healed()            a member's training state; None: the run begins with this worker's own
member.begin(copy)                 call before each round: waits while no round may begin
member.together(value, made)       one result for all members: `made` of their values

The calls that begin a round, from the Trainer downwards; the last but one waits:

    ElasticRun._begin      the run's calendar; the state that all members agree on
    Participant.begin      this worker's devices together; rounds that it skipped because it was late
    Endpoint.begin         a copy of this worker's state for newcomers; what is printed while it waits
    LobbyClient.begin      wakes at each message of the lobby and of members
    MemberState.waits      why no round may begin now, or empty: then `begins`
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
    """Takes part in a run, from a fit's set-up to its end."""

    leads = True  # True if this device communicates with other members

    def __init__(
        self,
        elastic: ElasticSettings,
        seconds: float,  # timeout of every wait for other workers
        worker: Endpoint,
        batches: int = 1,  # as in `Course`
        over: Transport | None = None,
    ) -> None:
        super().__init__(worker, batches, over)
        self.elastic, self._seconds = elastic, seconds
        self.entered: View | None = None  # the view in force if it is new in this round, else None
        self.live = False  # whether this worker computes collectives with the others
        self.left_out = 0  # rounds that this worker skipped because it was late
        self._exchange: ElasticExchange | None = None
        self._began, self._met = 0.0, 0
        self._watch = Watch()

    def healed(self) -> Any:
        """Wait for the donor's training state; None on the founder. TimeoutError if no member sends it. ValueError if
        the run's workers have other settings, or the lobby another minimum number of workers."""
        value = self._passed_on(lambda: self._in_time(self.worker.healed))
        if value is not None:  # the history so far, in case no member is left to ask later
            self.learn(value["run"])
        return value

    def founds(self) -> bool:
        """Wait until it is known whether the run begins with this worker's parameters. Errors as `healed`."""
        return bool(self._passed_on(lambda: self._in_time(self.worker.founds)))

    def as_founded(self, value: Any) -> Any:
        """Return in the n-th call the founder's n-th value. Errors as `healed`."""
        return self._passed_on(lambda: self._in_time(partial(self.worker.as_founded, value)))

    def _passed_on(self, call: Callable[[], Any]) -> Any:
        """Return the first device's result of `call` on all devices of this worker; raise its error on all."""
        return call()

    def _in_time(self, call: Callable[[float], Found]) -> Found:
        try:
            found = call(self._seconds)
        except TimeoutError as error:
            raise self._late(error) from None
        least, lobbys = self.elastic.workers[0], self.worker.lobby_client.state.least
        if lobbys != least:
            raise ValueError(f"the lobby needs {lobbys} workers at least, this worker {least}: give both one minimum")
        return found

    def _late(self, error: TimeoutError) -> TimeoutError:
        return TimeoutError(f"{waiting_at(self.elastic.lobby, str(error))}; gave up after {self._seconds:g} s")

    def begin(self, copy: Callable[[], Any], until: int = 0) -> int:
        """Begin the next round; a late worker of asynchronous rounds skips to a later one, at most to round `until`.
        Return the number of skipped rounds.

        Raises:
            TimeoutError: this worker hasn't become a member in time.
            RuntimeError: this worker was away for too long to continue.
        """
        now, before = time.monotonic(), self.view
        if self._began:
            self._watch.took(now - self._began)
        goes_on, order = 0, self.elastic.asynchronous  # asynchronous: the newest round, if this worker is late
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
                "new worker"
            )
        self.left_out += left_out
        self.entered = self.view if self.view != before else None  # newcomers of this view need `agreed`
        self.round = self.next_round = round
        self.worker.collective.begins((round, -1))  # no member waits for this one in an earlier round
        self._began, self._met = time.monotonic(), 0  # calls are counted anew in each round
        self._learn_of(self.view)
        self._watch.began(len(self.present()), self.counts().most)
        return left_out

    def attendance(self) -> dict[str, float]:
        """Return {log key: value} of the members that take part, joined, were lost and left."""
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
        """Return on newcomers of a view the value of `own()` on an earlier member; in the first view the oldest's.
        None on other members, and if all earlier members have ended. RuntimeError if a live one doesn't send its
        value."""
        return self._passed_on(lambda: self._agreed(own))

    def _agreed(self, own: Callable[[], Any]) -> Any:
        assert self.view is not None
        if self.entered is None:
            return None
        if self.view.number == 1:
            # The oldest's value, or the next one's where the oldest is lost: older members are asked in order.
            found = self._asked(lambda: [*takewhile(lambda name: name != self.worker.name, self.present())])
            found = own() if found is None else found
            self.worker.collective.keep(1, found)
            return found
        newcomers = set(self.view.members) - set(self.view.before)  # earlier members send their value to these
        if self.worker.name in newcomers:
            return self._asked(lambda: [name for name in self.present() if name not in newcomers])
        return self.worker.collective.keep(self.view.number, own()) if newcomers else None

    def _asked(self, whom: Callable[[], list[str]]) -> Any:
        assert self.view is not None
        found = self.worker.collective.kept(self.view.number, whom, self._seconds)
        if found is None and (silent := whom()):
            names = ", ".join(map(shown, silent))
            raise RuntimeError(
                f"{names} didn't send the run's state within {self._seconds:g} s: give the strategy a longer timeout"
            )
        return found

    @property
    def share(self) -> float:
        """Weight of this worker's updates in the mean: w_i / mean_j w_j over the members."""
        return self.elastic.weight * self._batches * len(self._weights) / sum(self._weights)

    @property
    def founders(self) -> int:
        """Sum of the weights of the workers that began the run."""
        assert self.view is not None
        return self.view.founders * sum(self._weights) // len(self._weights)

    @property
    def _weights(self) -> list[int]:
        own = self.elastic.weight * self._batches
        return [weight_of(name) for name in self.view.members] if self.view else [own]

    def present(self) -> list[str]:
        """Return the members with which this one can communicate, the oldest first."""
        assert self.view is not None
        lost, state, own = self.worker.mesh.lost, self.worker.lobby_client.state, self.worker.name
        return [n for n in self.view.members if n == own or not (n in lost or state.without(self.view, n))]

    def together(self, value: Any, made: Callable[[Sequence[Any]], Any]) -> Any:
        """Return on all members `made` of the present members' values (one per device), the oldest member's first.
        Collective. RuntimeError if this worker was away meanwhile, so that the others may have another result."""
        rows = [value] if self._over is None else gather_objects(self._over, value)
        return self.of_members(rows, of_each(made))

    def of_members(self, value: Any, made: Callable[[Sequence[Any]], Any]) -> Any:
        """Return `made` of one value per member, its first device's. Collective, as `together`."""
        return self._passed_on(lambda: self.meet(value, made))

    of_first = of_members  # as `of_members`, but only the first device's return value is valid

    def meet(self, value: Any, made: Callable[[Sequence[Any]], Any]) -> Any:
        """Return what `of_members` returns; called by the first device alone. Collective over the members."""
        if not self.live:
            return made([value])
        key, self._met = (self.round, self._met), self._met + 1  # calls are matched by their order in a round
        name = named(value, made)  # sent along, to find members that call something else
        given = [name, value], of_alike(name, made), self.present, self._seconds
        theirs, result = self.worker.collective.meet(key, *given)
        try:
            # A worker that slept meanwhile has its own result, and would save it over the run's.
            self.worker.lobby_client.sure(self._seconds)
        except TimeoutError as error:
            raise _away(error) from None
        if theirs != name:
            raise Unlike(name, theirs)
        return result

    def enter(self, exchange: ElasticExchange) -> None:
        """Use the view in force for the rounds of this exchange from now on."""
        assert self.view is not None
        self._exchange = exchange
        exchange.enter(self.view, self.round)

    def leave(self) -> None:
        """Leave the run, so that no member waits for this worker."""
        self.live = False
        self.worker.leave()


def _away(error: TimeoutError) -> RuntimeError:
    return RuntimeError(f"{error}: start this worker again, it joins as a new worker")
