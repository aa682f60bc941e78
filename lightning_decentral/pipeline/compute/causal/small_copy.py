"""Small copy of a `transformers` model: the same class and configuration with few, narrow layers, in float64."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

LAYERS = 3
EXPERTS = r"(moe_)?(num|n)_(local_|routed_)?experts"
WIDTHS = {
    r"(hidden_size|n_embd|d_model|dim|embed_dim|embedding_size|word_embed_proj_dim)": 32,
    r"(num_attention_heads|n_head|n_heads|num_heads|decoder_attention_heads)": 4,
    r"(head_dim|global_head_dim|attention_head_dim|kv_channels|(swa_)?v_head_dim|qk_nope_head_dim|swa_head_dim)": 8,
    r"(qk_rope_head_dim|index_head_dim)": 8,
    r"qk_head_dim": 16,
    r"rotary_dim": 4,
    r"(q_lora_rank|kv_lora_rank|o_lora_rank)": 12,
    r".*(intermediate_size|ffn_dim|n_inner|ffn_hidden_size)": 24,
    EXPERTS: 8,
    r"(num_experts_per_tok(en)?|moe_topk|moe_top_k|n_group|moe_k)": 2,
    r"topk_group": 1,
}
"""Largest whole numbers of the shrunk configuration, by patterns of the names that `transformers` gives them."""
REACHES = {
    r".*vocab_size(_per_layer_input)?": 67,
    r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|max_sequence_length)": 64,
    r".*(sliding_window|window_size|attention_chunk_size|sliding_window_size|local_attention)": 5,
    r"(dense_attention_every_n_layers|first_k_dense_replace|num_dense_layers|moe_layer_start_index)": 1,
    r"max_window_layers": 2,
    r"floor_scale": 3,
}
"""Largest numbers for tokens, and for what would reach beyond a few tokens or layers, by patterns of names."""
TRIED = ("vocab_size", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
LEAST = 16  # Least number of positions and tokens of a copy: the trial's sequences must fit.
MOST_PARAMETERS = 10**7
SMALL = 64  # a model that is no wider keeps its widths: they may be divisible by few numbers
SILENCED = re.compile(r".*(dropout|pdrop|layerdrop|jitter).*")


class Unfit(ValueError):
    """Error: the reason why a model can't be cut into stages, as a text that follows the model's name."""


def small_copy(kind: type, config: Any) -> Any:
    """Make a model of this class with a shrunk configuration and random weights, in float64; raises what the class
    raises for that configuration."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in kind(shrunk(config)).parameters())
    if parameters > MOST_PARAMETERS:
        raise Unfit(f"has {parameters:,} parameters where it should be small")
    copy: Any = kind(shrunk(config)).double().train()
    with torch.no_grad():
        for parameter in copy.parameters():
            # As initialized, attention is nearly uniform and norms are equal, which could hide differences.
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return copy


def shrunk(config: Any) -> Any:
    """Copy a configuration with few, narrow layers; kinds of layers, scales and caps don't change."""
    small, given, depth = deepcopy(config), dict(vars(config)), config.num_hidden_layers
    kept = layers_of(given, depth)
    known = {own: name for name, own in (config.attribute_map or {}).items()}
    sizes = REACHES if config.hidden_size <= SMALL else {**WIDTHS, **REACHES}
    for own, value in given.items():
        if _by_layer(value, depth):
            setattr(small, own, type(value)(value[i] for i in kept))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(small, own, _number(str(known.get(own, own)), value, sizes))
    small.num_hidden_layers = len(kept)
    small._experts_implementation = "eager"  # grouped products know no float64
    if config.hidden_size > SMALL:
        _share_heads(config, small)
    for name, value in vars(small).items():
        if name.endswith("token_id") and isinstance(value, int):
            setattr(small, name, min(value, 2))  # within the vocabulary
    _fit_ropes(small)
    return small


def layers_of(given: Mapping[str, Any], depth: int) -> list[int]:
    """Layers that the copy keeps: one of each kind in the configuration's lists, and at least LAYERS."""
    lists = [value for value in given.values() if _by_layer(value, depth)]
    kinds = [tuple(str(values[i]) for values in lists) for i in range(depth)]
    first = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    rest = [i for i in range(depth) if i not in first]
    return sorted([*first, *rest[: max(0, LAYERS - len(first))]])


def _by_layer(value: Any, depth: int) -> bool:
    """Return whether the value describes each layer; a list of consecutive layer numbers doesn't."""
    return isinstance(value, (list, tuple)) and len(value) == depth and list(value) != list(range(depth))


def _number(name: str, value: float, sizes: Mapping[str, int]) -> float:
    if SILENCED.fullmatch(name):
        return type(value)(0)
    size = next((size for pattern, size in sizes.items() if re.fullmatch(pattern, name)), None)
    return value if size is None else min(size, max(int(value), LEAST if size >= LEAST and name in TRIED else 0))


def _share_heads(config: Any, small: Any) -> None:
    """Give keys and values as many heads as queries if they had as many, otherwise fewer."""
    given = vars(config)
    if "num_attention_heads" not in given and "num_attention_heads" not in (config.attribute_map or {}):
        return
    small.num_attention_heads = heads = 4 if config.num_attention_heads >= 4 else 1 + config.num_attention_heads // 2
    for name in ("num_key_value_heads", "num_kv_heads", "n_head_kv", "swa_num_key_value_heads"):
        if isinstance(given.get(name), int):
            fewer = min(given[name], max(1, heads // 2))
            setattr(small, name, heads if given[name] == config.num_attention_heads else fewer)


def _fit_ropes(small: Any) -> None:
    """Shorten rotary factors to the number of frequencies, and lengths from which a rule holds to a few tokens."""
    head = vars(small).get("head_dim") or small.hidden_size // getattr(small, "num_attention_heads", 1)
    for rope in ropes(small):
        part = rope.get("partial_rotary_factor") or vars(small).get("partial_rotary_factor") or 1.0
        for name in ("short_factor", "long_factor"):
            if name in rope:
                rope[name] = rope[name][: int(head * part) // 2]
        if "llama_4_scaling_beta" in rope:
            rope["original_max_position_embeddings"] = 6


class Doubled(TorchFunctionMode):
    """Mode that replaces float32 by float64: norms and softmaxes of half precision are exact, too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [torch.float64 if value is torch.float32 else value for value in args]
        named = {n: torch.float64 if value is torch.float32 else value for n, value in (kwargs or {}).items()}
        wider: Any = Tensor.double if func is Tensor.float else func
        return wider(*args, **named)


@contextmanager
def isolated(place: torch.device) -> Iterator[None]:
    """Use a fresh process's random numbers, autocast and gradients in this context, and restore them afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one thread: several take longer for so little work
    try:
        with torch.random.fork_rng(), torch.enable_grad(), torch.autocast(place.type, enabled=False), Doubled():
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)


def ropes(config: Any) -> list[dict[str, Any]]:
    """List the parameters of a configuration's rotary embeddings; some models have several."""
    given = vars(config).get("rope_parameters") or {}
    return [given, *(value for value in given.values() if isinstance(value, dict))]


def reach(config: Any) -> int | None:
    """Length beyond which rotary frequencies depend on a call's longest position; None: they never do."""
    own = [
        rope for rope in ropes(config) if "dynamic" in rope.get("rope_type", "") or rope.get("rope_type") == "longrope"
    ]
    known = [rope.get("original_max_position_embeddings") for rope in own]
    return min((length for length in [*known, config.max_position_embeddings] if length), default=None) if own else None
