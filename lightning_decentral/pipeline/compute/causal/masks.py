"""Attention of slices: packed sequences kept separate, padding hidden, and masks that leave torch its flash kernels.

    position_ids  0 1 2 0 1 0 1 2 3        documents  0 0 0 1 1 2 2 2 2

Packed sequences are several documents in one row of a batch; a token must not see other documents. `transformers`
separates documents only in masks built without a cache. Slices have a cache, so this module separates them.

A slice of s tokens after c others needs a mask [s, c + s], with which torch can't use its flash kernels. Where nothing
else is masked, torch's causal bias, aligned at the lower right, is equivalent: token i sees keys 0 ... c + i.

`transformers` builds no mask where padding hides nothing. Only a device could answer whether padding does, and its host
would wait. So padding is masked there, unless the host saw before that it hides nothing (`model.hides_nothing`).

Flex attention, softmax(mask(b, h, q, k) ? score(s * <query_q, key_k>, b, h, q, k) : -inf) value, is compiled by
`transformers` into kernels for a device's types; a trial evaluates mask and score as they are written, in float64."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right

FLEX = "flex_attention"
HOST = torch.device("cpu")


def trains(device: torch.device) -> bool:
    """Return whether torch's flex attention has a backward on this device, found by trying."""
    from torch.nn.attention.flex_attention import flex_attention

    token = torch.zeros(1, 1, 1, 16, device=device, requires_grad=True)
    try:
        with torch.enable_grad(), _as_written():
            flex_attention(token, token, token)
    except (NotImplementedError, ValueError):  # the exception's class depends on torch's version and on the device
        return False
    return True


@contextmanager
def tried_at(config: Any, device: torch.device) -> Iterator[torch.device]:
    """Yield the device for the trial of a copy with this configuration: the host, unless only `device` can run it."""
    if config._attn_implementation != FLEX:
        yield HOST
        return
    with _as_written():
        yield device


@contextmanager
def _as_written() -> Iterator[None]:
    """Compile nothing in this context, and hide torch's warnings that compiling is faster."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


SEPARABLE = ("eager", "sdpa", FLEX)  # Kinds of attention whose masks are built from a function of two places.


class Slice(NamedTuple):
    """Slice whose masks are built."""

    documents: Tensor | None  # [batch or 1, tokens up to the slice's end], the documents to separate
    aligned: bool  # use a causal bias instead of a mask where both are equivalent


current: ContextVar[Slice | None] = ContextVar("slice", default=None)
"""Slice whose masks `transformers` builds in this thread, after `install`; None: masks without slices."""


def documents_of(position_ids: Tensor) -> Tensor | None:  # (batch, length)
    """Number each token's document in its row: [batch, length]; None if the host sees one document in every row."""
    steps = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1)
    numbers = (steps != 1).cumsum(-1)
    return numbers if numbers.device.type != "cpu" or bool(numbers.any()) else None


def install() -> None:
    """Install masks of slices in `transformers`' register of masks, once; other masks don't change."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    for kind in SEPARABLE:
        build = ALL_MASK_ATTENTION_FUNCTIONS[kind]
        if not isinstance(build, _OfSlices):
            AttentionMaskInterface.register(kind, _OfSlices(kind, build))


class _OfSlices:
    """Builds another function's mask with more hidden tokens, or an equivalent causal bias."""

    def __init__(self, kind: str, build: Callable[..., Any]) -> None:
        self._kind, self._build = kind, build

    def __call__(self, *args: Any, **options: Any) -> Any:
        current_slice, padding = current.get(), options.get("attention_mask")
        if current_slice is None:
            return self._build(*args, **options)
        limits: list[Rule] = []
        if current_slice.documents is not None:
            documents = current_slice.documents.expand(options["batch_size"], -1)
            limits.append(lambda batch, head, query, key: documents[batch, query] == documents[batch, key])
        if padding is not None and padding.device.type != "cpu":
            limits.append(lambda batch, head, query, key: padding[batch, key])  # true where one isn't hidden
            options["attention_mask"] = None
        if not limits:
            bias = lower_right(options) if self._kind == "sdpa" and current_slice.aligned else None
            return self._build(*args, **options) if bias is None else bias
        rules = [options["mask_function"], *limits]
        rule: Rule = lambda b, h, q, k: reduce(torch.logical_and, (one(b, h, q, k) for one in rules))  # noqa: E731
        return self._build(*args, **{**options, "mask_function": rule, "allow_is_causal_skip": False})


Rule = Callable[[Any, Any, Any, Any], Any]
"""(row, head, query, key) -> whether the query sees the key."""


def lower_right(options: Mapping[str, Any]) -> CausalBias | None:
    """Return the causal bias equivalent to the mask with these options of `transformers`; None if there is none.

    Only what the host knows is used: a question to the device would make the host wait."""
    from transformers.masking_utils import causal_mask_function

    queries, keys, before = (options.get(name) for name in ("q_length", "kv_length", "q_offset"))
    if not (isinstance(queries, int) and isinstance(keys, int) and isinstance(before, int)):
        return None  # another version's arguments
    plain = options.get("mask_function") is causal_mask_function and options.get("allow_is_causal_skip", True)
    limited = options.get("attention_mask") is not None or options.get("local_size") is not None
    ends = before + queries == keys and options.get("kv_offset", 0) == 0
    return causal_lower_right(queries, keys) if plain and ends and not limited and 1 < queries < keys else None
