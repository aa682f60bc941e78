"""Slices whose masks are causal biases are the whole model, too; where a bias wouldn't say the same there is a mask."""

from typing import Any

import pytest
import torch
import transformers
from torch.nn.attention.bias import CausalBias
from transformers.masking_utils import causal_mask_function, sdpa_mask

from lightning_decentral.pipeline.compute.causal import causal_model, trial
from lightning_decentral.pipeline.compute.causal.masks import Slice, lower_right
from tests.pipeline.causal import LLAMA, apart
from tests.pipeline.compute.causal.families import FAMILIES, family
from tests.pipeline.compute.causal.stages import staged, whole
from tests.pipeline.compute.causal.test_families import EXACT, own_loss, packed

CUDA = torch.device("cuda")
LIMITED = {"gemma2, caps on logits and attention", "starcoder2"}
"""Which have no mask of torch's attention, or layers that see four tokens only."""


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(queries, keys) of each attention that was given a bias; with masks that are biases wherever they can be."""
    found: list[tuple[int, int]] = []
    dispatch = CausalBias._dispatch

    def seen(query: Any, key: Any, value: Any, attn_mask: Any, *args: Any, **options: Any) -> Any:
        found.append((query.shape[-2], key.shape[-2]))
        return dispatch(query, key, value, attn_mask, *args, **options)

    monkeypatch.setattr(CausalBias, "_dispatch", staticmethod(seen))
    monkeypatch.setattr(causal_model, "Slice", lambda documents, aligned: Slice(documents, True))
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("name", FAMILIES)
def test_with_biases_it_is_the_whole_model(name: str, dispatched: list[tuple[int, int]]) -> None:
    make = family(name)
    plain = lambda model: model(input_ids=torch.arange(3, 16)[None], labels=torch.arange(3, 16)[None]).loss  # noqa: E731
    loss, gradients = whole(make, plain)
    assert not dispatched
    found_loss, found = staged(make, plain)
    assert found_loss == pytest.approx(loss, **EXACT)
    assert apart(found, gradients) < 1e-10
    # Of slices of 5, 1 and 7: the first is a square, and one token sees all that is there. (5, 12): of the trial.
    assert ((7, 13) in dispatched) is (name not in LIMITED)
    assert set(dispatched) <= {(7, 13), (5, 12)}


@pytest.mark.parametrize("ask", [own_loss, packed], ids=["padding", "packing"])
def test_what_a_bias_does_not_say_is_a_mask(ask: Any, dispatched: list[tuple[int, int]]) -> None:
    loss, gradients = whole(family("llama"), ask)
    found_loss, found = staged(family("llama"), ask)
    assert found_loss == pytest.approx(loss, **EXACT)
    assert apart(found, gradients) < 1e-10
    assert set(dispatched) <= {(5, 12)}  # of the trial


PLAIN = {"q_length": 7, "kv_length": 13, "q_offset": 6, "kv_offset": 0, "mask_function": causal_mask_function}


@pytest.mark.parametrize("other", [
    {"q_length": 13, "q_offset": 0},
    {"q_length": 1, "q_offset": 12},
    {"q_offset": 3},
    {"kv_offset": 2},
    {"mask_function": lambda *_: True},
    {"attention_mask": torch.ones(1, 13)},
    {"local_size": 5},
    {"allow_is_causal_skip": False},
    {"q_offset": torch.tensor(6)},
])  # fmt: skip
def test_only_the_rest_of_a_causal_square_is_one(other: dict[str, Any]) -> None:
    assert lower_right({**PLAIN, **other}) is None


def test_it_says_what_the_mask_says() -> None:
    bias = lower_right(PLAIN)
    assert bias is not None
    assert torch.equal(bias._materialize(), sdpa_mask(1, **PLAIN)[0, 0])


class LookingForCausalLM(transformers.LlamaForCausalLM):
    """Its layers look at their mask."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.register_forward_pre_hook(_look, with_kwargs=True)


def _look(module: Any, args: Any, options: dict[str, Any]) -> None:
    mask = options["attention_mask"]
    assert mask is None or mask.ndim == 4


def test_on_a_device_biases_are_taken_where_a_small_copy_is_the_same_with_them() -> None:
    """The copy itself is on the host, where torch makes a mask of a bias."""
    config = transformers.LlamaConfig(**LLAMA, attn_implementation="sdpa")
    assert trial.judged(transformers.LlamaForCausalLM, config, CUDA).aligned
    assert not trial.judged(transformers.LlamaForCausalLM, config).aligned
    eager = transformers.LlamaConfig(**LLAMA, attn_implementation="eager")
    assert not trial.judged(transformers.LlamaForCausalLM, eager, CUDA).aligned
    looking = trial.judged(LookingForCausalLM, config, CUDA)
    assert looking.anatomy is not None
    assert not looking.aligned
