"""Where all stop: drawn interleavings of rounds, signals and looks, by one definition of the truth."""

import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_decentral.shared.wire.meeting.notices import StatusBoard
from lightning_decentral.shared.wire.meeting.stopping import StopAgreement
from lightning_decentral.shared.wire.pending import PeerLost


class Store:
    """A key-value store in memory, as torch's."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        if self.values.get(key, b"") == expected.encode():
            self.set(key, wanted)
        return self.values[key]


def workers(store: Any, size: int, patience_seconds: float = 0.0) -> list[StopAgreement]:
    return [StopAgreement(StatusBoard(store, rank, size), patience_seconds) for rank in range(size)]


Event = st.tuples(st.integers(0, 2), st.sampled_from(["tick", "tick", "look", "ask"]))


@given(st.lists(Event, max_size=60))
def test_all_stop_after_the_same_round_whatever_the_order(events: list[tuple[int, str]]) -> None:
    """A worker goes on as long as it may: not past its stop, and not past its promise before all have promised."""
    crew, rounds = workers(Store(), 3), [0, 0, 0]

    def go_on(rank: int) -> None:
        one = crew[rank]
        if one.agreed or (one._promise is not None and rounds[rank] + 1 >= one._promise and one._stop is None):
            return  # stopped, or it would wait in this tick
        one.tick()
        rounds[rank] += 1

    for rank, what in events:
        {"tick": lambda r: go_on(r), "look": lambda r: crew[r].look(), "ask": lambda r: crew[r].ask(15)}[what](rank)
    asked = any(what == "ask" for _, what in events)
    for _ in range(80):
        for rank in range(3):
            crew[rank].look()
            go_on(rank)
    assert [one.agreed for one in crew] == [asked] * 3
    if asked:
        assert len({one._stop for one in crew}) == 1
        assert rounds == [crew[0]._stop] * 3
        assert [one.signum for one in crew] == [15] * 3


def test_garbage_in_the_store_stops_nobody_and_is_counted() -> None:
    store = Store()
    board = StatusBoard(store, 0, 2)
    one = StopAgreement(board, 0.0)
    for number, word in enumerate(("", "stop!", "99999", "-1", "1.5"), start=1):
        store.set("stop", word)
        with warnings.catch_warnings(record=True) as said:
            assert not one.look()
        assert (board.ignored, len(said)) == (number, int(number == 1))  # said once
    one.tick()
    assert not one.agreed


def test_a_worker_that_promises_nothing_is_waited_for_no_longer_than_agreed() -> None:
    first, _ = workers(Store(), 2, patience_seconds=0.01)
    first.ask(2)
    assert first.look()
    with pytest.raises(PeerLost, match="worker 0 lost the others"):
        first.tick()


def test_the_first_signal_is_what_all_stop_for() -> None:
    first, second = workers(Store(), 2)
    first.ask(2)
    second.ask(15)
    for one in (first, second, first):
        one.look()
    assert (first.signum, second.signum) == (2, 2)
