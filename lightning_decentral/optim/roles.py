"""Roles of parameters in a model, as groups for an optimizer: a hidden matrix, an embedding or head, or a vector."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

HEADS = frozenset({
    "classifier", "cls", "fc", "head", "heads", "lm_head", "logits", "out", "output", "proj_out", "qa_outputs", "score",
})  # fmt: skip
"""Names of modules that count as output layers."""
COLOURS = 4  # a convolution that reads no more channels than these reads pixels: it is the input layer


def muon_groups(module: nn.Module, *, hidden: Sequence[str] = (), adamw: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Trained parameters of a module in three groups: hidden matrices, other matrices, the rest; any may be empty.

        [{"params": ..., "hidden": True},
         {"params": ..., "hidden": False},
         {"params": ..., "hidden": False, "weight_decay": 0.0}]

    `Muon` reads `hidden`; other optimizers ignore it. Hidden are tensors of two axes and filters of convolutions,
    except

    - the weight of an `Embedding`, and parameters under a name with `embed` in it (positions, patches);
    - parameters under a name of `HEADS` (`lm_head`, `classifier`, `fc`, ...);
    - filters that read `COLOURS` channels or fewer, and those of grouped convolutions, which are many small matrices;
    - single rows and columns, and complex numbers.

    A name after a number doesn't count (`blocks.0.fc` is hidden). A parameter with several names or modules (tied
    weights) is hidden only if all of them make it hidden. A part of a model, as on a stage of a pipeline, has the
    groups of the whole model, without the parameters of other parts.

    Args:
        hidden: names of parameters, as in `named_parameters()`, or patterns of names (`network.stem.*`), whose tensors
            of two axes or more are hidden in spite of these rules. Names that match nothing are ignored.
        adamw: names or patterns of parameters that aren't hidden; they win over `hidden`.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    outer = {p for part in module.modules() for p in part.parameters(recurse=False) if not _is_hidden_of(part, p)}
    outer |= {p for p, known in names.items() if any(map(_is_outer, known))}
    outer -= {p for p, known in names.items() if _fits(known, hidden) and p.ndim >= 2}
    outer |= {p for p, known in names.items() if _fits(known, adamw)}
    trained = [p for p in names if p.requires_grad]
    return [
        {"params": [p for p in trained if p not in outer], "hidden": True},
        {"params": [p for p in trained if p in outer and p.ndim >= 2], "hidden": False},
        {"params": [p for p in trained if p in outer and p.ndim < 2], "hidden": False, "weight_decay": 0.0},
    ]


def _is_hidden_of(part: nn.Module, parameter: Tensor) -> bool:
    """Return whether the parameter is a hidden matrix, by the module that owns it."""
    if parameter.ndim < 2 or parameter.is_complex() or len(parameter) in (1, parameter.numel()):
        return False
    if isinstance(part, _ConvNd):
        return part.groups == 1 and part.in_channels > COLOURS
    return parameter.ndim == 2 and not isinstance(part, (nn.Embedding, nn.EmbeddingBag))


def _is_outer(name: str) -> bool:
    """Return whether a parameter of this name is outside the hidden layers."""
    before_number = takewhile(lambda word: not word.isdigit(), name.split("."))
    return any(word in HEADS or "embed" in word for word in before_number)


def _fits(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
