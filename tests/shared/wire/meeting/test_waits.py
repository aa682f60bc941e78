"""Who waits in a call that others don't make: boards on one store in memory, without threads."""

import warnings

import pytest

from lightning_decentral.shared.wire.meeting.notices import Notices
from lightning_decentral.shared.wire.meeting.waits import Wait, Waits
from tests.shared.wire.meeting.test_stopping import Store

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
