"""Model adapters: any model that is a sequence of blocks can be cut between blocks, but not along tokens."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.pipeline.compute.causal.masks import HOST
from lightning_decentral.pipeline.compute.causal.refusals import refuse_compiled_around
from lightning_decentral.pipeline.compute.causal.trial import adapted
from lightning_decentral.pipeline.compute.kv_cache import KVCache
from lightning_decentral.pipeline.compute.model import Call, Pipelined, Shape, StagePlace
from lightning_decentral.pipeline.plan.partition import NOTHING, weighed
from lightning_decentral.shared.compute.block_cost import parameter_bytes
from lightning_decentral.shared.plan.arguments import checked
from lightning_decentral.shared.plan.profile import BlockCost


@dataclass(frozen=True)
class Block:
    """One block of a `Chain`: the modules of which it consists, and which other stages leave out, and its forward,
    usually the only module itself."""

    parts: tuple[nn.Module, ...]
    run: Callable[[Tensor], Tensor]


def blocks_of(modules: Sequence[nn.Module]) -> list[Block]:
    """Make each module a block of a `Chain`."""
    return [Block((module,), module) for module in modules]


@checked
class Chain(Pipelined):
    """Model that is a sequence of blocks: model(x) = reply(block_n(.. block_1(x))).

    Args:
        module: the model that the user's step calls, once, with one tensor.
        blocks: in order; their parts are submodules of `module`.
        reply: maps the last block's result to the return value of `module`.
    """

    # Bidirectional attention (ViT) needs all tokens at once, and a convolution has none: micro-batches of one slice.
    sliceable = False

    def __init__(
        self, module: nn.Module, blocks: Sequence[Block], reply: Callable[[Tensor], Any] = lambda output: output
    ) -> None:
        super().__init__(module)
        self._blocks, self._reply = list(blocks), reply

    def loads(self) -> tuple[list[BlockCost], BlockCost, BlockCost]:
        sizes = [sum(parameter_bytes(part.parameters()) for part in block.parts) for block in self._blocks]
        return [weighed(size) for size in sizes], NOTHING, NOTHING

    def keep(self, place: StagePlace) -> None:
        each = [{part for whole in block.parts for part in whole.modules()} for block in self._blocks]
        for part, times in Counter(part for parts in each for part in parts).items():
            norm = isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats
            if len(self._own(place)) < len(self._blocks) and times > 1 and norm:
                raise ValueError(
                    f"several blocks of the Chain share one {type(part).__name__}, whose running statistics would "
                    "differ between stages: give each block its own, or set track_running_stats=False"
                )
        own = {part for block in self._own(place) for whole in block.parts for part in whole.modules()}
        others = {part for block in self._blocks for part in block.parts} - own
        for parent in list(self.module.modules()):
            # Not `named_children`, which lists a module once even if it stands in several places.
            left = {name: nn.Identity() for name, child in parent._modules.items() if child in others}
            if left:
                self._replace(parent, left)

    def _own(self, place: StagePlace) -> list[Block]:
        return self._blocks[place.first_block : place.stop_block]

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        given = [*args, *(value for value in kwargs.values() if value is not None)]
        if len(given) != 1 or not isinstance(given[0], Tensor):
            raise ValueError(f"{type(self.module).__name__} must be called with one tensor, got {len(given)} arguments")
        return Call(given[0])

    def length(self, call: Call) -> int:
        return 1

    def forward(
        self, place: StagePlace, call: Call, hidden: Tensor | None, memory: KVCache, start: int, stop: int
    ) -> Tensor:
        # A copy: a block that writes to its input would change the user's batch, from which it is recomputed.
        output = call.inputs.clone() if hidden is None else hidden
        for block in self._own(place):
            output = block.run(output)
        return output

    def shape(self, call: Call, start: int, stop: int) -> Shape | None:
        return None

    def answer(self, call: Call, output: Tensor) -> Any:  # (batch, ..) as the last block returns it
        return self._reply(output)


def vit(module: Any) -> Chain:
    """Chain of a `transformers.ViTForImageClassification`."""
    from transformers.modeling_outputs import ImageClassifierOutput

    inner, classifier = module.vit, module.classifier
    # The classifier reads only the first token.
    head = Block((inner.layernorm, classifier), lambda tokens: classifier(inner.layernorm(tokens)[:, 0, :]))
    return Chain(
        module,
        [*blocks_of([inner.embeddings, *inner.layers]), head],
        lambda logits: ImageClassifierOutput(logits=logits),
    )


def resnet(module: Any) -> Chain:
    """Chain of a `transformers.ResNetForImageClassification`."""
    from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

    inner, classifier = module.resnet, module.classifier
    layers = [layer for stage in inner.encoder.stages for layer in stage.layers]
    head = Block((classifier,), lambda features: classifier(inner.pooler(features)))
    return Chain(
        module,
        [*blocks_of([inner.embedder, *layers]), head],
        lambda logits: ImageClassifierOutputWithNoAttention(logits=logits),
    )


KNOWN: dict[str, Callable[[Any, torch.device], Pipelined]] = {
    "GenerationMixin": adapted,
    "ViTForImageClassification": lambda module, _: vit(module),
    "ResNetForImageClassification": lambda module, _: resnet(module),
}
"""Adapters by the name of a `transformers` class, own or inherited: `transformers` need not be installed."""


def known(module: nn.Module) -> list[tuple[Any, str]]:
    """Find the known models in `module`, each with its name in `KNOWN`."""
    kinds = {part: [c.__name__ for c in type(part).__mro__ if c.__name__ in KNOWN] for part in module.modules()}
    return [(part, names[0]) for part, names in kinds.items() if names]


def depth(module: nn.Module) -> int | None:
    """Return the number of blocks of the one known model in `module`, without a trial; None if there isn't one."""
    found = known(module)
    if len(found) != 1:
        return None
    part, kind = found[0]
    if kind == "GenerationMixin":  # a trial of its forward draws random numbers, and takes seconds
        return getattr(part.config, "num_hidden_layers", None)
    return len(KNOWN[kind](part, HOST).loads()[0])


def find(module: nn.Module, device: torch.device = HOST) -> Pipelined:
    """Find the one model in `module` that a pipeline can cut, and adapt it. `device`: the device that trains the model.
    ValueError: no such model, several, or one that can't be cut."""
    found = known(module)
    if len(found) != 1:
        names = ", ".join(type(part).__name__ for part, _ in found) or "none"
        raise ValueError(
            f"a token pipeline needs exactly one known model in {type(module).__name__}, but found {names}. Known are "
            "transformers' causal language models, ViTForImageClassification and ResNetForImageClassification: for "
            "another model return a Chain from a method pipeline_stages()"
        )
    part, kind = found[0]
    refuse_compiled_around(module, part)
    return KNOWN[kind](part, device)
