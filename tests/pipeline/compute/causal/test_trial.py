"""What the trial admits and what it refuses: faults that are put into a model, and the table of the docs."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_decentral.pipeline.compute.causal.small_copy import shrunk
from lightning_decentral.pipeline.compute.causal.trial import adapted, judged
from lightning_decentral.pipeline.compute.model import StagePlace
from lightning_decentral.pipeline.compute.stage import Keep, Stage
from pipeline.causal_models import cells, shortened, tried
from tests.pipeline.causal import LLAMA, batch

CONFIG = transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 3})


class Lookahead(LlamaDecoderLayer):
    """Adds the mean of all tokens."""

    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs) + hidden_states.mean(dim=1, keepdim=True)


class Forgetful(LlamaDecoderLayer):
    """Stops the gradient of what it says to later tokens, and of nothing else."""

    def forward(self, hidden_states, past_key_values=None, **kwargs):
        if past_key_values is not None and past_key_values.get_seq_length():
            hidden_states = hidden_states.detach()
        return super().forward(hidden_states, past_key_values=past_key_values, **kwargs)


class LookaheadForCausalLM(transformers.LlamaForCausalLM):
    block = Lookahead

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1] = self.block(config, 1)


class ForgetfulForCausalLM(LookaheadForCausalLM):
    block = Forgetful


class TwiceModel(transformers.LlamaModel):
    def forward(self, *args, **kwargs):
        super().forward(*args, **kwargs)
        return super().forward(*args, **kwargs)


class TwiceForCausalLM(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = TwiceModel(config)


class OtherwiseForCausalLM(transformers.LlamaForCausalLM):
    def __init__(self, config, width):
        super().__init__(config)


@pytest.mark.parametrize(("kind", "words"), [
    (LookaheadForCausalLM, r"can't be cut into slices: the loss of a small copy differs by \d.* of itself; return a"),
    (ForgetfulForCausalLM, r"the gradient of model\.\S+ in a small copy differs by \d.* of itself"),
    (TwiceForCausalLM, r"it doesn't call the blocks of model.layers once each and in order"),
    (OtherwiseForCausalLM, r"a small copy of it says TypeError: .*missing 1 required .*'width'"),
])  # fmt: skip
def test_a_model_that_slices_would_change_is_refused(kind, words):
    model = kind(CONFIG, *([8] if kind is OtherwiseForCausalLM else []))
    with pytest.raises(ValueError, match=f"{kind.__name__} .*{words}"):
        adapted(model)


def test_a_block_that_was_changed_later_is_noticed():
    """The trial is of the class: what keeps nothing for later slices is seen at the first one."""
    model = transformers.LlamaForCausalLM(CONFIG)

    class Own(nn.Module):
        def forward(self, hidden_states, **_):
            return hidden_states.cumsum(dim=1), None

    model.model.layers[1].self_attn = Own()
    found, ids = adapted(model), batch(padded=False)[0]
    stage = Stage(found, StagePlace(0, 3, True, True), [found.read((), {"input_ids": ids})], (9, 4), Keep())
    with pytest.raises(ValueError, match=r"block 1 of LlamaForCausalLM gave no keys and values .*slicing=Uniform\(1\)"):
        stage.forward(0, 0, None)


def test_a_trial_is_made_once_and_leaves_nothing_behind():
    config = transformers.LlamaConfig(**LLAMA, rms_norm_eps=1e-3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.no_grad():
        verdict = judged(transformers.LlamaForCausalLM, config)
    assert verdict.refused == {}
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    again = transformers.LlamaConfig(**LLAMA, rms_norm_eps=1e-3)
    assert judged(transformers.LlamaForCausalLM, again) is verdict


def test_a_copy_has_every_kind_of_layer():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = transformers.Gemma3TextConfig(num_hidden_layers=12, layer_types=kinds * 2, sliding_window=4096)
    small = shrunk(config)
    assert small.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert (small.sliding_window, small.hidden_size, small.query_pre_attn_scalar) == (5, 32, 256)


@pytest.mark.parametrize("heads", [3, 9])
def test_widths_of_a_copy_fit_each_other(heads):
    config = transformers.LlamaConfig(
        hidden_size=heads * 64, num_attention_heads=heads, num_key_value_heads=max(1, heads // 3), num_hidden_layers=2
    )
    assert judged(transformers.LlamaForCausalLM, config).refused == {}


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["gemma2", "falcon", "mixtral", "bert"])
def test_the_table_of_the_docs_is_true(name):
    page = (Path(__file__).parents[4] / "docs" / "causal-models.md").read_text()
    kind, attention, verdict = tried(name)
    row = re.search(rf"^\| (.*) \| [^|]*`{kind}`[^|]* \|$", page, re.MULTILINE).group(1)
    if verdict.anatomy is None:
        assert row == shortened(verdict.refused[""])
    else:
        assert row.split(" | ") == [attention, *cells(verdict, bool(verdict.anatomy.routers))]
