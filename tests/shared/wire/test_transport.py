"""Which transport a group gets, and which groups get none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_decentral.shared.wire.transport import GlooTransport, NcclTransport, StagedTransport, transport

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
    with pytest.raises(ValueError, match=f"got {name}: give process_group_backend one of these"):
        transport(group(name), CUDA)


def test_nccl_that_does_messages_one_by_one_is_refused() -> None:
    with pytest.raises(ValueError, match="unset TORCH_DISTRIBUTED_DEBUG=DETAIL"):
        transport(group("nccl", coalesces=False), CUDA)
