"""Small models of many families, with what sets each apart: scales, caps, windows, kinds of layers, experts."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests.pipeline.causal import GPT2, LLAMA
from tests.pipeline.compute.causal.stages import random

SMALL = {**LLAMA, "num_hidden_layers": 3, "pad_token_id": 0}
HEADS = {**SMALL, "head_dim": 16}  # not width / heads
LOCAL, GLOBAL = "sliding_attention", "full_attention"
MIXED = {"layer_types": [LOCAL, GLOBAL, LOCAL], "sliding_window": 4}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
NEOX = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {**GPT2, "n_layer": 3}),
    "llama": ("Llama", SMALL),
    "qwen3": ("Qwen3", HEADS),
    "gemma, scaled embedding": ("Gemma", HEADS),
    "gemma2, caps on logits and attention": ("Gemma2", {**HEADS, **MIXED, "final_logit_softcapping": 5.0}),
    "gemma3, two rotary embeddings": ("Gemma3", {**HEADS, **MIXED, "final_logit_softcapping": 5.0}),
    "phi, parallel residual": ("Phi", SMALL),
    "phi3": ("Phi3", SMALL),
    "olmo2, norms behind": ("Olmo2", SMALL),
    "olmo3": ("Olmo3", {**SMALL, **MIXED}),
    "smollm3, a layer without positions": ("SmolLM3", {**SMALL, "no_rope_layers": [1, 0, 1]}),
    "granite, scaled everywhere": (
        "Granite",
        {**SMALL, "logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    ),
    "starcoder2": ("Starcoder2", {**SMALL, "sliding_window": 4, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "glm4": ("Glm4", HEADS),
    "ministral": ("Ministral", {**HEADS, **MIXED}),
    "stablelm": ("StableLm", SMALL),
    "nemotron": ("Nemotron", SMALL),
    "cohere, scaled behind the head": ("Cohere", {**SMALL, "logit_scale": 0.3}),
    "gpt_neox, parallel residual": ("GPTNeoX", NEOX),
    "opt, learned positions": (
        "OPT",
        {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},  # an embedding of another width
    ),
    "mixtral": ("Mixtral", {**SMALL, **EXPERTS, "num_local_experts": 4}),
    "olmoe": ("Olmoe", {**SMALL, **EXPERTS, "num_experts": 4}),
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def family(name: str, **options: Any) -> Callable[[], nn.Module]:
    """The same model at every call, in float64."""
    kind, given = FAMILIES[name]
    config = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))

    def make() -> nn.Module:
        torch.manual_seed(0)
        ends = {"GPT2": "LMHeadModel"}
        model = getattr(transformers, kind + ends.get(kind, "ForCausalLM"))
        return random(model(config(**given, experts_implementation="eager", **options)))

    return make
