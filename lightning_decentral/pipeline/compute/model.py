"""Pipelined model: the part that a stage keeps, its forward for one slice, and how a call of the model is read.

    model(tokens) = head(norm(block_n(.. block_1(embedding(tokens)))))

Padding masks that hide nothing are found on the host before their batch moves to a device. For such masks
`transformers` builds no mask and attention keeps its flash kernel. Asking the device would make the host wait, so the
host remembers what each such mask became on the device: the tensor itself, and its micro-batches."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_decentral.pipeline.compute.kv_cache import KVCache
from lightning_decentral.shared.plan.profile import BlockCost

Shape = tuple[tuple[int, ...], torch.dtype]  # Shape and dtype of a hidden state, and so of its gradient.


@dataclass(frozen=True)
class Call:
    """One call of the model by the user's step, for one micro-batch."""

    inputs: Tensor  # [batch, length, ..]; the input of the first stage
    attention_mask: Tensor | None = None  # [batch, length] of ones and zeros, or None
    position_ids: Tensor | None = None  # [batch, length], or None: 0, 1, 2, ..
    extra: Mapping[str, Any] = field(default_factory=dict)  # what only the answer needs (labels)
    # [batch, length]: the number of each token's document, where a row packs several that don't see each other; None:
    # they do, or there is but one.
    documents: Tensor | None = None


@dataclass(frozen=True)
class StagePlace:
    """Position of a stage in the model: which blocks it has, and whether the embedding and the head are its."""

    first_block: int
    stop_block: int
    first: bool
    last: bool


class Pipelined(ABC):
    """Interface of a model that can be cut into stages. `module`: the model that the user's step calls, once."""

    sliceable: bool  # True where a sequence may be cut into slices.

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._removed: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []

    @abstractmethod
    def keep(self, place: StagePlace) -> None:
        """Remove from the module what stands on other stages. The remaining names don't change."""

    def restore(self) -> None:
        # In reverse: a parent may have been changed twice.
        for parent, modules in reversed(self._removed):
            parent._modules = modules
        self._removed = []

    def _replace(self, parent: nn.Module, changes: Mapping[str, nn.Module]) -> None:
        """Replace some children of a module by others."""
        self._removed.append((parent, parent._modules))
        # A new dictionary: the old one, kept whole, lets `restore` restore the order, too.
        parent._modules = {**parent._modules, **changes}

    @abstractmethod
    def loads(self) -> tuple[list[BlockCost], BlockCost, BlockCost]:
        """Return (blocks, embedding, head): bytes of parameters, which also stand in for seconds."""

    @abstractmethod
    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Read the model's inputs from the user's call. ValueError for a call that a pipeline can't answer."""

    @abstractmethod
    def length(self, call: Call) -> int:
        """Number of tokens in a sequence; 1 if the model has no token axis."""

    @abstractmethod
    def forward(
        self, place: StagePlace, call: Call, hidden: Tensor | None, memory: KVCache, start: int, stop: int
    ) -> Tensor:
        """Run this stage's forward for one slice. The first stage begins with the call, other stages with `hidden`."""

    @abstractmethod
    def shape(self, call: Call, start: int, stop: int) -> Shape | None:
        """Shape and dtype of the hidden state between two stages; None if only a forward can show it."""

    @abstractmethod
    def answer(self, call: Call, output: Tensor) -> Any:  # (batch, length, vocabulary)
        """Build what the model returns to the user's step from the last stage's output, all slices joined."""


_full: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()
"""Tensors of ones, with their version counters: a later change in place increases the counter."""


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch: those of its mappings, lists, tuples and dataclasses, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from tensors_in([*batch.values()])
    elif isinstance(batch, (list, tuple)):
        yield from chain.from_iterable(map(tensors_in, batch))
    elif is_dataclass(batch):
        yield from tensors_in([getattr(batch, field.name) for field in fields(batch)])


def remember(before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Remember which of the host's masks hide nothing, by the tensors that they became on the device."""
    if [tensor.shape for tensor in before] == [tensor.shape for tensor in after]:
        for there, here in zip(before, after, strict=True):
            may_be = there.device.type == "cpu" and there.dim() == 2 and not there.is_floating_point()
            # A tensor made in inference mode doesn't show whether it was changed.
            if here.device.type != "cpu" and not here.is_inference() and may_be and bool((there == 1).all()):
                _full[here] = here._version


def part_of(tensor: Tensor, parts: int, index: int) -> Tensor:  # (batch, ..)
    """Return one of n parts along the first axis. Parts of a mask that hides nothing hide nothing."""
    part = tensor.tensor_split(parts)[index]
    if hides_nothing(tensor):
        _full[part] = part._version
    return part


def hides_nothing(mask: Tensor) -> bool:  # (batch, length)
    """Return whether the host knows that the mask is all ones; no device is asked."""
    return mask in _full and _full[mask] == mask._version


@runtime_checkable
class Staged(Protocol):
    """Interface of a LightningModule that itself defines how its model is cut into stages."""

    def pipeline_stages(self) -> Pipelined:
        """Return the model to cut, usually a `Chain`."""
