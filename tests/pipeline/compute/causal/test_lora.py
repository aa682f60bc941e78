"""LoRA by `peft`: adapters in the blocks, a head that is trained whole, everything else frozen."""

import peft
import pytest
import torch

from tests.pipeline.causal import apart, batch
from tests.pipeline.compute.causal.families import family
from tests.pipeline.compute.causal.stages import random, staged, whole

ids, mask, labels = batch(size=2)


def adapted(**options):
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=3, lora_alpha=8, task_type="CAUSAL_LM", **options)
    return random(peft.get_peft_model(family("qwen3")(), lora))


@pytest.mark.sampled
@pytest.mark.parametrize("options", [
    {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    {"target_modules": "all-linear", "modules_to_save": ["lm_head"]},
    {"target_modules": ["k_proj", "embed_tokens"], "use_dora": True},
])  # fmt: skip
def test_adapters_get_the_gradients_of_the_whole_model(options):
    loss = lambda model: model(input_ids=ids, attention_mask=mask, labels=labels).loss  # noqa: E731
    make = lambda: adapted(**options)  # noqa: E731
    wanted_loss, wanted = whole(make, loss)
    found_loss, found = staged(make, loss)
    assert found_loss == pytest.approx(wanted_loss, rel=1e-12)
    assert all("lora" in name or "modules_to_save" in name for name in wanted)
    assert apart(found, wanted) < 1e-10


def test_prompts_that_are_put_in_front_are_refused():
    prompts = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    make = lambda: peft.get_peft_model(family("qwen3")(), prompts).double()  # noqa: E731
    with pytest.raises(ValueError, match="was called with inputs_embeds, which a token pipeline can't serve"):
        staged(make, lambda model: model(input_ids=ids).logits.sum())
