"""Which parameters of known models are hidden matrices: named one by one, also of a part of the model."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_decentral.optim import muon_groups


def names(module: nn.Module, **options: Any) -> tuple[list[str], list[str], list[str]]:
    """Names of the three groups; each trained parameter is in exactly one."""
    known = {parameter: name for name, parameter in module.named_parameters()}
    groups = [[known[p] for p in group["params"]] for group in muon_groups(module, **options)]
    assert sorted(name for group in groups for name in group) == sorted(n for p, n in known.items() if p.requires_grad)
    hidden, matrices, vectors = groups
    return hidden, matrices, vectors


def gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=11, n_positions=6, **options))


def wrapped(module: nn.Module) -> nn.Module:
    outer = nn.Module()
    outer.network = module
    return outer


BLOCK = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2(tied: bool) -> None:
    hidden, matrices, vectors = names(wrapped(gpt2(tie_word_embeddings=tied)))
    assert hidden == [f"network.transformer.h.0.{layer}.weight" for layer in BLOCK]
    tables = [f"network.transformer.{name}.weight" for name in ("wte", "wpe")]
    assert matrices == tables + ([] if tied else ["network.lm_head.weight"])
    assert all(name.endswith(("bias", "ln_1.weight", "ln_2.weight", "ln_f.weight")) for name in vectors)


def test_a_head_tied_to_a_table_is_adamws_by_either_name() -> None:
    """Also on the stage that has but one of the two, and where the table's module is no Embedding."""
    model = gpt2()
    table = model.transformer.wte
    model.transformer.wte = nn.Identity()
    assert names(model)[1] == ["transformer.wpe.weight", "lm_head.weight"]
    model.transformer.wte, model.lm_head = table, nn.Identity()
    assert names(model)[1] == ["transformer.wte.weight", "transformer.wpe.weight"]


def test_llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    hidden, matrices, _ = names(LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes)))
    attention = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkvo"]
    assert hidden == attention + [f"model.layers.0.mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")]
    assert matrices == ["model.embed_tokens.weight", "lm_head.weight"]


def test_vit() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes))
    hidden, matrices, _ = names(model)
    linear = [f"{name}.weight" for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    assert hidden == [name for name in linear if name != "classifier.weight"]
    assert len(hidden) == 6
    assert matrices == [
        *(f"vit.embeddings.{name}" for name in ("cls_token", "position_embeddings")),
        "vit.embeddings.patch_embeddings.projection.weight",
        "classifier.weight",
    ]


def test_resnet() -> None:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    hidden, matrices, _ = names(wrapped(ResNetForImageClassification(config)))
    assert matrices == ["network.resnet.embedder.embedder.convolution.weight", "network.classifier.1.weight"]
    assert len(hidden) == 5
    assert all(name.startswith("network.resnet.encoder.stages.") for name in hidden)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList([nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv1d(8, 4, 3)])
        self.token = nn.Parameter(torch.zeros(2, 3, 4))
        self.gate = nn.Linear(8, 1)
        self.wave = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
        self.fc = nn.Linear(8, 5)


def test_what_is_no_matrix_or_reads_pixels() -> None:
    hidden, matrices, _ = names(Convolutions())
    assert hidden == ["blocks.0.weight", "blocks.2.weight"]
    assert matrices == ["token", "wave", "stem.weight", "blocks.1.weight", "gate.weight", "fc.weight"]


def test_exceptions() -> None:
    hidden, matrices, vectors = names(Convolutions(), hidden=["stem.*", "fc.weight"], adamw=["blocks.2*", "fc.*"])
    assert hidden == ["stem.weight", "blocks.0.weight"]
    assert "fc.weight" in matrices, "adamw wins"
    assert "blocks.2.weight" in matrices
    assert "stem.bias" in vectors, "a pattern for a layer doesn't mean its bias"


def test_a_name_behind_a_number_says_nothing() -> None:
    block = nn.Module()
    block.fc, block.embed = nn.Linear(4, 4), nn.Linear(4, 4)
    assert names(nn.ModuleList([block]))[0] == ["0.fc.weight", "0.embed.weight"]


def test_frozen_parameters_are_left_out_and_every_stage_has_three_groups() -> None:
    module = nn.Linear(3, 3).requires_grad_(False)
    assert [group["params"] for group in muon_groups(module)] == [[], [], []]
    assert [set(group) for group in muon_groups(module)] == [
        {"params", "hidden"},
        {"params", "hidden"},
        {"params", "hidden", "weight_decay"},
    ]
