"""Flex attention: on which devices torch trains it, and how a trial runs it.

    softmax(mask(b, h, q, k) ? score(s * <query_q, key_k>, b, h, q, k) : -inf) value

`transformers` compiles it into kernels for a device's types; a trial evaluates mask and score as they are written, in
float64. Short, as it alone knows torch's flex attention.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

FLEX = "flex_attention"
HOST = torch.device("cpu")


def trains(device: torch.device) -> bool:
    """Return whether torch's flex attention has a backward on this device: found by a try."""
    from torch.nn.attention.flex_attention import flex_attention

    token = torch.zeros(1, 1, 1, 16, device=device, requires_grad=True)
    try:
        with torch.enable_grad(), _as_written():
            flex_attention(token, token, token)
    except (NotImplementedError, ValueError):  # which of them depends on torch's version and kind of device
        return False
    return True


@contextmanager
def tried_at(config: Any, device: torch.device) -> Iterator[torch.device]:
    """Yields where a copy with this configuration is tried: on the host, unless only `device` can."""
    if config._attn_implementation != FLEX:
        yield HOST
        return
    with _as_written():
        yield device


@contextmanager
def _as_written() -> Iterator[None]:
    """Context manager in which torch compiles nothing, and its warnings that compiling is faster are hidden."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
