"""Whole tensors on their owners against the same change in one place; who owns what."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral.shared.compute.codec import Codec, Int8, Plain
from lightning_decentral.shared.wire.owners import by_owners, each_once, owners, row_counts
from lightning_decentral.shared.wire.transport import GlooTransport
from tests.world import world

SHAPES = [(5, 3), (3, 5), (4, 4), (1, 7), (8, 2, 2), (4, 4)]


def drawn() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.threads
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [len(SHAPES), 1])
def test_it_is_the_change_of_the_whole_and_each_is_changed_once(size: int, count: int) -> None:
    changed: list[int] = []

    def change(tensors: Any) -> None:
        for tensor in tensors:
            changed.append(tensor.numel())
            tensor.copy_(tensor.flatten().cumsum(0).view(tensor.shape))  # every element needs those before it

    expected = drawn()[:count]
    change(expected)
    once = sorted(changed)
    changed.clear()

    def worker(group: Any) -> list[Tensor]:
        parts = [t.split(row_counts(len(t), size))[group.rank()].clone() for t in drawn()[:count]]
        each_once(change, parts, SHAPES[:count], GlooTransport(group))
        return parts

    rows = world(size, worker)
    assert sorted(changed) == once
    for k, whole in enumerate(expected):
        assert torch.equal(torch.cat([parts[k] for parts in rows]), whole)


@pytest.mark.threads
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("codec", [Plain(), Int8()], ids=str)
def test_what_all_hold_alike_is_changed_once_and_stays_alike(size: int, codec: Codec) -> None:
    changed: list[int] = []

    def change(tensors: Any) -> None:
        for tensor in tensors:
            changed.append(tensor.numel())
            tensor.copy_(tensor.flatten().cumsum(0).view(tensor.shape))

    expected = drawn()
    change(expected)
    once = sorted(changed)
    changed.clear()

    def worker(group: Any) -> tuple[list[Tensor], int]:
        tensors = drawn()
        return tensors, by_owners(change, tensors, codec, GlooTransport(group), turn=3)

    rows = world(size, worker)
    assert sorted(changed) == once
    for tensors, _ in rows:
        assert all(torch.equal(mine, first) for mine, first in zip(tensors, rows[0][0], strict=True))
    for mine, whole in zip(rows[0][0], expected, strict=True):
        torch.testing.assert_close(mine, whole, rtol=0, atol=0 if codec == Plain() else 0.1)
    if codec == Plain():
        assert sum(sent for _, sent in rows) == 4 * (size - 1) * sum(tensor.numel() for tensor in expected)


def test_rows_are_those_of_chunk() -> None:
    for rows in range(1, 12):
        for devices in range(1, 7):
            cut = [len(part) for part in torch.zeros(rows).chunk(devices)]
            assert row_counts(rows, devices) == cut + [0] * (devices - len(cut))


def test_work_is_shared_out() -> None:
    """GPT-2: twelve blocks of four matrices on eight devices."""
    width = 768
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)] * 12
    load = [0] * 8
    for (a, b), owner in zip(shapes, owners(shapes, 8), strict=True):
        load[owner] += a * b * min(a, b)
    assert max(load) < 1.1 * sum(load) / 8
    assert owners([(2, 2)] * 3, 8) == [0, 1, 2]
