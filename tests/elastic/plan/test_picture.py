"""Who trained together, as the report draws it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_decentral.elastic.plan.picture import draw_members, stays
from lightning_decentral.elastic.plan.view import View


def history(*views: tuple[int, tuple[str, ...]]) -> list[View]:
    return [View(place + 1, members, first, (), "a", 2) for place, (first, members) in enumerate(views)]


def test_each_member_has_a_bar_from_view_to_view() -> None:
    views = history((0, ("a", "b")), (5, ("a", "b", "c")), (9, ("c", "b")))
    assert stays(views, 20) == {
        "a": [(0, 5, 1), (5, 9, 2)],
        "b": [(0, 5, 1), (5, 9, 2), (9, 20, 3)],
        "c": [(5, 9, 2), (9, 20, 3)],
    }


@given(st.lists(st.tuples(st.integers(0, 9), st.sets(st.sampled_from("abcd"), min_size=1)), min_size=1, max_size=6))
def test_bars_fill_all_rounds_of_all_views(changes: list[tuple[int, set[str]]]) -> None:
    first, told = 0, []
    for later, members in changes:
        told.append((first, tuple(sorted(members))))
        first += later
    found = stays(history(*told), first)
    for round in range(first):
        view = max(place for place, (begin, _) in enumerate(told) if begin <= round)
        there = {name for name, each in found.items() if any(begin <= round < end for begin, end, _ in each)}
        assert there == set(told[view][1])


@pytest.mark.parametrize("rounds", [0, 1, 100])
def test_any_run_is_drawn(tmp_path: Path, rounds: int) -> None:
    draw_members(history((0, ("a@host:1", "b@host:2"))), rounds, tmp_path / "members.png")
    assert (tmp_path / "members.png").read_bytes().startswith(b"\x89PNG")
