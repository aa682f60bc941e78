"""Which transport a group gets, and which groups get none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_decentral.shared.wire.transport import (
    GlooTransport,
    NcclTransport,
    StagedTransport,
    new_group,
    transport,
)
from tests.world import world

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Group(SimpleNamespace):
    """A key, as groups are."""

    __hash__ = object.__hash__


def group(name: str, coalesces: bool = True) -> Any:
    backend = SimpleNamespace(supports_coalescing=coalesces)
    return Group(name=lambda: name, rank=lambda: 0, size=lambda: 2, _get_backend=lambda device: backend)


def test_a_transport_for_each_backend() -> None:
    assert type(transport(group("nccl"), CUDA)) is NcclTransport
    assert type(transport(group("nccl"), CPU)) is NcclTransport  # the world of GPUs, before groups of our own exist
    assert type(transport(group("gloo"), CPU)) is GlooTransport
    assert type(transport(group("gloo"), CUDA)) is StagedTransport


@pytest.mark.parametrize("name", ["xccl", "ucc", "mpi", "custom"])
def test_other_backends_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"got {name}: set process_group_backend to one of them"):
        transport(group(name), CUDA)


def test_nccl_that_does_messages_one_by_one_is_refused() -> None:
    with pytest.raises(ValueError, match="unset TORCH_DISTRIBUTED_DEBUG=DETAIL"):
        transport(group("nccl", coalesces=False), CUDA)


@pytest.mark.parametrize(("bound", "splits", "name", "calls"), [
    (torch.device("cuda:1"), True, "nccl", ["split [[0, 2], [1, 3]]"]),
    (torch.device("cuda:1"), False, "nccl", ["new [0, 2]", "new [1, 3]"]),
    (torch.device("cuda:1"), True, "gloo", ["new [0, 2]", "new [1, 3]"]),
    (None, True, "nccl", ["new [0, 2]", "new [1, 3]"]),
])  # fmt: skip
def test_groups_of_a_bound_device_are_split_off_at_once(
    monkeypatch: pytest.MonkeyPatch, bound: Any, splits: bool, name: str, calls: list[str]
) -> None:
    """Else each NCCL group is a split of the world's communicator that all take part in. Gloo splits off nothing."""
    said: list[str] = []
    backend = SimpleNamespace(supports_splitting=splits, name=lambda: name)
    world = SimpleNamespace(bound_device_id=bound, _get_backend=lambda _: backend)

    def new(ranks: Any, *_: Any) -> Any:
        said.append(f"new {ranks}")
        return "mine" if 1 in ranks else dist.GroupMember.NON_GROUP_MEMBER

    def split(parent: Any, ranks: Any, *_: Any) -> Any:
        said.append(f"split {ranks}")
        return "mine"

    there = {"group": SimpleNamespace(WORLD=world), "split_group": split, "new_group": new, "get_rank": lambda: 1}
    for attribute, value in there.items():
        monkeypatch.setattr(dist, attribute, value, raising=False)
    assert new_group([range(0, 4, 2), [1, 3]], None, None) == "mine"
    assert said == calls
    assert world.bound_device_id == (None if name == "gloo" else bound)


@pytest.mark.threads
@pytest.mark.parametrize("kind", [torch.float32, torch.complex64, torch.complex128], ids=str)
def test_every_collective_takes_complex_numbers(kind: torch.dtype) -> None:
    rows = [torch.randn(4, dtype=kind, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]

    def worker(own: Any) -> None:
        over = GlooTransport(own)
        mine, total = rows[over.rank], rows[0] + rows[1]
        summed, of_first, part, whole = (
            mine.clone(),
            mine.clone(),
            torch.empty(2, dtype=kind),
            torch.empty(8, dtype=kind),
        )
        over.all_reduce(summed).wait()
        over.broadcast(of_first).wait()
        over.reduce_scatter(part, mine.clone()).wait()
        over.all_gather_into(whole, mine).wait()
        pending, every = over.all_gather(mine)
        pending.wait()
        at_first = mine.clone()
        over.reduce(at_first, 0).wait()
        assert torch.equal(summed, total)
        assert torch.equal(of_first, rows[0])
        assert torch.equal(part, total.view(2, 2)[over.rank])
        assert torch.equal(whole, torch.cat(rows))
        assert all(map(torch.equal, every, rows))
        assert over.rank or torch.equal(at_first, total)

    world(2, worker)
