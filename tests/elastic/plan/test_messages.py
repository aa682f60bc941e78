"""Messages survive JSON; what isn't one is refused."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from lightning_decentral.elastic.plan.messages import Heartbeat, LobbyUpdate, read_message
from lightning_decentral.elastic.plan.view import Bounds, Times, View

VIEW = View(2, ("a", "b"), 7, ("a",), "a", 4)
BEAT = Heartbeat("a", 3, "host:1", VIEW, None, 9, ((1, 0), (2, 7)), 0.5, "a", leaving=True)
UPDATE = LobbyUpdate(3, VIEW, 2, ("b",), {"a": ((2, 7),)}, 9, ("a", "host:1"), False, True, False, "why", 2, 10.0)


def sent(message: Heartbeat | LobbyUpdate) -> Any:
    return json.loads(json.dumps(asdict(message)))


def test_messages_survive_json() -> None:
    assert read_message(Heartbeat, sent(BEAT)) == BEAT
    assert read_message(LobbyUpdate, sent(UPDATE)) == UPDATE


@pytest.mark.parametrize(
    ("name", "value"),
    [("round", "9"), ("round", True), ("pace", float("nan")), ("view", [1]), ("entered", [[1]]), ("sender", None)],
)
def test_what_is_no_beat_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match="a message has"):
        read_message(Heartbeat, {**sent(BEAT), name: value})


@pytest.mark.parametrize("found", [None, [], {}, {"sender": "a"}])
def test_other_fields_are_refused(found: Any) -> None:
    with pytest.raises(ValueError, match="give every worker the same version"):
        read_message(Heartbeat, found)


def test_keys_of_views_differ_and_rise() -> None:
    others = [
        View(2, ("a", "c"), 7, ("a",), "a", 4),
        View(2, ("a", "b"), 8, ("a",), "a", 4),
        View(3, ("a", "b"), 7, ("a",), "a", 4),
    ]
    keys = [view.key for view in [VIEW, *others]]
    assert len(set(keys)) == 4
    assert keys[-1] == max(keys)
    assert max(keys) < 2**63


def test_bounds_and_times_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="got 3:2"):
        Bounds(3, 2)
    with pytest.raises(ValueError, match="dead_after"):
        Times(0.0)


@pytest.mark.parametrize("size", range(1, 12))
@pytest.mark.parametrize("least", range(1, 7))
def test_two_sides_of_a_cut_never_both_go_on(size: int, least: int) -> None:
    """One has the lobby and makes a view, the other has none: for every size and minimum but of two, of whom the lobby
    may take either."""
    bounds = Bounds(least, 16)
    for with_lobby in range(1, size):
        makes = bounds.may_follow(with_lobby, size, with_lobby)
        assert not (makes and bounds.may_go_on_alone(size - with_lobby, size))
    assert bounds.may_go_on_alone(size, size)
