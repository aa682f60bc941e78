"""Flex attention in slices, against the whole model: its masks and scores as they are written, in float64.

torch refuses its gradient on a CPU, also where it isn't compiled, which has one: here that check is taken away, so that
what a trial does on a device is seen without one.
"""

from unittest import mock

import pytest
import torch
import transformers
from torch.nn.attention import flex_attention
from transformers import masking_utils

from lightning_decentral.pipeline.compute.adapters import find
from lightning_decentral.pipeline.compute.causal import causal_model
from lightning_decentral.pipeline.compute.causal.trial import judged
from tests.pipeline.causal import LLAMA, apart
from tests.pipeline.compute.causal.families import family
from tests.pipeline.compute.causal.stages import staged, whole
from tests.pipeline.compute.causal.test_families import own_loss, packed, padded_left, unpacked

FLEX = "flex_attention"
FAMILIES = ["llama", "qwen3", "gemma2, caps on logits and attention", "gemma3, two rotary embeddings"]
CALLS = {"padded on the right": own_loss, "padded on the left": padded_left, "packed": packed}
# Every call of the first family, every family with two calls: a family builds masks, a call says which.
DEALT = [(name, call) for i, name in enumerate(FAMILIES) for j, call in enumerate(CALLS) if i == 0 or (i + j) % 3]


@pytest.fixture
def differentiable():
    """As where torch has a gradient of flex attention; nothing is compiled."""
    with mock.patch.object(flex_attention, "_validate_device"), torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def masks():
    """What builds masks, by the kind of attention; put back afterwards."""
    with mock.patch.dict(masking_utils.AttentionMaskInterface._global_mapping) as known:
        yield known


@pytest.mark.sampled
@pytest.mark.filterwarnings(
    "ignore:_compile flag:DeprecationWarning", "ignore:flex_attention called without:UserWarning"
)
@pytest.mark.usefixtures("differentiable")
@pytest.mark.parametrize(("name", "call"), DEALT)
def test_loss_and_gradients_are_those_of_the_whole_model(name, call):
    make, ask = family(name, attn_implementation=FLEX), CALLS[call]
    loss, gradients = whole(make, ask)
    found_loss, found = staged(make, ask)
    assert found_loss == pytest.approx(loss, rel=1e-12)
    assert apart(found, gradients) < 1e-10


@pytest.mark.thorough
@pytest.mark.usefixtures("differentiable")
@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_the_attention_of_the_other_kinds(name):
    """Whole as well as in slices: what is compared above attends to what it should."""
    make = family(name, attn_implementation=FLEX)
    for ask, other in ((own_loss, own_loss), (packed, unpacked)):
        loss, gradients = whole(family(name, attn_implementation="eager"), other)
        found_loss, found = staged(make, ask)
        assert found_loss == pytest.approx(loss, rel=1e-10)
        assert apart(found, gradients) < 1e-10


def config(**options):
    return transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 3}, attn_implementation=FLEX, **options)


@pytest.mark.usefixtures("differentiable")
def test_a_mask_that_forgets_where_a_slice_begins_is_refused(masks):
    build = masks[FLEX]
    masks[FLEX] = lambda **options: build(**{**options, "q_offset": 0})
    verdict = judged(transformers.LlamaForCausalLM, config(rms_norm_eps=2e-3))
    assert verdict.anatomy is None
    assert "the loss of a small copy differs by" in verdict.refused[""]


@pytest.mark.usefixtures("differentiable")
def test_packed_documents_that_arent_kept_apart_are_refused(masks):
    masks[FLEX] = masking_utils.flex_attention_mask
    with mock.patch.object(causal_model, "install"):
        verdict = judged(transformers.LlamaForCausalLM, config(rms_norm_eps=3e-3))
    assert verdict.refused.keys() == {"packed sequences"}


@pytest.mark.parametrize(("name", "remedy"), [("llama", "sdpa"), ("gemma2, caps on logits and attention", "eager")])
def test_where_torch_has_no_gradient_of_it_another_kind_is_named(name, remedy):
    words = r"'flex_attention', of which torch has no backward on this device \(cpu\): load it"
    with pytest.raises(ValueError, match=f"{words} with attn_implementation='{remedy}'"):
        find(family(name, attn_implementation=FLEX)())
