"""Adapters of transformers' causal language models (GPT-2, Llama, Qwen2, Mistral): taken apart without a change."""

import inspect
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.pipeline.compute.kv_cache import KVCache
from lightning_decentral.pipeline.compute.model import Call, Pipelined, Shape, StagePlace
from lightning_decentral.pipeline.plan.partition import weighed
from lightning_decentral.shared.compute.block_cost import parameter_bytes
from lightning_decentral.shared.plan.profile import BlockCost


class Silent(nn.Module):
    """0, whatever is asked: stands for an embedding that another stage has already added."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros((), dtype=self._dtype, device=positions.device)


@dataclass(frozen=True)
class Anatomy:
    """Where a causal model of `transformers` keeps its parts.

    Args:
        inner: the attribute that holds embedding, blocks and norm; the head is `lm_head`.
        tokens: the embedding of tokens.
        added: embeddings that are added to it; on later stages they must be silent.
        dropout: after the embedding, or None.
    """

    inner: str
    tokens: str
    blocks: str
    norm: str
    added: str | None = None
    dropout: str | None = None


LLAMA = Anatomy(inner="model", tokens="embed_tokens", blocks="layers", norm="norm")
GPT2 = Anatomy(inner="transformer", tokens="wte", blocks="h", norm="ln_f", added="wpe", dropout="drop")
ANATOMIES = {
    "GPT2LMHeadModel": GPT2,
    "LlamaForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
}
"""By the name of the class, so that `transformers` need not be installed."""

READ = {"input_ids", "attention_mask", "position_ids", "labels"}
IRRELEVANT = {"use_cache", "return_dict"}
OF_THE_LOSS = {"num_items_in_batch", "shift_labels", "ignore_index"}


class CausalModel(Pipelined):
    """A causal language model of `transformers`: GPT-2, Llama, Qwen2, Mistral, and what inherits their names.

    Args:
        module: the `...ForCausalLM` itself.
    """

    sliceable = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._anatomy = next(ANATOMIES[c.__name__] for c in type(module).__mro__ if c.__name__ in ANATOMIES)
        self._inner: Any = getattr(module, self._anatomy.inner)
        self._config = self._inner.config
        refuse_unsliceable(module)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(getattr(self._inner, self._anatomy.blocks))

    def loads(self) -> tuple[list[BlockCost], BlockCost, BlockCost]:
        a, inner = self._anatomy, self._inner
        embedding = sum(parameter_bytes(getattr(inner, name).parameters()) for name in (a.tokens, a.added) if name)
        last = (self.module.get_submodule("lm_head"), getattr(inner, a.norm))
        head = sum(parameter_bytes(part.parameters()) for part in last)
        sizes = [parameter_bytes(block.parameters()) for block in self.blocks]
        # Looking up an embedding costs no time worth counting.
        return [weighed(size) for size in sizes], BlockCost(parameter_bytes=embedding), weighed(head)

    def keep(self, place: StagePlace) -> None:
        a = self._anatomy
        blocks = getattr(self._inner, a.blocks)
        gone = [str(i) for i in range(len(blocks)) if not place.first_block <= i < place.stop_block]
        self._replace(blocks, dict.fromkeys(gone))
        dtype = next(self.module.parameters()).dtype
        if not place.first:
            silent = {a.tokens: nn.Identity(), a.added: Silent(dtype), a.dropout: nn.Identity()}
            self._replace(self._inner, {name: part for name, part in silent.items() if name is not None})
        if not place.last:
            self._replace(self._inner, {a.norm: nn.Identity()})
            self._replace(self.module, {"lm_head": nn.Identity()})
        self._inner.config = self._configured(place)

    def _configured(self, place: StagePlace) -> Any:
        """Some models look up the kind of attention by the block's place in their list, which now begins later."""
        config = copy(self._config)
        kinds = vars(config).get("layer_types")
        if kinds is not None:
            config.layer_types = list(kinds[place.first_block : place.stop_block])
            config.num_hidden_layers = place.stop_block - place.first_block
        return config

    def structure(self) -> str:
        # The configuration says what modules don't show, and names the version.
        return f"{super().structure()}\n{self._config.to_json_string()}\n{self._config._attn_implementation}"

    def restore(self) -> None:
        super().restore()
        self._inner.config = self._config

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        bound = inspect.signature(type(self.module).forward).bind(self.module, *args, **kwargs).arguments
        given = {k: v for k, v in {**bound, **bound.get("kwargs", {})}.items() if k not in ("self", "kwargs")}
        asked = {name: value for name, value in given.items() if value is not None and value is not False}
        if asked.get("logits_to_keep") == 0:  # all of them
            del asked["logits_to_keep"]
        foreign = sorted(set(asked) - READ - IRRELEVANT - OF_THE_LOSS)
        name = type(self.module).__name__
        if foreign or "input_ids" not in asked or given.get("return_dict") is False:
            what = f"with {foreign[0]}" if foreign else "without input_ids, or with return_dict=False"
            raise ValueError(
                f"{name} was called {what}, which a token pipeline can't serve: call it with input_ids and, as needed, "
                "attention_mask, position_ids and labels"
            )
        extra = {key: value for key, value in asked.items() if key == "labels" or key in OF_THE_LOSS}
        if asked["input_ids"].dim() != 2:
            raise ValueError(f"input_ids must be [batch, length], got {tuple(asked['input_ids'].shape)}")
        return Call(asked["input_ids"], asked.get("attention_mask"), asked.get("position_ids"), extra)

    def length(self, call: Call) -> int:
        return call.inputs.shape[1]

    def forward(
        self, place: StagePlace, call: Call, hidden: Tensor | None, memory: KVCache, start: int, stop: int
    ) -> Tensor:
        """[batch, tokens, width], or from the last stage [batch, tokens, vocabulary]."""
        begin = {"input_ids": call.inputs[:, start:stop]} if hidden is None else {"inputs_embeds": hidden}
        mask, positions = call.attention_mask, call.position_ids
        output: Tensor = self._inner(
            **begin,
            attention_mask=None if mask is None else mask[:, :stop],  # of the keys: the context's, too
            position_ids=None if positions is None else positions[..., start:stop],
            past_key_values=memory.at(start, stop),
            use_cache=True,
        ).last_hidden_state
        return self.module.get_submodule("lm_head")(output) if place.last else output

    def shape(self, call: Call, start: int, stop: int) -> Shape | None:
        """The residual stream, in the type of the parameters."""
        dtype = next(p.dtype for p in self.module.parameters() if p.is_floating_point())
        return (call.inputs.shape[0], stop - start, self._config.hidden_size), dtype

    def answer(self, call: Call, output: Tensor) -> Any:
        """`CausalLMOutputWithPast` with logits, and the loss where labels were given."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        module: Any = self.module
        loss = None
        if "labels" in call.extra:
            loss = module.loss_function(logits=output, vocab_size=self._config.vocab_size, **call.extra)
        return CausalLMOutputWithPast(loss=loss, logits=output)


def refuse_unsliceable(module: nn.Module) -> None:
    """ValueError for what would be wrong without a sign once a sequence is cut into slices."""
    name = type(module).__name__
    config = vars(module).get("config")
    if config is not None and vars(config).get("is_causal") is False:
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
