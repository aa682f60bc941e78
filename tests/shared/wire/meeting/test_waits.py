"""Calls that only some make get a warning; a device that waits for a lost worker is freed."""

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from lightning_decentral.shared import meeting
from lightning_decentral.shared.compute.device import AsyncRead
from lightning_decentral.shared.wire.meeting import notices, waits
from lightning_decentral.shared.wire.meeting.notices import Ending, Notices, Presence
from lightning_decentral.shared.wire.meeting.waits import Backlog, Rescue, Wait, Waits
from lightning_decentral.shared.wire.pending import PeerLost
from lightning_decentral.shared.wire.transport import Message
from tests.shared.wire.meeting.test_stopping import Store
from tests.simulated import CUDA, Engine
from tests.simulated.wire import Make, device_world

CALLING = Wait(5, True, "step 7")
TRAINING = Wait(4, False, "step 8")


def said(*found: Wait | None) -> list[str]:
    """What workers that wait so say, each at most once, after three looks."""
    store = Store()
    every = [Waits(Notices(store, rank, len(found)), lambda wait=wait: wait) for rank, wait in enumerate(found)]  # type: ignore[misc]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for waits in every:
                assert waits.look() is False
    return [str(one.message) for one in caught]


def test_a_call_that_others_dont_make_is_named_on_all() -> None:
    line = (
        "all workers wait: worker 0 and worker 2 in a round (in step 8), worker 1 in a collective call (in step 7); if "
        "only some make this call (sync_dist=True, all_gather, barrier), it never ends"
    )
    assert said(TRAINING, CALLING, TRAINING) == [line] * 3


def test_different_calls_of_the_same_number_are_named() -> None:
    first, second = said(CALLING, Wait(5, True, "validation"))
    assert "worker 0 in a collective call (in step 7), worker 1 in a collective call (in validation); if" in first
    assert first == second


@pytest.mark.parametrize(
    "found",
    [
        (CALLING, Wait(5, True, "step 8")),
        (TRAINING, TRAINING),
        (CALLING, None),
        (None, None),
        (TRAINING, Wait(5, False, "step 9")),
    ],
    ids=["in the same call", "in a round", "one works", "none waits", "a message that is slow"],
)
def test_other_waits_are_nobodys_mistake(found: tuple[Wait | None, ...]) -> None:
    assert said(*found) == []


def test_what_no_worker_wrote_is_not_believed() -> None:
    store = Store()
    store.set("waits/1", '{"calls": "many"}')
    waits = Waits(Notices(store, 0, 2), lambda: CALLING)
    waits.look()
    with pytest.warns(UserWarning, match="ignored a value at waits/1"):
        waits.look()


pytestmark = pytest.mark.threads


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(notices, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(notices, "LINGER_SECONDS", 0.0)
    monkeypatch.setattr(waits, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(waits, "LOST_SECONDS", 0.3)
    monkeypatch.setattr(waits, "END_SECONDS", 0.1)


@contextmanager
def watched(board: Notices, backlog: Backlog, abort: Callable[[], None], timeout: float = 60.0) -> Iterator[Rescue]:
    presence = Presence(board, lambda: "step 3")
    freeing = Rescue(presence, backlog.since, abort, timeout, end=ended.append)
    try:
        yield freeing
    finally:
        freeing.close()
        presence.close()


ended: list[int] = []


def stands_in_a_read(make: Make, board: Notices, timeout: float = 60.0) -> str:
    """What worker 0 is told, whose neighbour never sends."""
    heard, backlog = torch.zeros(4, device=CUDA), Backlog(True)
    with watched(board, backlog, make.aborted.set, timeout) as freeing:
        _, (receive,) = make().exchange([], [Message(1, heard, 0)])
        receive.wait()
        backlog.mark()
        AsyncRead(heard).read()  # the host stands here, with no Python of its own
        with pytest.raises(PeerLost) as found:
            freeing.check()
        return str(found.value)


def of_two(other: Callable[[Notices], None], timeout: float = 60.0) -> str:
    store = Store()

    def worker(make: Make, engine: Engine) -> str:
        board = Notices(store, make.hosts.rank, 2)
        if make.hosts.rank == 0:
            return stands_in_a_read(make, board, timeout)
        make()
        other(board)
        return ""

    return device_world(2, worker)[0]


def test_the_host_comes_back_when_the_other_has_said_why_it_ends() -> None:
    said = of_two(lambda board: board.end(Ending("ValueError: no luck", "step 3", False)))
    assert said == "worker 0 lost the others: worker 1 ended: ValueError: no luck (in step 3)"


def test_the_host_comes_back_when_the_other_is_silent() -> None:
    assert "worker 1 left no word: killed" in of_two(lambda board: board.beat())


def test_the_host_comes_back_after_the_timeout_where_all_live() -> None:
    def beats(board: Notices) -> None:
        for _ in range(40):
            board.beat()
            time.sleep(0.02)

    assert "all live" in of_two(beats, timeout=0.3)


def test_a_validation_of_its_own_is_watched_like_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of Lightning's that waits for others ends with the loss, and no other begins."""
    monkeypatch.setattr(waits.os, "_exit", ended.append)
    store = Store()

    def worker(make: Make, engine: Engine) -> list[str]:
        board, found = Notices(store, make.hosts.rank, 2), list[str]()
        if make.hosts.rank:
            make()
            board.end(Ending("ValueError: no luck", "validation", False))
            return found
        monkeypatch.setattr(meeting, "abort_nccl", make.aborted.set)
        heard, presence = torch.zeros(4, device=CUDA), Presence(board, lambda: "validation")
        watching = meeting.Watched(True, presence, 60.0)

        def mean() -> None:
            _, (receive,) = make().exchange([], [Message(1, heard, 0)])
            receive.wait()

        watching.meet(mean)
        AsyncRead(heard).read()  # as a metric does that is logged
        for _ in range(2):
            with pytest.raises(PeerLost) as lost:
                watching.meet(lambda: found.append("called"))
            found.append(str(lost.value))
        watching.close()
        presence.close()
        return found

    said = "worker 0 lost the others: worker 1 ended: ValueError: no luck (in validation)"
    assert device_world(2, worker)[0] == [said, said]


def test_an_error_of_what_the_freed_device_left_is_that_loss() -> None:
    board, error = Notices(Store(), 0, 2), FloatingPointError("worker 0: its parameters hold NaN")
    other = Notices(board._store, 1, 2)
    other.end(Ending("ValueError: no luck", "step 3", False))
    presence = Presence(board, lambda: "step 3")
    presence.freed = True
    presence.leave(error)
    presence.close()
    assert str(error) == "worker 0 lost the others in step 3: worker 1 ended: ValueError: no luck (in step 3)"


class Behind:
    """A device that stands still from now on."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def since(self) -> float:
        return self._begun


class MortalStore(Store):
    """Which worker 0 takes with it."""

    gone = False

    def set(self, key: str, value: str) -> None:
        if self.gone:
            raise RuntimeError("Connection reset by peer")
        super().set(key, value)

    def check(self, keys: list[str]) -> bool:
        if self.gone:
            raise RuntimeError("Connection reset by peer")
        return super().check(keys)


def test_the_host_comes_back_when_the_store_ends_with_its_worker() -> None:
    store, aborted = MortalStore(), threading.Event()
    with watched(Notices(store, 1, 2), Behind(), aborted.set) as freeing:  # type: ignore[arg-type]
        store.gone = True
        assert aborted.wait(10)
        with pytest.raises(PeerLost, match="worker 0, which has the store, left no word"):
            freeing.check()


def test_a_process_whose_host_does_not_come_back_ends() -> None:
    ended.clear()
    store, aborted = Store(), threading.Event()
    Notices(store, 1, 2).end(Ending("ValueError: no luck", "step 3", False))
    with watched(Notices(store, 0, 2), Behind(), aborted.set):  # type: ignore[arg-type]
        assert aborted.wait(10)
        end = time.monotonic() + 10
        while not ended and time.monotonic() < end:
            time.sleep(0.01)
    assert ended == [1]


def test_a_device_that_is_only_slow_is_left_alone() -> None:
    aborted, board = threading.Event(), Notices(store := Store(), 0, 2)
    other = Presence(Notices(store, 1, 2), lambda: "step 3")
    with watched(board, Behind(), aborted.set) as freeing:  # type: ignore[arg-type]
        assert not aborted.wait(0.6)
        freeing.check()
    other.close()
