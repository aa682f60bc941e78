"""A round can be followed: whoever reads it from the mixer to the bytes opens few files and turns back seldom."""

import pytest

from benchmarks.walk import walk
from lightning_decentral.gossip import Codec, Combine, Int8, Plain
from lightning_decentral.gossip.compute.link import Coder
from lightning_decentral.gossip.wire.exchange import Exchange

pytestmark = pytest.mark.threads


@pytest.mark.parametrize(("codec", "files", "moves"), [(Plain(), 11, 35), (Int8(), 13, 53)], ids=str)
def test_one_round_is_a_short_walk(codec: Codec, files: int, moves: int) -> None:
    found = walk(codec)
    assert len(found.entered) == 3, "the training, what leaves, what arrives"
    assert found.calls > 50, "or nothing was counted"
    assert found.files <= files
    assert found.moves <= moves


def members(cls: type) -> set[str]:
    return {name for name in {**vars(cls), **cls.__annotations__} if not name.startswith("_")}


def test_interfaces_have_the_members_that_callers_use() -> None:
    assert len(members(Exchange)) <= 8
    assert len(members(Combine)) <= 14
    assert len(members(Coder)) <= 10
