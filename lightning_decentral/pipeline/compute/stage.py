"""Stage of a pipeline: forward and backward of a chunk, with activations kept or recomputed (activation checkpointing).

A chunk is one slice of one micro-batch. Its graph begins at the incoming hidden state and ends at the outgoing one;
keys and values of other slices come and go through `KVCache`.

Slices, and recomputed activations, equal the whole model only if a forward changes no buffer (`unchanged`). A fake
quantization's observer, or a spectral norm, would give the next slice another model, and the same slice a second time
as well: a silent error."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_decentral.pipeline.compute.kv_cache import KVCache
from lightning_decentral.pipeline.compute.model import Call, Pipelined, StagePlace
from lightning_decentral.pipeline.compute.weight_grad import SplitWeights

Compute = Callable[[Tensor | None], Tensor]


class _Come(torch.autograd.Function):
    """Hidden state from another stage, whose gradient is put into a list.

    Differentiable and no leaf: a block may write to it, as to an earlier block's result."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor, found: list[Tensor]) -> Tensor:
        ctx.found = found
        ctx.mark_dirty(tensor)  # so it is returned itself, not as a view, which couldn't be written to
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.found.append(grad.contiguous())  # it is sent
        return None, None, None


class Activations(ABC):
    """Policy for the activations of a chunk: which of them are kept for its backward."""

    repeats: ClassVar[bool] = False
    """True if the backward runs the forward again."""

    @abstractmethod
    def run(self, compute: Compute, hidden: Tensor | None) -> Tensor:
        """Return compute(hidden), differentiable."""


@dataclass(frozen=True)
class Keep(Activations):
    """Keep all activations."""

    def run(self, compute: Compute, hidden: Tensor | None) -> Tensor:
        return compute(hidden)


@dataclass(frozen=True)
class Recompute(Activations):
    """Keep only the input, keys and values; the backward recomputes the rest, with the same random numbers.

    Costs one more forward. It replaces a model's own gradient checkpointing, which drops keys and values."""

    repeats: ClassVar[bool] = True

    def run(self, compute: Compute, hidden: Tensor | None) -> Tensor:
        # A copy each time: a block that writes to its input mustn't change the input of the recomputation.
        copied = lambda hidden: compute(None if hidden is None else hidden.clone())  # noqa: E731
        # Reentrant, the first stage would get no gradients: none of its inputs requires one.
        output: Tensor = checkpoint(copied, hidden, use_reentrant=False)
        return output


class Stage:
    """Runs forward and backward of one stage, chunk by chunk, in one step."""

    def __init__(
        self,
        model: Pipelined,  # after `keep(place)`
        place: StagePlace,
        calls: Sequence[Call],  # one for each micro-batch
        slices: Sequence[int],  # lengths in tokens; `(1,)` for a model without a token axis
        activations: Activations,
        weights: SplitWeights | None = None,  # if the schedule splits the backward; None: in the backward
    ) -> None:
        self.place, self.calls = place, calls
        self.bounds = list(pairwise(accumulate(slices, initial=0)))
        self._model, self._activations = model, activations
        self._weights = weights
        self._memories = [KVCache(sum(slices)) for _ in calls]  # one for each micro-batch
        # For each chunk: its input's gradient, once known, a function that makes zeros like it, and the output.
        self._kept: dict[tuple[int, int], tuple[list[Tensor], Callable[[], Tensor] | None, Tensor]] = {}
        self.outputs: dict[int, list[Tensor]] = {}
        """[micro-batch][slice]: detached outputs of the last stage."""

    def forward(self, microbatch: int, index: int, hidden: Tensor | None) -> Tensor:  # (batch, tokens, width)
        """Run one chunk's forward; `hidden` is None on the first stage. Returns the detached output."""
        call, memory, (start, stop) = self.calls[microbatch], self._memories[microbatch], self.bounds[index]
        gradient, zeros = list[Tensor](), None
        if hidden is not None and torch.is_grad_enabled():
            zeros = partial(torch.zeros, hidden.shape, dtype=hidden.dtype, device=hidden.device)
            anchor = torch.zeros((), requires_grad=True)
            hidden = _Come.apply(hidden.detach(), anchor, gradient)  # type: ignore[no-untyped-call]

        def compute(hidden: Tensor | None) -> Tensor:
            with nullcontext() if self._weights is None else self._weights.during((microbatch, index)):
                return self._model.forward(self.place, call, hidden, memory, start, stop)

        output = self._activations.run(compute, hidden)
        if output.requires_grad:
            self._kept[microbatch, index] = gradient, zeros, output
        if self.place.last:
            self.outputs.setdefault(microbatch, []).append(output.detach())
        return output.detach()

    def backward(self, microbatch: int, index: int, grad: Tensor) -> Tensor | None:  # as the chunk's output
        """Run one chunk's backward: add gradients of parameters to `.grad` and return that of `hidden`; None on the
        first stage."""
        if (microbatch, index) not in self._kept:  # nothing here or before is trained
            return None
        gradient, zeros, output = self._kept.pop((microbatch, index))
        torch.autograd.backward([output], [grad])
        # Zeros if nothing used the input: the stage before waits for a message.
        return zeros() if zeros is not None and not gradient else next(iter(gradient), None)

    def weights(self, microbatch: int, index: int) -> None:
        """Run the second half of a split backward: add gradients of weights to `.grad`."""
        assert self._weights is not None
        self._weights.finish((microbatch, index))


@contextmanager
def unchanged(module: nn.Module, among: str, remedy: str) -> Iterator[None]:
    """Check that forwards in this context leave the module's buffers unchanged. `among`: describes these forwards.
    ValueError: afterwards, if a buffer has changed; running statistics of norms, which a training forward doesn't read,
    may change."""
    before = {name: buffer.detach().clone() for name, buffer in _read_buffers(module)}
    yield
    for name, buffer in _read_buffers(module):
        was = before.get(name)
        # By value, with NaN equal to NaN: fused observers write without a change of `_version`.
        alike = was is not None and was.shape == buffer.shape and (was == buffer) | ((was != was) & (buffer != buffer))
        if not isinstance(alike, Tensor) or not alike.all():
            kind = type(module.get_submodule(name.rpartition(".")[0])).__name__
            raise ValueError(
                f"every forward changes {name} ({kind}), so {among} would use different models: {remedy}, or freeze "
                "the buffer before the fit (fake quantization by model.apply(torch.ao.quantization.disable_observer))"
            )


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Restore every buffer afterwards, whatever observers have recorded meanwhile."""
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in before:
                buffer.resize_(before[name].shape).copy_(before[name])  # an observer's first forward sizes some buffers


def _read_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all buffers with their names, except running statistics of norms."""
    for path, part in module.named_modules():
        if not isinstance(part, nn.modules.batchnorm._NormBase):
            for name, buffer in part.named_buffers(recurse=False):
                yield (f"{path}.{name}" if path else name), buffer


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("a pipeline's loss has one backward, which uses up its gradients: call backward once")
        return None, None, None, *(g if g is None else g.mul_(grad.to(g.dtype)) for g in gradients)


def deliver(value: Tensor, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:  # value: ()
    """Make a loss with this value, whose backward adds factor * gradients to the parameters' `.grad`.

    So whatever scales the loss (division for accumulation, scaling for half precision) scales the gradients, and
    zeroing, clipping and stepping don't change. The gradients are used up."""
    anchor = torch.zeros((), device=value.device, requires_grad=True)  # a stage may have no trained parameters
    loss: Tensor = _Deliver.apply(value, list(gradients), anchor, *parameters)  # type: ignore[no-untyped-call]
    return loss
