"""Checks of causal models: changes that would give silent errors once the model is cut, and calls that can't be served.

`torch.compile`: blocks may be compiled; modules that a stage cuts or answers for may not."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.pipeline.compute.causal.anatomy import Anatomy
from lightning_decentral.pipeline.compute.causal.masks import FLEX, SEPARABLE, trains

READ = {"input_ids", "attention_mask", "position_ids", "labels", "use_cache", "return_dict"}
OF_THE_ANSWER = {"labels", "num_items_in_batch", "shift_labels", "ignore_index", "output_router_logits"}
TOKENS = ("input_ids", "attention_mask", "position_ids")
GENERATES = """{} was called with keys and values of an earlier call, as generate() does, which no stage keeps: \
generate after the fit, when the module is whole, or give all tokens each time"""
REMEDY = "compile its blocks instead: for block in model.{blocks}: block.compile()"


def original(module: nn.Module) -> nn.Module:
    """Return the module without the wrapper that `torch.compile` puts around it."""
    return module._modules.get("_orig_mod") or module


def compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile(module)` or `module.compile()` compiled it; a LightningModule: by the first."""
    own: Any = module
    return own._compiled_call_impl is not None or original(own) is not own or bool(vars(own).get("_compiler_ctx"))


def refuse_compiled(module: nn.Module, anatomy: Anatomy) -> None:
    """Raise ValueError if the head, or a module that contains the blocks, is compiled."""
    for path, part in module.named_modules():
        name = ".".join(step for step in path.split(".") if step != "_orig_mod")
        if compiled(part) and (name in ("", anatomy.head) or anatomy.blocks.startswith(f"{name}.")):
            raise ValueError(
                f"{name or type(original(part)).__name__} is compiled, but a pipeline's stages each run a part of it: "
                + REMEDY.format(blocks=anatomy.blocks)
            )


def refuse_compiled_around(root: nn.Module, module: nn.Module) -> None:
    """Raise ValueError if any compiled module in `root` calls the model."""
    for part in root.modules():
        if part is not module and compiled(part) and any(inner is module for inner in part.modules()):
            raise ValueError(
                f"{type(original(part)).__name__} is compiled, but under a pipeline its call of "
                f"{type(module).__name__} is answered by other stages: " + REMEDY.format(blocks="model.layers")
            )


def refuse_attention(module: nn.Module, device: torch.device) -> None:
    """Raise ValueError for an attention whose slices can't be checked, or that can't be trained on this device."""
    name, kind = type(module).__name__, vars(module)["config"]._attn_implementation
    if kind not in SEPARABLE:
        raise ValueError(
            f"{name} has attn_implementation={kind!r}, whose slices can't be compared with the whole: load it with one "
            f"of {', '.join(SEPARABLE)}"
        )
    if kind == FLEX and not trains(device):
        own: Any = type(module)
        raise ValueError(
            f"{name} has attn_implementation={kind!r}, of which torch has no backward on this device ({device.type}): "
            f"load it with attn_implementation={'sdpa' if own._supports_sdpa else 'eager'!r}"
        )


def refuse_unsliceable(module: nn.Module) -> None:
    """Raise ValueError for settings and modules that give silent errors once a sequence is cut into slices."""
    name = type(module).__name__
    config: Any = vars(module)["config"]
    if vars(config).get("is_causal") is False:
        raise ValueError(
            f"{name} has config.is_causal=False, so a token needs later tokens and a sequence can't be cut: "
            "set is_causal=True, or return a Chain from pipeline_stages() of the LightningModule and use microbatches"
        )
    for path, part in module.named_modules():
        if vars(part).get("gradient_checkpointing"):
            raise ValueError(
                f"{path or name} has gradient checkpointing on, which drops the keys and values of earlier slices: "
                "call gradient_checkpointing_disable() and use TokenPipelineStrategy(activations=Recompute())"
            )
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            raise ValueError(
                f"{path} is {type(part).__name__}, whose statistics mix the tokens of a sequence: "
                "use LayerNorm or RMSNorm"
            )


def refuse_foreign(name: str, given: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of a model's call that a pipeline doesn't know."""
    if given.get("past_key_values") is not None:
        raise ValueError(GENERATES.format(name))
    asked = {key: value for key, value in given.items() if value is not None and value is not False}
    if asked.get("logits_to_keep") == 0:  # all of them
        del asked["logits_to_keep"]
    wrong = [f"with {key}" for key in sorted(set(asked) - READ - OF_THE_ANSWER)]
    if "input_ids" not in asked or given.get("return_dict") is False:
        wrong.append("without input_ids, or with return_dict=False")
    shapes = {key: tuple(asked[key].shape) for key in TOKENS if isinstance(asked.get(key), Tensor)}
    wrong += [f"with {key} of shape {shape}" for key, shape in shapes.items() if len(shape) != 2]
    wrong += [f"with {key} of type {type(asked[key]).__name__}" for key in TOKENS if key in asked.keys() - shapes]
    if wrong:
        raise ValueError(
            f"{name} was called {wrong[0]}, which a token pipeline can't serve: call it with "
            "input_ids and, as needed, attention_mask, position_ids and labels, all [batch, length]"
        )
