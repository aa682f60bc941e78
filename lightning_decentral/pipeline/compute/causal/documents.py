"""Packed sequences: several documents in one row of a batch, which a token may not see beyond its own.

    position_ids  0 1 2 0 1 0 1 2 3        documents  0 0 0 1 1 2 2 2 2

`transformers` separates them where it builds a mask without a cache; slices have one, so here it's done for them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.pipeline.compute.causal.flex import FLEX

SEPARABLE = ("eager", "sdpa", FLEX)
"""Kinds of attention whose masks are built from a function of two places."""
_current: ContextVar[Tensor | None] = ContextVar("documents", default=None)


def documents_of(position_ids: Tensor) -> Tensor | None:
    """[batch, length]: the number of each token's document in its row; None where every row is one."""
    steps = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1)
    numbers = (steps != 1).cumsum(-1)
    return numbers if bool(numbers.any()) else None


@contextmanager
def separated(documents: Tensor | None) -> Iterator[None]:
    """Within, masks that `transformers` builds in this thread keep these documents apart.

    documents: [batch or 1, tokens up to the slice's end].
    """
    if documents is not None:
        _install()
    token = _current.set(documents)
    try:
        yield
    finally:
        _current.reset(token)


def _install() -> None:
    """Through the register that `transformers` has for masks: once, and without effect elsewhere."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    for kind in SEPARABLE:
        build = ALL_MASK_ATTENTION_FUNCTIONS[kind]
        if not isinstance(build, _Separating):
            AttentionMaskInterface.register(kind, _Separating(build))


class _Separating:
    """Builds the mask that another function builds, without pairs of different documents."""

    def __init__(self, build: Callable[..., Any]) -> None:
        self._build = build

    def __call__(self, *args: Any, **options: Any) -> Any:
        documents = _current.get()
        if documents is None:
            return self._build(*args, **options)
        allowed, rows = options["mask_function"], documents.expand(options["batch_size"], -1)

        def same(batch: Any, head: Any, query: Any, key: Any) -> Any:
            inside: Tensor = rows[batch, query] == rows[batch, key]
            return torch.logical_and(inside, allowed(batch, head, query, key))

        return self._build(*args, **{**options, "mask_function": same, "allow_is_causal_skip": False})
