"""Who answers for whom where a worker trains something else: boards on one store in memory, threads by hand."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from lightning_decentral.shared.wire.meeting.layouts import Layouts
from lightning_decentral.shared.wire.meeting.notices import Notices
from lightning_decentral.shared.wire.pending import PeerLost
from tests.shared.wire.meeting.test_stopping import Store


class Present:
    """Looks when it's asked to."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[], bool]] = []

    def listen(self, listener: Callable[[], bool]) -> None:
        self.listeners.append(listener)

    def forget(self, listener: Callable[[], bool]) -> None:
        self.listeners.remove(listener)

    def wake(self) -> None:
        """Somebody looks soon."""


class Worker:
    def __init__(self, store: Store, rank: int, seconds: float = 5.0) -> None:
        self.has = {"head": "trained"}
        self.presence: Any = Present()
        peers, timeout = range(2), timedelta(seconds=seconds)
        self.layouts = Layouts(Notices(store, rank, 2), self.presence, peers, "fit", lambda: self.has, timeout)

    def look(self) -> bool:
        (listener,) = self.presence.listeners
        return listener()


def pair(seconds: float = 5.0) -> tuple[Worker, Worker]:
    store = Store()
    return Worker(store, 0, seconds), Worker(store, 1, seconds)


def run(*calls: Callable[[], None]) -> list[str]:
    """What each call raises, all at the same time."""
    found = [""] * len(calls)

    def one(place: int) -> None:
        try:
            calls[place]()
        except Exception as error:
            found[place] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_the_same_change_on_all_goes_on_however_often() -> None:
    workers = pair()
    for change in ("frozen", "trained", "frozen"):
        for worker in workers:
            worker.has = {"head": change}
        assert run(*[worker.layouts.changed for worker in workers]) == ["", ""]
        assert [worker.look() for worker in workers] == [False, False]
        if change == "trained":
            for worker in workers:
                worker.layouts.begin(), worker.layouts.done()


def test_different_changes_are_named_on_both() -> None:
    one, two = pair()
    one.has, two.has = {"head": "frozen"}, {"head": "trained", "more": "trained"}
    first, second = run(one.layouts.changed, two.layouts.changed)
    assert first.startswith("RuntimeError: worker 0 has head frozen where worker 1 has head trained: freeze, thaw, add")
    assert second.startswith("RuntimeError: worker 1 has head trained where worker 0 has head frozen")


def test_whoever_has_begun_without_the_change_is_answered_for() -> None:
    one, two = pair()
    two.has = {"head": "frozen"}
    asked = threading.Thread(target=lambda: said.extend(run(two.layouts.changed)))
    said: list[str] = []
    asked.start()
    while not one.look():  # it may still come to the change itself
        pass
    assert not said
    one.layouts.begin()
    assert one.look() is False
    asked.join()
    assert said[0].startswith("RuntimeError: worker 1 has head frozen where worker 0 has head trained")


def test_nobody_waits_for_ever() -> None:
    one, _ = pair(seconds=0.1)
    with pytest.raises(PeerLost, match="worker 0 lost worker 1"):
        one.layouts.changed()


def test_who_has_left_looks_no_more() -> None:
    one, _ = pair()
    one.layouts.close()
    assert one.presence.listeners == []


def test_whoever_has_left_the_round_behind_says_what_it_had() -> None:
    """As neighbours of gossip may, which don't wait for each other in every round."""
    one, two = pair()
    for _ in range(2):
        two.layouts.begin(), two.layouts.done()
    two.has = {"head": "frozen", "more": "trained"}  # from its third round on
    later = threading.Thread(target=lambda: said.extend(run(two.layouts.changed)))
    said: list[str] = []
    later.start()
    one.has = {"head": "frozen", "more": "trained"}  # from its first on: the same, and not in the same round
    asked = threading.Thread(target=lambda: heard.extend(run(one.layouts.changed)))
    heard: list[str] = []
    asked.start()
    while asked.is_alive():  # of two questions one overwrites the other, until it's asked again
        two.look()
    asked.join()
    assert heard[0].startswith("RuntimeError: worker 0 has head frozen where worker 1 has head trained")
    one.layouts.begin(), one.layouts.done(), one.layouts.begin(), one.layouts.done(), one.layouts.begin()
    while later.is_alive():
        one.look()
    assert said == [""]


def test_what_was_read_from_files_is_nobodys_change() -> None:
    one, two = pair()
    for worker in (one, two):
        worker.has = {"head": "trained", "more": "trained"}
        worker.layouts.settle()
    two.has = {"head": "frozen", "more": "trained"}
    said: list[str] = []
    asked = threading.Thread(target=lambda: said.extend(run(two.layouts.changed)))
    asked.start()
    one.layouts.begin()
    while asked.is_alive():
        one.look()
    assert said[0].startswith("RuntimeError: worker 1 has head frozen where worker 0 has head trained")
