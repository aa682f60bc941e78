"""Pipelined model: the part a stage keeps, what it does with one slice, how a call of it is read.

model(tokens) = head(norm(block_n(.. block_1(embedding(tokens)))))
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.pipeline.compute.kv_cache import KVCache
from lightning_decentral.shared.plan.profile import BlockCost

Shape = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a hidden state, and so of its gradient."""


@dataclass(frozen=True)
class Call:
    """One call of the model by the user's step, for one micro-batch.

    Args:
        inputs: [batch, length, ..]; what the first stage begins with.
        attention_mask: [batch, length] of ones and zeros, or None.
        position_ids: [batch, length], or None: 0, 1, 2, ..
        extra: what only the answer needs (labels).
        documents: [batch, length]: the number of each token's document, where a row packs several that don't see
            each other; None: they do, or there is but one.
    """

    inputs: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    documents: Tensor | None = None


@dataclass(frozen=True)
class StagePlace:
    """Position of a stage in the model: which blocks it has, and whether the embedding and the head are its."""

    first_block: int
    stop_block: int
    first: bool
    last: bool


class Pipelined(ABC):
    """A model that can be cut into stages.

    Args:
        module: what the user's step calls, once.
    """

    sliceable: bool
    """True where a sequence may be cut into slices."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._removed: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []

    # ---- parts --------------------------------------------------------------------------------------------------

    @abstractmethod
    def keep(self, place: StagePlace) -> None:
        """Take out of the module what stands on other stages. Names of what is kept stay as they are."""

    def restore(self) -> None:
        # Last first: a parent may have been changed twice.
        for parent, modules in reversed(self._removed):
            parent._modules = modules
        self._removed = []

    def _replace(self, parent: nn.Module, changes: Mapping[str, nn.Module | None]) -> None:
        """Put other modules in the place of some; None takes out."""
        self._removed.append((parent, parent._modules))
        # A new dictionary: the old one, kept whole, gives `restore` the order back as well.
        changed = {**parent._modules, **changes}
        parent._modules = {name: changed[name] for name in changed if changes.get(name, parent) is not None}

    @abstractmethod
    def loads(self) -> tuple[list[BlockCost], BlockCost, BlockCost]:
        """(blocks, embedding, head): bytes of parameters, which also stand in for seconds."""

    # ---- one call -----------------------------------------------------------------------------------------------

    @abstractmethod
    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Read the model's inputs from the user's call. ValueError where a pipeline can't answer such a call."""

    @abstractmethod
    def length(self, call: Call) -> int:
        """Tokens of a sequence; 1 where there are none."""

    @abstractmethod
    def forward(
        self, place: StagePlace, call: Call, hidden: Tensor | None, memory: KVCache, start: int, stop: int
    ) -> Tensor:
        """Forward of this stage for one slice. The first stage begins with the call, others with `hidden`."""

    @abstractmethod
    def shape(self, call: Call, start: int, stop: int) -> Shape | None:
        """Shape and type of what stands between any two stages; None where a forward must be run to know."""

    @abstractmethod
    def answer(self, call: Call, output: Tensor) -> Any:
        """Return what the user's step gets for the output of the last stage, all slices together."""


def checksum(inputs: Sequence[Tensor]) -> float:
    """The same for the same inputs of all calls, on the host, and hardly for others."""
    result = 0.0
    for tensor in inputs:
        flat = tensor.flatten().double()
        # Weighed by place: the same tokens in another order are another batch.
        result += float((flat * (torch.arange(flat.numel(), dtype=torch.float64) % 1009 + 1)).sum())
    return result
