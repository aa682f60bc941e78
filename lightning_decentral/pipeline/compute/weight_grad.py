"""Split backward (zero bubble): a linear layer's input gradient at once, its weight gradient on request.

    y = x w^T + b      dx = g w                    the stage before waits for dx
                       dw = g^T x,  db = sum g     only the update needs dw and db

Both products are those of an undivided backward. Weights of other operations (norms, embeddings, convolutions) get
their gradients in the first half.

Source: Qi et al. 2401.10241 (zero bubble)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Chunk = tuple[int, int]


class SplitWeights:
    """Computes weight gradients of linear maps (`linear`, and GPT-2's `addmm`) in the second half of the backward."""

    def __init__(self) -> None:
        self._halves: dict[Chunk, list[Callable[[], None]]] = {}

    def during(self, chunk: Chunk) -> AbstractContextManager[Any]:
        """Split linear maps in the forward of a chunk (micro-batch, slice) that runs in this context."""
        return _Cutting(self._halves.setdefault(chunk, []))  # a recomputation comes a second time

    def finish(self, chunk: Chunk) -> None:
        """Run the second half of this chunk's backward."""
        for half in self._halves.pop(chunk):
            half()


class _Map(NamedTuple):
    """A linear map and its derivatives, for matrices x [n, in], g [n, out]."""

    y: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    dx: Callable[[Tensor, Tensor], Tensor]
    dw: Callable[[Tensor, Tensor], Tensor]


LINEAR = _Map(functional.linear, lambda g, w: g @ w, lambda g, x: g.t() @ x)
ADDMM = _Map(
    lambda x, w, b: x @ w if b is None else torch.addmm(b, x, w), lambda g, w: g @ w.t(), lambda g, x: x.t() @ g
)


class _Cutting(TorchFunctionMode):
    def __init__(self, halves: list[Callable[[], None]]) -> None:
        super().__init__()
        self._halves = halves

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ and torch.is_grad_enabled():
            kind, x, weight, bias, more = _READ[func](*args, **(kwargs or {}))
            plain = bias is None or (isinstance(bias, nn.Parameter) and bias.dim() == 1)
            trained = isinstance(weight, nn.Parameter) and weight.requires_grad and weight.dim() == 2
            # Not for a computed weight or bias: its gradient flows on, and can't wait.
            if not more and plain and trained and x.requires_grad and x.dim() > 1:
                return _Cut.apply(x, weight, bias, kind, self._halves)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


_READ: dict[Any, Callable[..., tuple[_Map, Tensor, Tensor, Tensor | None, Any]]] = {
    functional.linear: lambda input, weight, bias=None: (LINEAR, input, weight, bias, ()),
    torch.addmm: lambda input, mat1, mat2, *old, **scales: (ADDMM, mat1, mat2, input, (*old, *scales)),
}


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kind: _Map, halves: Any) -> Tensor:
        output = kind.y(x, weight, bias)
        ctx.save_for_backward(x.to(output.dtype))  # under autocast in half precision
        # Parameters aren't saved with the input: a recomputation would return other objects, without their `.grad`.
        ctx.weight, ctx.bias, ctx.kind, ctx.halves, ctx.dtype = weight, bias, kind, halves, x.dtype
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # (.., out)
        (x,) = ctx.saved_tensors
        x, flat = x.detach(), grad.flatten(0, -2)
        weight, bias, kind = ctx.weight, ctx.bias, ctx.kind

        def half() -> None:
            _add(weight, kind.dw(flat, x.flatten(0, -2)))
            if bias is not None and bias.requires_grad:
                _add(bias, flat.sum_to_size(bias.shape))

        ctx.halves.append(half)
        towards = kind.dx(flat, weight.detach().to(grad.dtype)).view(x.shape).to(ctx.dtype)
        return towards, None, None, None, None


@torch.no_grad()
def _add(parameter: Tensor, gradient: Tensor) -> None:  # both of one shape
    if parameter.grad is None:
        parameter.grad = gradient.to(parameter.dtype)
    else:
        parameter.grad += gradient
