"""The roll call beside a store that ends when worker 0 does."""

import time
from types import SimpleNamespace
from typing import Any

import torch

from lightning_decentral.shared.wire.agreement import RollCall


class Gathering:
    """Done at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks > 2

    def wait(self) -> None:
        """All have come."""


class Store:
    """A key-value store that worker 0 takes with it after so many questions."""

    def __init__(self, questions: int, **values: str) -> None:
        self.questions, self.values = questions, {f"fit/{key}/0": value for key, value in values.items()}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        self.questions -= 1
        if self.questions < 0:
            raise RuntimeError("Connection reset by peer")
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


def roll_call(
    store: Store,
    taken: list[int],
    ends: list[list[int]],
    left_after: list[int] | None = None,
    order: list[int] | None = None,
) -> RollCall:
    def take_part(index: int) -> None:
        taken[index] += 1
        if order is not None:
            order.append(index)

    over: Any = SimpleNamespace(rank=1, size=3, all_gather=lambda _: (Gathering(), list(map(torch.tensor, ends))))
    return RollCall(over, store, lambda: taken, lambda: taken, take_part, lambda: 0, "fit", lambda: left_after)


def test_a_worker_that_comes_last_needs_no_store() -> None:
    """Worker 0 has heard all, has ended and its store with it, before this worker sees that all have come."""
    taken = [3]
    roll = roll_call(Store(questions=1), taken, [[3], [3]])
    roll.end_epoch()
    roll.close()
    assert taken == [3]


def test_who_has_ended_takes_part_in_the_rounds_that_another_waits_for() -> None:
    taken = [3]
    at = {"at/0": "5,0", "at/2": "ended"}
    roll = roll_call(Store(questions=20, needed="yes", **at), taken, [[3], [5]])
    roll.end_epoch()
    roll.close()
    assert taken == [5]


def test_of_several_optimizers_it_takes_part_where_all_that_go_on_have_come_to() -> None:
    """Worker 2 waits for six rounds of the first, in whose fourth stands worker 0, who waits for the second's."""
    order: list[int] = []
    at = {"at/0": "3,2,0", "at/2": "6,2,0"}
    roll = roll_call(Store(questions=20, needed="yes", **at), [3, 1], [[3, 1], [3, 2]], order=order)
    roll.end_epoch()
    roll.close()
    assert order == [1]


def test_who_has_not_said_where_it_is_is_waited_for() -> None:
    taken = [3]
    roll = roll_call(Store(questions=20, needed="yes", **{"at/0": "5,0"}), taken, [[3], [3]])
    roll.end_epoch()
    roll.close()
    assert taken == [3]


def test_where_somebody_has_ended_a_worker_says_where_it_is_and_no_more_once_it_has_ended() -> None:
    store, over = Store(questions=10**6, ended="yes"), SimpleNamespace(rank=0, size=3)
    over.all_gather = lambda _: (Gathering(), [torch.tensor([5])])
    roll = RollCall(over, store, lambda: [5], lambda: [5], lambda _: None, lambda: 2, "fit")
    end = time.monotonic() + 20
    while "fit/at/0/0" not in store.values and time.monotonic() < end:
        time.sleep(0.01)
    assert (store.values["fit/at/0/0"], store.values["fit/needed/0"]) == ("5,2", "yes")
    roll._report("ended")
    roll._report("6,2")
    roll.close()
    assert store.values["fit/at/0/0"] == "ended"


def test_who_has_ended_comes_up_to_where_the_others_stopped_and_waits_no_longer() -> None:
    taken = [3]
    roll = roll_call(Store(questions=0), taken, [[3], [9]], left_after=[7])
    roll.end_epoch()
    roll.close()
    assert taken == [7]
