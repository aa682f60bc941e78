"""Members that meet for unlike things: what each asks for, and whose wins."""

from functools import partial
from typing import Any

import pytest
import torch

from lightning_decentral.elastic.compute.gathered import (
    Unlike,
    first_of,
    means_of,
    named,
    of_alike,
    of_each,
    reduced,
)

ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("value", "made", "name"),
    [
        ([True], of_each(list), "a decision"),
        ([False, True], of_each(list), "a decision"),  # of a worker of two devices
        ([{"a": 1}], of_each(list), "everybody's value"),
        ([ONE], of_each(partial(reduced, "sum")), "a reduction"),
        ([3], of_each(first_of), "the oldest's value"),
        ([ONE], of_each(torch.stack), "rows"),
        ([ONE, ONE], means_of, "means of 2 tensors"),
    ],
)
def test_what_members_meet_for_has_a_name(value: Any, made: Any, name: str) -> None:
    assert named(value, made) == name


def test_of_those_who_meet_for_one_thing_as_most_do() -> None:
    rows: list[Any] = [["rows", 1], ["a decision", True], ["rows", 3]]
    assert of_alike("rows", sum)(rows) == ["rows", 4]
    assert of_alike("rows", sum)(rows[:2]) == ["rows", 1]  # the oldest's, where as many are for another
    with pytest.raises(Unlike, match=r"asks the members for a decision, but most ask for rows: a hook or a call"):
        of_alike("a decision", sum)(rows)
