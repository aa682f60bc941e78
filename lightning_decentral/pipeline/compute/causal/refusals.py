"""Refusals at set-up: what would be wrong without a sign once a causal model is cut.

`torch.compile`: blocks may be compiled; what a stage cuts, or answers for, may not.
"""

from typing import Any

import torch
from torch import nn

from lightning_decentral.pipeline.compute.causal.anatomy import Anatomy
from lightning_decentral.pipeline.compute.causal.masks import FLEX, SEPARABLE, trains

REMEDY = "compile its blocks instead: for block in model.{blocks}: block.compile()"


def original(module: nn.Module) -> nn.Module:
    """The module without the wrapper that `torch.compile` puts around it."""
    return module._modules.get("_orig_mod") or module


def compiled(module: nn.Module) -> bool:
    """Return whether `torch.compile(module)` or `module.compile()` compiled it; a LightningModule: by the first."""
    own: Any = module
    return own._compiled_call_impl is not None or original(own) is not own or bool(vars(own).get("_compiler_ctx"))


def refuse_compiled(module: nn.Module, anatomy: Anatomy) -> None:
    """ValueError where the head, or what has the blocks, is compiled."""
    for path, part in module.named_modules():
        name = ".".join(step for step in path.split(".") if step != "_orig_mod")
        if compiled(part) and (name in ("", anatomy.head) or anatomy.blocks.startswith(f"{name}.")):
            raise ValueError(
                f"{name or type(original(part)).__name__} is compiled, but a pipeline's stages each run a part of it: "
                + REMEDY.format(blocks=anatomy.blocks)
            )


def refuse_compiled_around(root: nn.Module, module: nn.Module) -> None:
    """The same for whatever in `root` calls the model."""
    for part in root.modules():
        if part is not module and compiled(part) and any(inner is module for inner in part.modules()):
            raise ValueError(
                f"{type(original(part)).__name__} is compiled, but under a pipeline its call of "
                f"{type(module).__name__} is answered by other stages: " + REMEDY.format(blocks="model.layers")
            )


def refuse_attention(module: nn.Module, device: torch.device) -> None:
    """ValueError for a kind of attention whose slices can't be compared with the whole, or trained on this device."""
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
    """ValueError for what would be wrong without a sign once a sequence is cut into slices."""
    name = type(module).__name__
    config: Any = vars(module)["config"]
    if vars(config).get("is_causal") is False:
        raise ValueError(
            f"{name} has config.is_causal=False, so a token needs those after it and a sequence can't be cut: "
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
