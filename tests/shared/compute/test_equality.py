"""Replicas that must be the same: one bit is found, and who stands out is named."""

import pytest
import torch
from torch import Tensor

from lightning_decentral.shared.compute.health import TOLERANCE, Unequal, bits, looks, unequal
from lightning_decentral.shared.compute.worker_state import fingerprint

NAN, INF = float("nan"), float("inf")


def found(rows: list[dict[str, Tensor]]) -> list[Unequal]:
    return unequal({rank: looks(row) for rank, row in enumerate(rows)})


def others(value: float, size: int) -> list[dict[str, Tensor]]:
    """The last worker's second tensor has one other number."""
    rows = [{"v": torch.full((4,), 2.0), "w": torch.tensor([-1.0, 3.0, 0.5, 0.25])} for _ in range(size)]
    rows[-1]["w"][3] = value
    return rows


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30, -1e30, 7.0, -2.5])
def test_a_replica_that_is_not_equal_is_found_by_worker_and_tensor(size: int, value: float) -> None:
    (one,) = found(others(value, size))
    assert (one.name, one.usual[0] < size - 1, one.other[0]) == ("w", True, size - 1)
    assert one.deviation > TOLERANCE
    assert str(one).startswith(f"worker {size - 1}'s w is from")


@pytest.mark.parametrize("size", [2, 3])
def test_rounding_is_seen_and_far_below_the_tolerance(size: int) -> None:
    (one,) = found(others(0.2500001, size))
    assert 0 < one.deviation < 1e-6


def test_what_most_workers_have_is_usual() -> None:
    rows = others(0.25, 4)
    rows[0]["w"][1] = 2.5  # of two by two the smaller one would be usual
    (one,) = found(rows)
    assert (one.other[0], one.deviation) == (0, pytest.approx(0.5 / 3))


def test_a_tensor_that_one_worker_lacks_is_named() -> None:
    rows = others(0.25, 2)
    del rows[1]["v"]
    assert [str(one) for one in found(rows)] == ["worker 1's v doesn't exist, worker 0's is from 2 to 2 with mean 2"]


def test_equal_replicas_are_equal_whatever_they_hold() -> None:
    row = {"a": torch.tensor([NAN, INF, -INF]), "b": torch.empty(0), "c": torch.tensor([True]), "d": torch.tensor(3)}
    assert found([row, {name: tensor.clone() for name, tensor in row.items()}]) == []


TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_bit_of_every_element_counts(dtype: torch.dtype) -> None:
    drawn = torch.randn(40, generator=torch.Generator().manual_seed(0)) * 10
    tensor = drawn.to(dtype)
    seen = {int(fingerprint(tensor))}
    for place in range(40):
        changed = tensor.clone()
        changed[place] = ~changed[place] if dtype is torch.bool else changed[place] + 1
        seen.add(int(fingerprint(changed)))
    assert len(seen) == 41


def test_elements_that_change_places_or_signs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Across pieces, too; changes that keep smallest, largest and mean."""
    monkeypatch.setattr("lightning_decentral.shared.compute.worker_state._PIECE", 8)
    tensor = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    variants = [tensor, -tensor, tensor.flip(0), tensor.roll(1, 0), tensor.t().reshape(8, 5)]
    assert len({int(fingerprint(variant)) for variant in variants}) == len(variants)
    assert int(fingerprint(tensor)) == int(fingerprint(tensor.t().contiguous().t()))


def test_names_types_and_shapes_count() -> None:
    zeros = torch.zeros(4)
    rows = [{"w": zeros}, {"v": zeros}, {"w": zeros.view(2, 2)}, {"w": zeros.to(torch.int32)}]
    assert len({bits(row) for row in rows}) == len(rows)
