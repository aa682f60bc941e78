"""What a short slice of a token pipeline asks a device for: launches, with blocks as they are and compiled.

    python benchmarks/pipeline.py slice_launches

A step of one stage in slices, small models of `transformers`, on the CPU, whose operations are those of a device. A
launch is an operation that computes (views and allocations launch nothing), or a kernel that torch.compile made of
several; forward and backward together, sums of gradients included, for each slice and block. And how far the gradients
of compiled blocks are from the others'. Needs a C++ compiler. Writes results/slice-launches-<hardware>.json.
"""

import json
import os
import shlex
import sys
from collections import Counter
from typing import Any

from common.paths import RESULTS

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from common.hardware import description, slug
from lightning_decentral.pipeline import Keep, OneForwardOneBackward
from lightning_decentral.pipeline.compute.causal.trial import adapted
from lightning_decentral.pipeline.compute.model import Call, StagePlace
from lightning_decentral.pipeline.compute.stage import Stage
from lightning_decentral.pipeline.wire.executor import Channel, Executor
from pipeline.slice_account import token_mean

BLOCKS, SLICES, TOKENS = 4, 8, 64
COMPUTE = (
    *("mm", "addmm", "bmm", "add", "add_", "sub", "mul", "mul_", "div", "div_", "neg", "pow", "rsqrt", "tanh", "silu"),
    *("cos", "sin", "where", "le", "cat", "copy_", "zero_", "fill_", "sum", "mean", "index_select", "embedding"),
    *("tanh_backward", "silu_backward", "native_layer_norm", "native_layer_norm_backward", "scalar_tensor"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
    *(
        "_log_softmax",
        "_log_softmax_backward_data",
        "nll_loss_forward",
        "nll_loss_backward",
        "embedding_dense_backward",
    ),
)


def llama() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=BLOCKS, use_cache=False, **sizes))


def gpt2() -> nn.Module:
    without = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=64, n_layer=BLOCKS, n_head=4, **without))


def step(model: nn.Module, ids: Tensor) -> None:
    parts = adapted(model)
    stage = Stage(parts, StagePlace(0, BLOCKS, True, True), [Call(ids)], [TOKENS // SLICES] * SLICES, Keep())
    actions = OneForwardOneBackward().actions(1, 1, SLICES)[0]
    Executor(stage, Channel({}, {}, torch.device("cpu")), lambda _, logits: token_mean(logits, ids)).run(actions)


def launched(model: nn.Module, ids: Tensor) -> Counter[str]:
    """Count the launches of one step, by operation; kernels that were compiled are "fused"."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step(model, ids)
    names = [event.name for event in found.events()]
    counted = Counter(name for name in names if name.removeprefix("aten::") in COMPUTE)
    counted["fused"] = sum("cpp_fused" in name for name in names)
    return counted


def measure(make: Any, blocks: str) -> dict[str, Any]:
    ids = torch.randint(0, 256, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    found, gradients = {}, {}
    for name in ("as they are", "compiled"):
        torch.manual_seed(0)
        model = make()
        for block in model.get_submodule(blocks) if name == "compiled" else ():
            block.compile()
        for _ in range(3):
            model.zero_grad()
            step(model, ids)
        gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
        counted = launched(model, ids)
        each = {kind: round(number / SLICES / BLOCKS, 1) for kind, number in counted.most_common(12)}
        found[name] = {"launches": round(counted.total() / SLICES / BLOCKS, 1), **each}
        print(make.__name__, name, found[name], flush=True)
    one, other = gradients.values()
    return {**found, "gradients differ by": float((one - other).norm() / one.norm())}


def main() -> None:
    torch.set_num_threads(1)
    torch._inductor.config.cpp.enable_kernel_profile = True  # else the profiler doesn't see what was compiled
    rows = {make.__name__: measure(make, blocks) for make, blocks in ((gpt2, "transformer.h"), (llama, "model.layers"))}
    command = shlex.join(["python", "benchmarks/pipeline.py", "slice_launches", *sys.argv[1:]])
    result = {"command": command, "hardware": description(), "rows": rows}
    path = RESULTS / f"slice-launches-{slug()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
