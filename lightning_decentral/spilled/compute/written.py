"""Copies that somebody wrote to: a parameter on the host wouldn't learn of it. Short, and asked by two modules."""

from collections.abc import Mapping

import torch
from torch import Tensor


def versions(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Version counters of the tensors, by name; inference tensors, which have none, are left out."""
    return {name: tensor._version for name, tensor in tensors.items() if not tensor.is_inference()}


def refuse_written(where: str, tensors: Mapping[str, Tensor], before: Mapping[str, int]) -> None:
    """ValueError where an operation has written to one of them since these were its `versions`."""
    for name, version in before.items():
        if tensors[name]._version != version:
            raise ValueError(_text(where, name))


def refuse_unlike(where: str, copies: Mapping[str, Tensor], hosts: Mapping[str, Tensor]) -> None:
    """ValueError where a copy has other numbers than its parameter: what goes by `.data` counts no version."""
    for name, copy in copies.items():
        if not _same(copy.detach().cpu(), hosts[name].detach()):
            raise ValueError(_text(where, name))


def _same(copy: Tensor, host: Tensor) -> bool:
    return torch.equal(copy, host) or torch.allclose(copy, host, rtol=0, atol=0, equal_nan=True)


def _text(where: str, name: str) -> str:
    return (
        f"{where} writes to parameter {name}, of which it has a copy that is thrown away: write to it between two "
        "steps, as in on_train_batch_end, or keep what a forward writes in a buffer (register_buffer)"
    )
