"""Two values that are constructed otherwise are described otherwise, whatever they are made of."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from lightning_decentral.shared.plan.described import described


@dataclass(frozen=True)
class Inner:
    size: int = 1


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    edges: tuple[tuple[int, int], ...] = field(default=(), repr=False)


class Plain:
    """No dataclass; keeps one argument under its name, one behind an underscore, and has more that is no argument."""

    def __init__(self, rate: float = 0.5, *, inner: Any = None, **more: Any) -> None:
        self.rate, self._inner = rate, inner
        self.calls = 0


class Derived(Plain):
    def __init__(self, depth: int = 2, **more: Any) -> None:
        super().__init__(**more)
        self.depth = depth


def test_names_are_those_of_the_constructors() -> None:
    found = described(Derived(3, rate=0.1, inner=Outer()), "part")
    assert found == {
        "part": "Derived",
        "part.depth": "3",
        "part.rate": "0.1",
        "part.inner": "Outer",
        "part.inner.inner": "Inner",
        "part.inner.inner.size": "1",
        "part.inner.edges": "()",
    }


DIFFERENT = [
    (Outer(), Outer(Inner(2))),
    (Outer(), Outer(edges=((0, 1),))),
    (Outer(edges=tuple((i, i) for i in range(99))), Outer(edges=tuple((i, i + (i == 50)) for i in range(99)))),
    (Plain(), Plain(rate=0.25)),
    (Plain(), Derived()),
    (Plain(inner=[Inner()]), Plain(inner=[Inner(), Inner()])),
    (Plain(inner={"a": Inner()}), Plain(inner={"a": Inner(3)})),
    (Plain(inner={"a": 1}), Plain(inner={"b": 1})),
    (Plain(inner={1, 2}), Plain(inner={1, 3})),
    (Plain(inner=min), Plain(inner=max)),
    (Plain(inner=Inner), Plain(inner=Outer)),
    (Plain(inner=partial(max, 1)), Plain(inner=partial(max, 2))),
    (Plain(inner=np.arange(3)), Plain(inner=np.arange(4))),
    (Plain(inner=1), Plain(inner=True)),
    (Plain(inner="1"), Plain(inner=1)),
    (Plain(inner=np.float32(1)), Plain(inner=np.float64(1))),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_is_constructed_otherwise_is_described_otherwise(one: Any, other: Any) -> None:
    assert described(one, "part") != described(other, "part")


def test_what_happened_since_is_not_described() -> None:
    one, other = Plain(), Plain()
    other.calls += 1
    assert described(one, "part") == described(other, "part")


def test_an_order_without_meaning_makes_no_difference() -> None:
    one, other = {8, 0}, {0, 8}  # of the same bucket: each keeps the order in which they came
    assert list(one) != list(other)
    assert described(one, "numbers") == described(other, "numbers")


def test_a_cycle_ends() -> None:
    one = Plain()
    one._inner = one
    assert described(one, "part")["part.inner.inner.inner"] == "Plain"
