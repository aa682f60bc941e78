"""Forwards that leave their module as it was, by themselves or because its buffers are put back.

What an observer of fake quantization, or a spectral norm, did to one slice it wouldn't do to the next, nor to the same
slice a second time: slices, and recomputed activations, then aren't the whole model, without a sign.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def unchanged(module: nn.Module, among: str, remedy: str) -> Iterator[None]:
    """Context manager around forwards that must all meet the same buffers of the module.

    Args:
        among: a description of these forwards.

    Raises:
        ValueError: afterwards, where a buffer isn't what it was; running statistics of norms, which a training forward
            doesn't read, may change.
    """
    before = {name: buffer.detach().clone() for name, buffer in _read_buffers(module)}
    yield
    for name, buffer in _read_buffers(module):
        if name not in before or not _same(before[name], buffer):
            kind = type(module.get_submodule(name.rpartition(".")[0])).__name__
            raise ValueError(
                f"every forward changes {name} ({kind}), so {among} would each meet another model: {remedy}, or fix it "
                "before the fit (fake quantization by model.apply(torch.ao.quantization.disable_observer))"
            )


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Afterwards every buffer is what it was before, whatever observers have seen meanwhile."""
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in before:
                buffer.resize_(before[name].shape).copy_(before[name])  # an observer's first forward gives some a size


def _read_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all buffers, with their names, but running statistics of norms."""
    for path, part in module.named_modules():
        if not isinstance(part, nn.modules.batchnorm._NormBase):
            for name, buffer in part.named_buffers(recurse=False):
                yield (f"{path}.{name}" if path else name), buffer


def _same(before: Tensor, after: Tensor) -> bool:
    """Value by value, NaN being NaN. By value, since fused observers write without a trace in `_version`."""
    if before.shape != after.shape:
        return False
    return bool(((before == after) | ((before != before) & (after != after))).all())
