"""Families of causal models in slices against the whole model of `transformers`: loss and gradients to rounding."""

import pytest
import torch

from lightning_decentral.pipeline.compute.causal.documents import documents_of
from tests.pipeline.causal import apart, batch
from tests.pipeline.compute.causal.families import FAMILIES, family
from tests.pipeline.compute.causal.stages import staged, whole

ids, right, labels = batch(size=2)
left = right.flip(1)
EXACT = {"rel": 1e-12, "abs": 0}


def own_loss(model):
    """The model's own, with padding on the right."""
    return model(input_ids=ids, attention_mask=right, labels=labels).loss


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_the_whole_model(name):
    make = family(name)
    loss, gradients = whole(make, own_loss)
    found_loss, found = staged(make, own_loss)
    assert found_loss == pytest.approx(loss, **EXACT)
    assert apart(found, gradients) < 1e-10


@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
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
        rows += [torch.cat([model(input_ids=ids[row : row + 1, a:b]).logits for a, b in zip(ends, ends[1:])], dim=1)]
    logits = torch.cat(rows)
    return (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)).sum()


PACKED = ["gpt2", "qwen3", "gemma3, two rotary embeddings", "ministral", "gpt_neox, parallel residual"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", PACKED)
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
    with pytest.raises(ValueError, match=r"can't be cut into slices with padding on the left: the loss of a small copy"):
        staged(family("qwen3", attn_implementation="eager"), padded_left)
