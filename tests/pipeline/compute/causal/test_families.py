"""Families of causal models in slices against the whole model of `transformers`: loss and gradients to rounding."""

from itertools import pairwise

import pytest
import torch
import transformers

from lightning_decentral.pipeline.compute.causal.masks import documents_of
from tests.pipeline.causal import apart, batch
from tests.pipeline.compute.causal.families import FAMILIES, SMALL, family
from tests.pipeline.compute.causal.stages import random, staged, whole

ids, right, labels = batch(size=2)
left = right.flip(1)
EXACT = {"rel": 1e-12, "abs": 0}


def own_loss(model):
    """The model's own, with padding on the right."""
    return model(input_ids=ids, attention_mask=right, labels=labels).loss


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_the_whole_model(name):
    make = family(name)
    loss, gradients = whole(make, own_loss)
    found_loss, found = staged(make, own_loss)
    assert found_loss == pytest.approx(loss, **EXACT)
    assert apart(found, gradients) < 1e-10


@pytest.mark.parametrize("name", ["mixtral"])
def test_the_loss_of_routers_is_part_of_it(name):
    """Over the experts of all stages and slices: without them it's another loss."""
    without = lambda model: model(input_ids=ids, labels=ids, output_router_logits=False).loss  # noqa: E731
    assert abs(whole(family(name), own_loss)[0] - whole(family(name), without)[0]) > 1e-2
    found_loss, found = staged(family(name), without)
    loss, gradients = whole(family(name), without)
    assert found_loss == pytest.approx(loss, **EXACT)
    assert apart(found, gradients) < 1e-10


# ---- packed sequences -----------------------------------------------------------------------------------------------

LENGTHS = ((4, 1, 8), (13,))
positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def packed(model, **options):
    given = {"position_ids": positions, "use_cache": False, **options}
    logits = model(input_ids=ids, **given).logits
    return (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)).sum()


def unpacked(model):
    """The documents by themselves, with the weights that `packed` gives to their logits."""
    rows = []
    for row, lengths in enumerate(LENGTHS):
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        rows += [torch.cat([model(input_ids=ids[row : row + 1, a:b]).logits for a, b in pairwise(ends)], dim=1)]
    logits = torch.cat(rows)
    return (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)).sum()


PACKED = ["gpt2", "qwen3", "gemma3, two rotary embeddings", "ministral", "gpt_neox, parallel residual"]


@pytest.mark.parametrize(("name", "attention"), [*((name, "sdpa") for name in PACKED), ("qwen3", "eager")])
def test_packed_documents_do_not_see_each_other(name, attention):
    make = family(name, attn_implementation=attention)
    loss, gradients = whole(make, unpacked)
    assert whole(make, packed)[0] == pytest.approx(loss, rel=1e-10)
    found_loss, found = staged(make, packed)
    assert found_loss == pytest.approx(loss, rel=1e-10)
    assert apart(found, gradients) < 1e-10


def test_a_model_that_keeps_keys_and_values_does_not_look_for_documents():
    """As `transformers` does it: a step that leaves use_cache at its default trains across documents."""
    crossing = lambda model: packed(model, use_cache=None)  # noqa: E731
    loss, gradients = whole(family("qwen3"), crossing)
    assert abs(loss - whole(family("qwen3"), packed)[0]) > 1e-2
    found_loss, found = staged(family("qwen3"), crossing)
    assert found_loss == pytest.approx(loss, **EXACT)
    assert apart(found, gradients) < 1e-10


def test_documents_begin_where_positions_do_not_follow():
    assert documents_of(positions).tolist() == [[0] * 4 + [1] + [2] * 8, [0] * 13]
    assert documents_of(positions[1:]) is None


def test_packing_is_refused_where_a_class_masks_otherwise():
    with pytest.raises(ValueError, match=r"OPTForCausalLM can't be cut into slices with packed sequences: the loss of"):
        staged(family("opt, learned positions"), packed)


# ---- padding on the left --------------------------------------------------------------------------------------------


def padded_left(model):
    return model(input_ids=ids, attention_mask=left, labels=ids.masked_fill(left == 0, -100)).loss


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gemma3, two rotary embeddings", "opt, learned positions"])
def test_padding_on_the_left(name):
    make = family(name)
    loss, gradients = whole(make, padded_left)
    found_loss, found = staged(make, padded_left)
    assert found_loss == pytest.approx(loss, **EXACT)
    assert apart(found, gradients) < 1e-10


def test_padding_on_the_left_is_refused_in_eager_attention():
    """There a token that has nothing to attend to attends to all, later ones too, and predicts the first token."""
    with pytest.raises(ValueError, match=r"can't be cut into slices with padding on the left: the loss of a"):
        staged(family("qwen3", attn_implementation="eager"), padded_left)


# ---- positions that depend on the length ----------------------------------------------------------------------------


LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0, 5.0, 6.0, 7.0]}
ROPES = {
    "longrope": (transformers.Phi3ForCausalLM, {"max_position_embeddings": 64}, LONG),
    "dynamic": (
        transformers.LlamaForCausalLM,
        {"max_position_embeddings": 16},
        {"rope_type": "dynamic", "factor": 2.0},
    ),
}


def rotated(rope, length):
    """A model whose frequencies change beyond 16 positions, and the loss of so many."""
    kind, reach, parameters = ROPES[rope]
    original = {"original_max_position_embeddings": 16} if rope == "longrope" else {}
    given = {**SMALL, **reach, **original, "rope_parameters": {"rope_theta": 1e4, **parameters, **original}}
    tokens = torch.arange(2 * length).view(2, length) % 50 + 3

    def make():
        torch.manual_seed(0)
        return random(kind(kind.config_class(**given)))

    return make, lambda model: model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_that_depend_on_the_length(rope):
    make, loss = rotated(rope, 16)
    wanted_loss, wanted = whole(make, loss)
    found_loss, found = staged(make, loss, slices=(9, 7))
    assert found_loss == pytest.approx(wanted_loss, **EXACT)
    assert apart(found, wanted) < 1e-10
    make, loss = rotated(rope, 17)
    with pytest.raises(ValueError, match=r"with the length beyond 16 tokens.*this one has 17: use shorter"):
        staged(make, loss, slices=(9, 8))
