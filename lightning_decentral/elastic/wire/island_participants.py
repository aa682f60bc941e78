"""An elastic member of several devices: the first one is the member, the others follow it.

What the first receives from the lobby and other members it passes to the others of its island where all ask: at
set-up, before a round, and in what all members compute together. So they are in one round and view, and no device waits
for another member by itself. Where one of them ends, all do, and the member joins anew as a whole.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from lightning_decentral.elastic.compute.gathered import of_each
from lightning_decentral.elastic.plan.dealing import Indices
from lightning_decentral.elastic.plan.view import ElasticSettings, View, view_of
from lightning_decentral.elastic.wire.endpoint import Endpoint, Refuses, nothing
from lightning_decentral.elastic.wire.participant import Participant
from lightning_decentral.elastic.wire.rounds.exchange import ElasticExchange
from lightning_decentral.shared.wire.objects import broadcast_world, gather_objects
from lightning_decentral.shared.wire.transport import Transport, Wire


def member_of(
    elastic: ElasticSettings, seconds: float, wire: Wire | None, batches: int, refuses: Refuses = nothing
) -> Participant:
    """This device's part of a member.

    Args:
        batches: that its devices take in a step: one each, or one for all.
        wire: among the devices of the member; None: it is the only one.
        refuses: as `Endpoint`'s.
    """
    if wire is None:
        return Participant(elastic, seconds, refuses=refuses)
    if wire.roll.rank:
        return Following(elastic, seconds, wire.roll, batches)
    return Leading(elastic, seconds, wire.roll, batches, refuses)


class DeviceParticipant(Participant, ABC):
    """Participant of one of several devices, which all call the same in the same order."""

    _over: Transport
    _batches: int

    @abstractmethod
    def _passed_on(self, call: Callable[[], Any]) -> Any:
        """Return on all devices what `call` returns on the first one; raise its error on all."""

    def founds(self) -> bool:
        return bool(self._passed_on(super().founds))

    def as_founded(self, value: Any) -> Any:
        return self._passed_on(partial(super().as_founded, value))

    def healed(self) -> Any:
        return self._passed_on(super().healed)

    def agreed(self, own: Callable[[], Any]) -> Any:
        return self._passed_on(partial(super().agreed, own))

    def together(self, value: Any, made: Callable[[Sequence[Any]], Any]) -> Any:
        return self.of_members(gather_objects(self._over, value), of_each(made))

    def of_members(self, value: Any, made: Callable[[Sequence[Any]], Any]) -> Any:
        return self._passed_on(partial(self._meet, value, made))

    def _listen(self) -> None:
        """Views are passed on before a round: so no device knows of one that another doesn't know."""

    def _own(self, places: Indices) -> Indices:
        parts: list[Indices] = [*places.reshape(self._batches, -1)]
        return parts[self._over.rank % self._batches]


class Leading(DeviceParticipant):
    """Participant of the first device: the member, which passes what it knows to the others."""

    def __init__(
        self, elastic: ElasticSettings, seconds: float, over: Transport, batches: int, refuses: Refuses = nothing
    ) -> None:
        self._over, self._newest, self._batches = over, 0, batches
        super().__init__(elastic, seconds, batches, refuses)
        self._passed_on(lambda: self.worker.name)

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
            Participant._listen(self)
            self.knows()  # before the others are given it
            assert self.view is not None
            new = [dict(vars(view)) for number, view in self._views.items() if number > self._newest]
            self._newest = max(self._views)
            # Of a newcomer that was away it sends more at once (`agreed`).
            now = {"view": self.view.number, "round": self.round, "entered": self.entered is not None}
            return {**now, "views": new, "present": self.present(), "left_out": left_out}

        return int(self._passed_on(partial(state, partial(super().begin, copied, until)))["left_out"])

    def of_first(self, value: Any, made: Callable[[Sequence[Any]], Any]) -> Any:
        found = list[Any]()
        self._passed_on(lambda: found.append(self._meet(value, made)))  # its error alone: the value is large
        return found[0]


class Following(DeviceParticipant):
    """Participant of another device: it knows what the first one passes on."""

    leads = False

    def __init__(self, elastic: ElasticSettings, seconds: float, over: Transport, batches: int) -> None:
        self._over, self._batches = over, batches
        self._hold(elastic, seconds, batches)
        self._present: list[str] = []
        there = SimpleNamespace(name=self._received(), lobby_client=SimpleNamespace(lobby=elastic.lobby))
        self.worker = cast(Endpoint, there)  # of which only this is asked

    def _received(self, copy: Callable[[], Any] = lambda: None) -> Any:
        while "copy" in (message := broadcast_world(None)):
            copy()
        if "error" in message:
            raise RuntimeError(f"the first device of this worker ended: {message['error']}")
        return message["value"]

    def _passed_on(self, call: Callable[[], Any]) -> Any:
        return self._received()

    def healed(self) -> Any:
        value = self._received()
        self._know(value)
        return value

    def begin(self, copy: Callable[[], Any], until: int = 0) -> int:
        found = self._received(copy)
        new = {view["number"]: view_of(view) for view in found["views"]}
        self.view = new.get(found["view"]) or self._views[found["view"]]
        self.entered = self.view if found["entered"] else None
        self.round = self.next_round = found["round"]
        self._present, self._met = found["present"], 0
        for view in new.values():
            self._learn_of(view)
        return int(found["left_out"])

    def _firsts(self, number: int) -> list[int]:
        """The first device has passed them on."""
        return []

    def _all_reported(self, view: View) -> bool:
        return True

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
