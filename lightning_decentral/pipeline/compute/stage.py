"""Forward and backward of one chunk on one stage, activations kept or recomputed (activation checkpointing).

A chunk is one slice of one micro-batch. Its graph begins at the hidden state that came in and ends at the one that goes
out; keys and values of other slices come and go through `KVCache`.

Slices, and recomputed activations, are the whole model only where a forward leaves it as it was (`unchanged`). What an
observer of fake quantization, or a spectral norm, did to one slice it wouldn't do to the next, nor to the same slice a
second time, without a sign.
"""

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
    """A hidden state from another stage, whose gradient is put into a list.

    Differentiable and no leaf: a block may write to it, as to what a block before it made.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor, found: list[Tensor]) -> Tensor:
        ctx.found = found
        ctx.mark_dirty(tensor)  # so it is returned as itself, not as a view, which couldn't be written to
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.found.append(grad.contiguous())  # it is sent
        return None, None, None


class Activations(ABC):
    """Policy for the activations of a chunk: what is kept for its backward."""

    repeats: ClassVar[bool] = False
    """True where a forward is run again at its backward."""

    @abstractmethod
    def run(self, compute: Compute, hidden: Tensor | None) -> Tensor:
        """compute(hidden), differentiable."""


@dataclass(frozen=True)
class Keep(Activations):
    """Keep all activations."""

    def run(self, compute: Compute, hidden: Tensor | None) -> Tensor:
        return compute(hidden)


@dataclass(frozen=True)
class Recompute(Activations):
    """Keep only what came in, keys and values; the backward computes the rest again, with the same random numbers.

    Costs one more forward. It takes the place of a model's own gradient checkpointing, which drops keys and values.
    """

    repeats: ClassVar[bool] = True

    def run(self, compute: Compute, hidden: Tensor | None) -> Tensor:
        # A copy each time: a block that writes to what came in mustn't do so to what the backward begins with.
        copied = lambda hidden: compute(None if hidden is None else hidden.clone())  # noqa: E731
        # Reentrant, the first stage would get no gradients: nothing that comes in asks for one.
        output: Tensor = checkpoint(copied, hidden, use_reentrant=False)
        return output


class Stage:
    """A stage at work.

    Args:
        model: after `keep(place)`.
        calls: one for each micro-batch.
        slices: lengths in tokens; `(1,)` for a model without a token axis.
        weights: their gradients, where the schedule splits backwards; None: computed with the backward.
    """

    def __init__(
        self,
        model: Pipelined,
        place: StagePlace,
        calls: Sequence[Call],
        slices: Sequence[int],
        activations: Activations,
        weights: SplitWeights | None = None,
    ) -> None:
        self.place, self.calls = place, calls
        self.bounds = list(pairwise(accumulate(slices, initial=0)))
        self._model, self._activations = model, activations
        self._weights = weights
        self._memories = [KVCache(sum(slices)) for _ in calls]  # of each micro-batch: slices of others are others
        # Of each chunk: the gradient of what came in, once it is there, what makes zeros of its form, and the output.
        self._kept: dict[tuple[int, int], tuple[list[Tensor], Callable[[], Tensor] | None, Tensor]] = {}
        self.outputs: dict[int, list[Tensor]] = {}
        """[micro-batch][slice]: outputs of the last stage, detached."""

    def forward(self, microbatch: int, index: int, hidden: Tensor | None) -> Tensor:  # (batch, tokens, width)
        """Take one chunk forward; `hidden` is None on the first stage. What it comes to, detached."""
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
        """Take it back: gradients of parameters are added to `.grad`, that of `hidden` is returned.

        None on the first stage.
        """
        if (microbatch, index) not in self._kept:  # nothing here or before it is trained
            return None
        gradient, zeros, output = self._kept.pop((microbatch, index))
        torch.autograd.backward([output], [grad])
        # Zeros where nothing asked for it: the stage before waits for a message.
        return zeros() if zeros is not None and not gradient else next(iter(gradient), None)

    def weights(self, microbatch: int, index: int) -> None:
        """The second half of a backward, where it's split: gradients of weights are added to `.grad`."""
        assert self._weights is not None
        self._weights.finish((microbatch, index))


@contextmanager
def unchanged(module: nn.Module, among: str, remedy: str) -> Iterator[None]:
    """Context manager around forwards that must all meet the same buffers of the module.

    Args:
        among: a description of these forwards.

    Raises:
        ValueError: afterwards, where a buffer isn't what it was; running statistics of norms, which a training forward
            doesn't read, may change.
    """
    before = {name: buffer.detach().clone() for name, buffer in _read_buffers(module)}
    yield
    for name, buffer in _read_buffers(module):
        was = before.get(name)
        # By value, NaN being NaN, since fused observers write without a trace in `_version`.
        alike = was is not None and was.shape == buffer.shape and (was == buffer) | ((was != was) & (buffer != buffer))
        if not isinstance(alike, Tensor) or not alike.all():
            kind = type(module.get_submodule(name.rpartition(".")[0])).__name__
            raise ValueError(
                f"every forward changes {name} ({kind}), so {among} would each meet another model: {remedy}, or fix it "
                "before the fit (fake quantization by model.apply(torch.ao.quantization.disable_observer))"
            )


@contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Afterwards every buffer is what it was before, whatever observers have seen meanwhile."""
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in before:
                buffer.resize_(before[name].shape).copy_(before[name])  # an observer's first forward gives some a size


def _read_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all buffers, with their names, but running statistics of norms."""
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
            raise RuntimeError("the loss of a pipeline goes back once: its gradients are handed over, not computed")
        return None, None, None, *(g if g is None else g.mul_(grad.to(g.dtype)) for g in gradients)


def deliver(value: Tensor, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:  # value: ()
    """A loss with this value whose backward adds factor * gradients to the parameters' `.grad`.

    So whatever is done to a loss (division for accumulation, scaling for half precision) is done to the gradients, and
    zeroing, clipping and stepping stay as they are. The gradients are used up.
    """
    anchor = torch.zeros((), device=value.device, requires_grad=True)  # a stage may have nothing that is trained
    loss: Tensor = _Deliver.apply(value, list(gradients), anchor, *parameters)  # type: ignore[no-untyped-call]
    return loss
