"""An elastic member of several devices: the first one is the member, the others follow it.

What the first receives from the lobby and other members it passes to the others of its island where all ask: at
set-up, before a round, and in what all members compute together. So they are in one round and view, and no device waits
for another member by itself. Where one of them ends, all do, and the member joins anew as a whole.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from lightning_decentral.elastic.plan.view import ElasticSettings, Times, View
from lightning_decentral.elastic.wire.joining import Endpoint, Refuses
from lightning_decentral.elastic.wire.participant import Participant
from lightning_decentral.elastic.wire.rounds.exchange import ElasticExchange
from lightning_decentral.elastic.wire.sockets.frames import own_address
from lightning_decentral.elastic.wire.starter import title
from lightning_decentral.shared.wire.objects import broadcast_world
from lightning_decentral.shared.wire.transport import Transport, Wire


def member_of(
    elastic: ElasticSettings, seconds: float, wire: Wire | None, batches: int, refuses: Refuses
) -> Participant:
    """This device's part of a member. Its devices take so many `batches` in a step (one each, or one for all)
    and have a `wire` among them; None: it is the only one."""
    if wire is not None and wire.roll.rank:
        return Following(elastic, seconds, wire.roll, batches)
    host, named = elastic.host or own_address(elastic.lobby), (title(os.environ), elastic.weight * batches, refuses)
    worker = Endpoint(elastic.lobby, host, Times(elastic.dead_after), *named)
    if wire is None:
        return Participant(elastic, seconds, worker, batches)
    broadcast_world({"value": worker.name})
    return Leading(elastic, seconds, worker, batches, wire.roll)


class Leading(Participant):
    """Participant of the first device: the member, which passes what it knows to the others."""

    _newest = 0  # number of the newest view that was passed on

    def _passed_on(self, call: Callable[[], Any]) -> Any:
        try:
            value = call()
        except Exception as error:
            broadcast_world({"error": str(error)})  # else they would wait for it
            raise
        broadcast_world({"value": value})
        return value

    def begin(self, copy: Callable[[], Any], until: int = 0) -> int:
        def copied() -> Any:
            broadcast_world({"copy": True})  # the others give their parts
            return copy()

        def state(began: Callable[[], int]) -> dict[str, Any]:
            left_out = began()
            for _, view in sorted(dict(self.worker.lobby_client.state.views).items()):
                self._learn_of(view)
            self.knows()  # before the others are given it
            assert self.view is not None
            new = {number: view for number, view in self._views.items() if number > self._newest}
            self._newest = max(self._views)
            # Of a newcomer that was away it sends more at once (`agreed`).
            now = {"view": self.view.number, "round": self.round, "entered": self.entered is not None}
            return {**now, "views": new, "present": self.present(), "left_out": left_out}

        return int(self._passed_on(partial(state, partial(super().begin, copied, until)))["left_out"])

    def of_first(self, value: Any, made: Callable[[Sequence[Any]], Any]) -> Any:
        found = list[Any]()
        self._passed_on(lambda: found.append(self._meet(value, made)))  # its error alone: the value is large
        return found[0]


class Following(Participant):
    """Participant of another device: it knows what the first one passes on."""

    leads = False

    def __init__(self, elastic: ElasticSettings, seconds: float, over: Transport, batches: int) -> None:
        there = SimpleNamespace(name=self._received())
        super().__init__(elastic, seconds, cast(Endpoint, there), batches, over)  # of which only its name is asked
        self._present: list[str] = []

    def _received(self, copy: Callable[[], Any] = lambda: None) -> Any:
        while "copy" in (message := broadcast_world(None)):
            copy()
        if "error" in message:
            raise RuntimeError(f"the first device of this worker ended: {message['error']}")
        return message["value"]

    def _passed_on(self, call: Callable[[], Any]) -> Any:
        return self._received()

    def begin(self, copy: Callable[[], Any], until: int = 0) -> int:
        found = self._received(copy)
        self.view = {**self._views, **found["views"]}[found["view"]]
        self.entered = self.view if found["entered"] else None
        self.round = self.next_round = found["round"]
        self._present, self._met = found["present"], 0
        for view in found["views"].values():
            self._learn_of(view)
        return int(found["left_out"])

    def _reported(self, view: View) -> tuple[Callable[[int], list[int]], bool]:
        return lambda number: [], True  # the first device has passed them on

    def of_first(self, value: Any, made: Callable[[Sequence[Any]], Any]) -> Any:
        self._received()
        return value

    def present(self) -> list[str]:
        return self._present

    def attendance(self) -> dict[str, float]:
        return {}

    def enter(self, exchange: ElasticExchange) -> None:
        """Enter no exchange: its parameters come from the first device."""

    def leave(self) -> None:
        self.live = False
