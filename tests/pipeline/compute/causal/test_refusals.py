"""Compiled models, kinds of attention: what is refused by name, and compiled blocks, which are not."""

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule

from lightning_decentral.pipeline.compute.adapters import find
from tests.pipeline.causal import LLAMA, apart, batch
from tests.pipeline.compute.causal.families import family
from tests.pipeline.compute.causal.stages import staged, whole

ids = batch(size=2, padded=False)[0]


def loss(model):
    return model(input_ids=ids, labels=ids).loss


class Training(LightningModule):
    def __init__(self, change):
        super().__init__()
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
        change(self)


def wrapped(module, name):
    setattr(module, name, torch.compile(getattr(module, name), backend="eager"))


BLOCKS = r"block in model.model.layers: block.compile\(\)"


@pytest.mark.parametrize(("change", "words"), [
    (lambda m: wrapped(m, "model"), "LlamaForCausalLM is compiled, .* is answered by other stages: compile its blocks"),
    (lambda m: m.model.compile(), f"LlamaForCausalLM is compiled, but a pipeline's stages .* {BLOCKS}"),
    (lambda m: wrapped(m.model, "model"), f"model is compiled, but a pipeline's stages .* {BLOCKS}"),
    (lambda m: m.model.lm_head.compile(), f"lm_head is compiled, but a pipeline's stages .* {BLOCKS}"),
    (lambda m: m.compile(), "Training is compiled, .* is answered by other stages"),
])  # fmt: skip
def test_what_stages_take_apart_may_not_be_compiled(change, words):
    with pytest.raises(ValueError, match=words):
        find(Training(change))


@pytest.mark.thorough
def test_blocks_may_be_compiled():
    """One in place, one by torch.compile(block)."""
    make = family("gpt2")

    def compiled():
        model = make()
        blocks = model.transformer.h
        blocks[0].compile(backend="eager")
        blocks[1] = torch.compile(blocks[1], backend="eager")
        return model

    wanted_loss, wanted = whole(make, loss)
    found_loss, found = staged(compiled, loss, slices=(6, 7))
    assert found_loss == pytest.approx(wanted_loss, rel=1e-12)
    assert apart({name.replace("_orig_mod.", ""): grad for name, grad in found.items()}, wanted) < 1e-10


def test_other_kinds_of_attention_are_refused_by_name():
    config = transformers.LlamaConfig(**LLAMA)
    model = transformers.LlamaForCausalLM(config)
    model.config._attn_implementation = "paged|sdpa"
    with pytest.raises(ValueError, match=r"attn_implementation='\S+', whose slices can't be .*one of eager, sdpa"):
        find(model)
