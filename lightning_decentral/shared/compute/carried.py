"""Which buffers are averaged over workers (running statistics), and which are copied from one worker (queues, indices).

A mean over workers makes sense where each worker's buffer is a statistic of its data: BatchNorm's running statistics,
ranges of fake quantization, averages of weights. It makes none for rows that a worker wrote to an index of its own
choice, and for the pointer to them: row 7 of one worker's queue has nothing to do with row 7 of another's."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

WORD = "buffers_averaged"  # attribute with which a module's author decides for its buffers
QUANTIZATION = "torch.ao."
Suffixes = dict[torch.Size, set[str]]  # last components of parameters' names, by shape


def carried(module: nn.Module) -> dict[str, Tensor]:
    """Return {name: buffer} of buffers that aren't averaged: the mean model has all of them from one worker.

    Each module decides for its own buffers, not for those of its children:

    - torch's normalization and quantization modules keep statistics: averaged;
    - so is a buffer whose name begins with `running_`, or that mirrors a parameter by name and shape (an average of
      weights);
    - what is left is carried, where it has rows (two dimensions or more), or an integer or boolean next to it: a
      pointer, a label, a mask. Frozen parameters of the module go with it. Vectors and numbers alone are averaged.

    An attribute `buffers_averaged = True` or `False` of the module decides instead. ValueError for another value of the
    attribute."""
    mirrored = _suffixes(module)
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):  # a shared module has several names
        for name, tensor in _carried_by(part, mirrored).items():
            found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def _carried_by(part: nn.Module, mirrored: Suffixes) -> dict[str, Tensor]:
    own = {name: buffer for name, buffer in part._buffers.items() if buffer is not None}
    if not own or _averaged(part):
        return {}
    rest = own
    if getattr(part, WORD, None) is None:
        # `model.net.weight` is kept as `net_weight`, `netweight` or `ema_weight`: a buffer's name has no dots.
        kept = {n for n, b in own.items() if _real(b) and _clean(n).endswith(tuple(mirrored.get(b.shape, ())))}
        rest = {n: b for n, b in own.items() if not (n.startswith("running_") or n in kept)}
        # Rows: more than one dimension of several elements.
        if not any(sum(size != 1 for size in b.shape) > 1 or not _real(b) for b in rest.values()):
            return {}
    # A shard is part of a tensor over several devices: such a buffer is averaged.
    parameters = {name: p for name, p in part._parameters.items() if p is not None and type(p.data) is Tensor}
    frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
    return {**rest, **frozen}


def _averaged(part: nn.Module) -> bool:
    given = getattr(part, WORD, None)
    if given is None:
        return isinstance(part, _NormBase) or any(c.__module__.startswith(QUANTIZATION) for c in type(part).__mro__)
    if not isinstance(given, bool):
        raise ValueError(
            f"{WORD} of {type(part).__name__} must be True or False, got {given!r}: True takes the mean of the "
            "workers' buffers, False one worker's"
        )
    return given


def _suffixes(module: nn.Module) -> Suffixes:
    found: Suffixes = defaultdict(set)
    for name, parameter in module.named_parameters():
        parts = name.split(".")
        suffixes = (_clean("".join(parts[first:])) for first in range(len(parts)))
        found[parameter.shape] |= {suffix for suffix in suffixes if not suffix.isdigit()}
    return found


def _clean(name: str) -> str:
    return "".join(letter for letter in name if letter.isalnum())


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def carried_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the distinct buffers of these modules that aren't averaged but copied from one worker (`carried`)."""
    return list({id(t): t for module in modules for t in carried(module).values()}.values())
