"""Settings and layouts of workers are compared: who differs is named on all of them, and nobody waits for long."""

import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_decentral.shared.wire.meeting.comparison import Layouts, check_same_settings
from lightning_decentral.shared.wire.meeting.notices import StatusBoard
from lightning_decentral.shared.wire.pending import PeerLost
from tests.shared.wire.meeting.test_stopping import Store

TIME = timedelta(seconds=20)
MINE = {"torch": "2.6", "delay": "1", "codec": "Int8", "codec.block": "256"}


def meeting(
    settings: list[Mapping[str, str] | None], store: Any = None, timeout: timedelta = TIME, meetings: int = 1
) -> list[str]:
    """What each worker is told, empty where all agree; None never comes."""
    store = store or dist.HashStore()
    found = ["nothing"] * len(settings)

    def worker(rank: int, mine: Mapping[str, str]) -> None:
        try:
            for _ in range(meetings):
                check_same_settings(mine, store, rank, len(settings), timeout, "set-up")
            found[rank] = ""
        except (ValueError, TimeoutError) as error:
            found[rank] = f"{type(error).__name__}: {error}"

    present = [(rank, mine) for rank, mine in enumerate(settings) if mine is not None]
    threads = [threading.Thread(target=worker, args=pair, daemon=True) for pair in present]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_who_agrees_goes_on() -> None:
    assert meeting([MINE] * 4) == [""] * 4


@pytest.mark.parametrize(("other", "line"), [
    ({**MINE, "delay": "0"}, "worker 2 has delay=0, worker 0 has delay=1"),
    ({**MINE, "torch": "2.7", "delay": "0"}, "worker 2 has torch=2.7, worker 0 has torch=2.6"),
    ({**MINE, "codec": "Plain"}, "worker 2 has codec=Plain, worker 0 has codec=Int8"),
    (dict(list(MINE.items())[:-1]), "worker 2 has no codec.block, worker 0 has codec.block=256"),
    ({**MINE, "new": "3"}, "worker 2 has new=3, worker 0 has no new"),
    ({}, "worker 2 has no torch, worker 0 has torch=2.6"),
])  # fmt: skip
def test_the_first_difference_is_one_line_on_every_worker(other: Mapping[str, str], line: str) -> None:
    assert meeting([MINE, MINE, other]) == [f"ValueError: {line}: give every worker the same"] * 3


def test_of_several_that_differ_the_first_is_named() -> None:
    found = meeting([MINE, {**MINE, "delay": "2"}, {**MINE, "torch": "9"}])
    assert found == ["ValueError: worker 1 has delay=2, worker 0 has delay=1: give every worker the same"] * 3


def test_a_later_meeting_reads_nothing_of_an_earlier_one() -> None:
    store = dist.HashStore()
    assert meeting([MINE] * 2, store, meetings=3) == [""] * 2
    assert meeting([MINE, {**MINE, "delay": "0"}], store)[0].startswith("ValueError: worker 1 has delay=0")
    assert meeting([{**MINE, "delay": "0"}] * 2, store) == [""] * 2


def test_who_is_missing_is_named() -> None:
    found = meeting([MINE, None, MINE, None], timeout=timedelta(seconds=0.1))
    expected = (
        "TimeoutError: workers 1, 3 didn't come to set-up in time: look at their own output, or give the strategy"
    )
    assert [row[: len(expected)] for row in found] == [expected, "nothing", expected, "nothing"]


def test_without_worker_0_the_others_say_so() -> None:
    assert meeting([None, MINE], timeout=timedelta(seconds=0.1))[1].startswith("TimeoutError: worker 0 didn't come")


@pytest.mark.parametrize("garbage", ["", "{", "[1]", "7", "null", '"text"'])
def test_a_build_that_writes_something_else_is_one_line_on_every_worker(garbage: str) -> None:
    store = dist.HashStore()

    class Other:
        """Of another build, as worker 0: what it writes as its settings is something else."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def set(self, key: str, text: str) -> None:
            store.set(key, garbage if "/of/" in key else text)

    found = meeting([MINE, MINE], Other())
    assert found == ["ValueError: worker 0 can't read what worker 0 wrote: give every worker the same version"] * 2


def test_worker_0_stays_until_the_others_have_read() -> None:
    """The store ends with its process."""
    left, read = [], []
    store = dist.HashStore()

    class Slow:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def get(self, key: str) -> bytes:
            if threading.current_thread().name == "slow":
                time.sleep(0.2)
            value = store.get(key)
            read.append(time.monotonic())
            return bytes(value)

    def worker(rank: int, mine: Mapping[str, str]) -> None:
        with pytest.raises(ValueError, match="delay"):
            check_same_settings(mine, Slow(), rank, 2, TIME, "set-up")
        left.append((time.monotonic(), rank))

    threads = [
        threading.Thread(target=worker, args=(0, MINE), daemon=True),
        threading.Thread(target=worker, args=(1, {**MINE, "delay": "0"}), name="slow", daemon=True),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert max(at for at, rank in left if rank == 0) >= max(read)


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
        self.heartbeat: Any = Present()
        peers, timeout = range(2), timedelta(seconds=seconds)
        self.layouts = Layouts(StatusBoard(store, rank, 2), self.heartbeat, peers, "fit", lambda: self.has, timeout)

    def look(self) -> bool:
        (listener,) = self.heartbeat.listeners
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
    assert one.heartbeat.listeners == []


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
