"""Small causal models of `transformers`, and steps of them sliced over threads or whole in one process."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from lightning_decentral.pipeline import Activations, Boundary, Even, Keep, OneForwardOneBackward, Schedule
from lightning_decentral.pipeline.compute.causal.trial import adapted
from lightning_decentral.pipeline.compute.loss import TargetCount, total
from lightning_decentral.pipeline.compute.model import Call, StagePlace
from lightning_decentral.pipeline.compute.stage import Stage
from lightning_decentral.pipeline.compute.weight_grad import SplitWeights
from lightning_decentral.pipeline.plan.schedule import Kind
from lightning_decentral.pipeline.wire.executor import Channel, Edge, Edges, Executor
from lightning_decentral.shared.wire.transport import GlooTransport, Transport
from tests.pipeline.nccl_order import Posting, ahead
from tests.world import world

VOCABULARY, WIDTH, BLOCKS = 61, 32, 4
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": BLOCKS,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2, tied": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "gpt2, scaled by layer": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False)
    ),
    "gpt2, eager": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, attn_implementation="eager")),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "llama, tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "qwen2, sliding from block 2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**LLAMA, use_sliding_window=True, sliding_window=5, max_window_layers=2)
    ),
    "mistral, sliding": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**LLAMA, sliding_window=7)
    ),
}  # fmt: skip
for _name in ("GPT2LMHeadModel", "LlamaForCausalLM"):
    getattr(transformers, _name)  # loads it now, and not in every forked process anew


def built(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same weights at every call."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for part in list(model.modules()):
        for child, found in part.named_children():
            if type(found).__name__.endswith("RMSNorm"):  # that of `transformers` computes in float32 whatever comes in
                setattr(part, child, nn.RMSNorm(WIDTH, eps=found.variance_epsilon))
    return model.to(dtype).train()


def batch(size: int = 3, length: int = 13, padded: bool = True) -> tuple[Tensor, Tensor | None, Tensor]:
    """(input_ids, attention_mask, labels), padded on the right by another number of tokens in each sequence."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (size, length), generator=generator)
    if not padded:
        return ids, None, ids
    mask = torch.ones_like(ids)
    for row in range(size):
        mask[row, length - 2 * row :] = 0
    return ids, mask, ids.masked_fill(mask == 0, -100)


Gradients = dict[str, Tensor]
Shares = tuple[Tensor, Tensor]
"""Of a micro-batch: (its weight, its loss)."""


def token_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the next token; `transformers` computes its own in float32, whatever the model is in."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def whole(name: str, dtype: torch.dtype, *inputs: Any) -> tuple[float, Gradients]:
    """Loss and gradients of the model as `transformers` runs it, in one process."""
    ids, mask, labels = inputs
    model = built(name, dtype)
    loss = token_mean(model(input_ids=ids, attention_mask=mask).logits, labels)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


def waiting(weights: SplitWeights) -> set[tuple[int, int]]:
    """Chunks whose second half is still to come."""
    return {chunk for chunk, halves in weights._halves.items() if halves}  # without any: not yet back at all


def sliced(
    name: str,
    dtype: torch.dtype,
    *inputs: Any,
    num_stages: int,
    slices: Sequence[int],
    microbatches: int = 1,
    schedule: Schedule | None = None,
    activations: Activations | None = None,
    boundary: Boundary | None = None,
    watch: Callable[[Executor, Stage], None] = lambda executor, stage: None,
    stages: Callable[[int, Any], list[Any]] | None = None,
    posting: Posting = ahead,
) -> tuple[float, Gradients]:
    """The same through the pipeline, each stage a thread; gradients of tied parameters summed over their stages.

    Args:
        stages: (number, worker) -> what `worker(rank, edges, device)` returns at each of them; by default on hosts.
        posting: when receives are posted.
    """
    original = built(name, dtype)
    adapted(original)  # once, before there are threads
    counts = Even().counts([None] * BLOCKS, None, None, num_stages)  # type: ignore[list-item,arg-type]
    ends = [sum(counts[: r + 1]) for r in range(num_stages)]
    steps = (schedule or OneForwardOneBackward()).actions(num_stages, microbatches, len(slices))

    def worker(rank: int, edges: Edges | None, device: torch.device) -> tuple[list[Shares], Gradients]:
        parts = [None if x is None else x.to(device).tensor_split(microbatches) for x in inputs]
        place = StagePlace(ends[rank] - counts[rank], ends[rank], rank == 0, rank == num_stages - 1)
        model = adapted(copy.deepcopy(original).to(device))
        calls = [Call(parts[0][m], None if parts[1] is None else parts[1][m]) for m in range(microbatches)]
        model.keep(place)
        weights = SplitWeights() if schedule and schedule.splits else None
        stage = Stage(model, place, calls, slices, activations or Keep(), weights)
        shapes = {
            (m, s, r): model.shape(call, *bounds)
            for m, call in enumerate(calls) for s, bounds in enumerate(stage.bounds) for r in range(num_stages)
        }  # fmt: skip
        channel = Channel(edges or {}, shapes, device, boundary)
        shares: list[Shares] = []

        def close(microbatch: int, logits: Tensor) -> Tensor:
            with TargetCount() as count:
                loss = token_mean(model.answer(calls[microbatch], logits).logits, parts[2][microbatch])
            weight = count.targets(loss).double() / inputs[0].numel()
            shares.append((weight, loss.detach()))
            return loss * weight

        executor = Executor(stage, channel, close)
        executor.run(steps[rank], posting(steps, len(slices))[rank])
        watch(executor, stage)
        return shares, {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}

    results = (stages or _on_hosts)(num_stages, worker)
    loss, factor = map(float, total(*map(torch.stack, zip(*results[-1][0], strict=True))))
    gradients: Gradients = {}
    names = {"lm_head.weight": next(n for n, _ in original.named_parameters())} if _tied(original) else {}
    for _, found in results:
        for n, grad in found.items():
            n = names.get(n, n)
            gradients[n] = gradients[n] + factor * grad if n in gradients else factor * grad
    return loss, gradients


def _on_hosts(number: int, worker: Callable[[int, Edges | None, torch.device], Any]) -> list[Any]:
    host = torch.device("cpu")
    if number == 1:
        return [worker(0, None, host)]
    return world(number, lambda group: worker(group.rank(), edges(GlooTransport(group)), host), seconds=60)


def edges(over: Transport) -> Edges:
    """All over one gloo transport whose ranks are the stages."""
    return {(kind, stage): Edge(over, stage) for kind in Kind for stage in range(over.size)}


def _tied(model: nn.Module) -> bool:
    return model.get_submodule("lm_head").weight is model.get_input_embeddings().weight


def apart(found: Gradients, wanted: Gradients) -> float:
    """max over parameters of ||found - wanted|| / ||wanted||."""
    assert found.keys() == wanted.keys()
    floor = max(float(g.norm()) for g in wanted.values()) * 1e-6  # key biases have a gradient of zero but for rounding
    return max(float((found[n] - g).norm()) / max(float(g.norm()), floor) for n, g in wanted.items())
