"""Digest: sha256 over what a checkpoint says, in order: keys, numbers, and of every tensor type, shape and crc32.

It is against damage, not against forgery: crc32 finds every flipped byte at twice the speed of sha256.
Of contents, not of a file, so that it doesn't depend on who wrote the file. An object that is neither a tensor, a
container nor a plain value counts by its type alone.
"""

import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype)


def digest(tree: Any) -> str:
    """64 hexadecimal digits; equal for equal contents."""
    state = hashlib.sha256()
    _add(state, tree)
    return state.hexdigest()


def _add(state: Any, tree: Any) -> None:
    match tree:
        case Tensor():
            _add_tensor(state, tree)
        case np.ndarray() | np.generic():
            state.update(f"array {tree.dtype} {tree.shape} ".encode() + np.asarray(tree).tobytes())
        case Mapping():
            state.update(f"mapping {len(tree)} ".encode())
            for key, value in tree.items():
                _add(state, key)
                _add(state, value)
        case list() | tuple():
            state.update(f"row {len(tree)} ".encode())
            for value in tree:
                _add(state, value)
        case _:
            kind = type(tree).__name__
            text = repr(tree) if isinstance(tree, _PLAIN) else ""
            state.update(f"{kind} {len(text)} {text} ".encode(errors="surrogatepass"))


def _add_tensor(state: Any, tensor: Tensor) -> None:
    state.update(f"tensor {tensor.dtype} {tuple(tensor.shape)} ".encode())
    if tensor.layout == torch.strided and not tensor.is_quantized:
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        raw: Any = flat.view(torch.uint8).numpy()
        state.update(f"{zlib.crc32(raw)} ".encode())
