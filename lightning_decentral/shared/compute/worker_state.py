"""Contents of a worker's checkpoint file in addition to the model: metadata, a digest against damage, random states.

A worker's file is a complete Lightning checkpoint of that worker's own model, plus its random state and its messages
in flight. The metadata under `KEY` are format, package, which worker wrote the file in which save, and a digest.

The digest is sha256 over the contents, in order: keys, numbers, and the type, shape and crc32 of every tensor. It finds
damage, not forgery: crc32 finds every flipped byte at twice the speed of sha256. It covers contents, not the file's
bytes, so that it doesn't depend on how the file was written. An object that is neither a tensor, a container nor a
plain value counts by its type alone."""

import hashlib
import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_decentral.shared.compute import cuda

KEY = "lightning_decentral"
VERSION = 3


def sealed(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint with the digest of its contents added to its metadata."""
    return {**checkpoint, KEY: {**checkpoint[KEY], "digest": digest(checkpoint)}}


def damage(checkpoint: Mapping[str, Any]) -> str | None:
    """Return text if the contents are damaged; None where they aren't, or where the checkpoint has no digest."""
    mark = checkpoint.get(KEY) or {}
    kept = mark.get("digest")
    rest = {key: value for key, value in mark.items() if key != "digest"}
    if kept is None or digest({**checkpoint, KEY: rest}) == kept:
        return None
    return "its digest is another"


def random_state() -> dict[str, Any]:
    """Return the state of the random number generators of torch (host and devices), numpy and Python."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, python_gauss = random.getstate()
    # Tensors and primitives only, so that a file loads with `weights_only=True`.
    return {
        "torch": torch.get_rng_state(),  # the host's
        "cuda": cuda.random_states(),
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), python_gauss],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the states of the random number generators that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    cuda.set_random_states(state["cuda"])
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, python_gauss = state["python"]
    random.setstate((version, tuple(internal), python_gauss))


_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype)


def digest(tree: Any) -> str:
    """Return 64 hexadecimal digits, equal for equal contents."""
    state = hashlib.sha256()
    _add(state, tree)
    return state.hexdigest()


def _add(state: Any, tree: Any) -> None:
    match tree:
        case Tensor():
            state.update(f"tensor {tree.dtype} {tuple(tree.shape)} ".encode())
            if tree.layout == torch.strided and not tree.is_quantized:
                flat = tree.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
                raw: Any = flat.view(torch.uint8).numpy()
                state.update(f"{zlib.crc32(raw)} ".encode())
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
            text = repr(tree) if isinstance(tree, _PLAIN) else ""  # an address would differ each time
            state.update(f"{kind} {len(text)} {text} ".encode(errors="surrogatepass"))


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 20  # elements, 8 MiB as 64-bit numbers
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed number


def fingerprint(tensor: Tensor) -> Tensor:
    """sum_i w_i bits_i mod 2^64, an int64 scalar on the tensor's device; bits_i: of element i, w_i: odd, by index i. A
    single element that differs always changes the sum. At most 8 MiB are copied at a time."""
    whole = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = whole.detach().resolve_neg().contiguous().reshape(-1)
    weights = (torch.arange(1, min(flat.numel(), _PIECE) + 1, device=flat.device) * _ODD).bitwise_or(1)
    weights = (weights * (weights >> 29)).bitwise_or(1)  # odd: invertible, so that one change always shows
    found = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in flat.view(_WORDS[flat.element_size()]).split(_PIECE):
        found = found * _ODD + (piece.long() * weights[: len(piece)]).sum()
    return found
