"""Participants of an elastic member with several devices: the first device communicates, the others follow it.

The first device passes what it receives from the lobby and other members to the devices of its island: at set-up,
before a round, and in the members' collectives. So all devices are in the same round and view, and no other device
waits for another member. If one device ends, all devices end, and the member joins anew as a whole."""

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
from lightning_decentral.elastic.wire.sockets.keys import key_of
from lightning_decentral.elastic.wire.starter import title
from lightning_decentral.shared.wire.objects import broadcast_world
from lightning_decentral.shared.wire.transport import Transport, Wire


def member_of(
    elastic: ElasticSettings, seconds: float, wire: Wire | None, batches: int, refuses: Refuses
) -> Participant:
    """Make this device's participant. The member's devices take `batches` batches in a step (one each, or one for all)
    and communicate over `wire` (None: a single device)."""
    if wire is not None and wire.roll.rank:
        return Following(elastic, seconds, wire.roll, batches)
    host, named = elastic.host or own_address(elastic.lobby), (title(os.environ), elastic.weight * batches, refuses)
    worker = Endpoint(elastic.lobby, host, Times(elastic.dead_after), *named, key_of(elastic.key))
    if wire is None:
        return Participant(elastic, seconds, worker, batches)
    broadcast_world({"value": worker.name})
    return Leading(elastic, seconds, worker, batches, wire.roll)


class Leading(Participant):
    """Participant of the first device, which passes what it receives to the member's other devices."""

    _newest = 0  # number of the newest view passed on

    def _passed_on(self, call: Callable[[], Any]) -> Any:
        try:
            value = call()
        except Exception as error:
            broadcast_world({"error": str(error)})  # otherwise the other devices would wait for the value
            raise
        broadcast_world({"value": value})
        return value

    def begin(self, copy: Callable[[], Any], until: int = 0) -> int:
        def copied() -> Any:
            broadcast_world({"copy": True})  # the other devices send their parts
            return copy()

        def state(began: Callable[[], int]) -> dict[str, Any]:
            left_out = began()
            for _, view in sorted(dict(self.worker.lobby_client.state.views).items()):
                self._learn_of(view)
            self.knows()  # before the other devices get the views
            assert self.view is not None
            new = {number: view for number, view in self._views.items() if number > self._newest}
            self._newest = max(self._views)
            # A newcomer's devices get the rest in `agreed`.
            now = {"view": self.view.number, "round": self.round, "entered": self.entered is not None}
            return {**now, "views": new, "present": self.present(), "left_out": left_out}

        return int(self._passed_on(partial(state, partial(super().begin, copied, until)))["left_out"])

    def of_first(self, value: Any, made: Callable[[Sequence[Any]], Any]) -> Any:
        found = list[Any]()
        self._passed_on(lambda: found.append(self.meet(value, made)))  # an error alone: the value is large
        return found[0]


class Following(Participant):
    """Participant of another device, which knows only what the first device passes on."""

    leads = False

    def __init__(self, elastic: ElasticSettings, seconds: float, over: Transport, batches: int) -> None:
        there = SimpleNamespace(name=self._received())
        super().__init__(elastic, seconds, cast(Endpoint, there), batches, over)  # only the name is used
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
        return lambda number: [], True  # passed on by the first device

    def of_first(self, value: Any, made: Callable[[Sequence[Any]], Any]) -> Any:
        self._received()
        return value

    def present(self) -> list[str]:
        return self._present

    def attendance(self) -> dict[str, float]:
        return {}

    def enter(self, exchange: ElasticExchange) -> None:
        """Do nothing, as this device's parameters come from the first device."""

    def leave(self) -> None:
        self.live = False
