"""Who is named as the cause of a loss: boards on one store in memory, without threads."""

import json
import threading
from datetime import timedelta
from typing import Any

import pytest

from lightning_decentral.shared.wire.meeting import notices
from lightning_decentral.shared.wire.meeting.notices import Ending, Heartbeat, StatusBoard, is_loss
from lightning_decentral.shared.wire.pending import PeerLost
from tests.shared.wire.meeting.test_stopping import Store


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> list[StatusBoard]:
    """Of three workers; 1 and 2 live on while 0 looks, unless a test makes them silent."""
    store = Store()
    made = [StatusBoard(store, rank, 3) for rank in range(3)]
    for board in made:
        board.beat()
    clock = iter(range(1000))
    monkeypatch.setattr(notices.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(notices.time, "sleep", lambda _: [board.beat() for board in made if board not in silent])
    silent: list[StatusBoard] = []
    made[0].silent = silent  # type: ignore[attr-defined]
    return made


def test_a_worker_that_raised_is_the_cause_not_those_that_lost_it(boards: list[StatusBoard]) -> None:
    boards[1].end(Ending("worker 1 lost neighbour 2", "step 7", lost=True))
    boards[2].end(Ending("ValueError: no luck", "step 6", lost=False))
    assert boards[0].blame() == "worker 2 ended: ValueError: no luck (in step 6)"


def test_a_silent_worker_is_the_cause_not_those_that_lost_it(boards: list[StatusBoard]) -> None:
    boards[0].silent.append(boards[2])  # type: ignore[attr-defined]
    boards[1].end(Ending("worker 1 lost neighbour 2", "step 7", lost=True))
    assert (
        boards[0].blame() == "worker 2 left no word: killed, stopped, or cut off from the network; see its own output"
    )


def test_where_all_live_nobody_is_blamed(boards: list[StatusBoard]) -> None:
    assert boards[0].blame() is None


def test_what_was_read_survives_the_store(boards: list[StatusBoard]) -> None:
    boards[1].end(Ending("ValueError: no luck", "step 6", lost=False))
    boards[0].look()
    boards[2]._store = boards[0]._store = Gone()
    assert boards[0].blame() == "worker 1 ended: ValueError: no luck (in step 6)"
    assert str(boards[2].blame()).startswith("worker 0, which has the store, left no word")


class Gone:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Broken pipe")


@pytest.mark.parametrize("written", [
    "", "[]", "nonsense", "{}", json.dumps({"reason": 1, "phase": "x", "lost": False}), "[" * 100_000,
], ids=["empty", "list", "text", "no keys", "other types", "deep"])  # fmt: skip
def test_what_no_worker_wrote_is_ignored_and_counted(boards: list[StatusBoard], written: str) -> None:
    boards[1]._store.set("ended", "somebody")
    boards[1]._store.set("ended/1", written)
    with pytest.warns(UserWarning, match="ended/1 in the store that no worker wrote"):
        assert boards[0].look() == {}
    assert boards[0].ignored == 1


def test_workers_that_await_each_other_end_when_one_has_ended(boards: list[StatusBoard]) -> None:
    boards[2].end(Ending("ValueError: no luck", "set-up", lost=False))
    with pytest.raises(PeerLost, match="worker 0 lost worker 2"):
        boards[0].agree(True, timedelta(seconds=500))
    with pytest.raises(PeerLost, match="worker 1 lost worker 2"):
        boards[1].agree(True, timedelta(seconds=5))


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_that_cannot_say_what_it_is_is_told_by_its_type(boards: list[StatusBoard]) -> None:
    heartbeat = Heartbeat(boards[1], lambda: "step 3")
    heartbeat.leave(Wordless())
    heartbeat.close()
    assert boards[0].look() == {1: Ending("Wordless: Wordless", "step 3", lost=False)}


@pytest.mark.parametrize(("error", "lost"), [
    (PeerLost("worker 1 lost neighbour 2 (Connection closed by peer): it ended"), True),
    (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5855"), True),
    (RuntimeError("the service of my data closed its door"), False),
    (ValueError("Connection closed by peer"), False),
    (KeyboardInterrupt(), False),
])  # fmt: skip
def test_whose_loss_it_is(error: BaseException, lost: bool) -> None:
    assert is_loss(error) is lost


def test_raw_words_of_the_transport_become_one_line(boards: list[StatusBoard]) -> None:
    boards[1].end(Ending("ValueError: no luck", "step 6", lost=False))
    heartbeat = object.__new__(Heartbeat)  # without its thread
    heartbeat.board, heartbeat.phase, heartbeat.freed = boards[2], lambda: "step 6", False
    error = RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5855\nmore")
    heartbeat.leave(error)
    assert str(error) == "worker 2 lost the others in step 6: worker 1 ended: ValueError: no luck (in step 6)"
    boards[0].look()
    assert boards[0]._endings[2].lost


class Silent:
    """A store behind a link that was cut: it is asked, and never answers."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def ask(*_: Any) -> None:
            self.asked.append(name)
            threading.Event().wait()

        return ask


@pytest.mark.parametrize("lost", [True, False])
def test_whoever_is_cut_off_ends_all_the_same(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    monkeypatch.setattr(notices, "STORE_SECONDS", 0.05)
    store = Silent()
    heartbeat = Heartbeat(StatusBoard(store, 1, 2), lambda: "step 7")
    error = PeerLost("worker 1 lost neighbour 0 (Timed out)") if lost else ValueError("no luck")
    heartbeat.leave(error)  # comes back
    heartbeat.close()
    assert store.asked
    cut = f"worker 1 lost neighbour 0 in step 7: {notices.CUT_OFF}"
    assert str(error) == (cut if lost else "no luck")
