"""The first of a block's two forwards: by the kernels of a forward that is differentiated, its graph dropped at once.

Which kernels torch takes depends on whether gradients are wanted. So the first forward records a graph as the second
one does, in which nothing is kept. A backward that comes upon it would lose gradients, and is an error.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks


def as_trained(copies: Mapping[str, Tensor], trained: Mapping[str, bool]) -> dict[str, Tensor]:
    """Leaves that need gradients where these parameters are trained."""
    return {name: copy.detach().requires_grad_(trained[name]) for name, copy in copies.items()}


@contextmanager
def graph_dropped(block: str, leaves: Iterable[Tensor]) -> Iterator[None]:
    """Context manager in which operations run as where a backward follows, and nothing is saved for it."""

    def refuse(_: Any) -> Tensor:
        raise ValueError(
            f"a tensor that block {block} made and didn't return is used by the loss, which loses its gradients: "
            "return it from the block, or name a larger block in blocks"
        )

    for leaf in leaves:
        if leaf.requires_grad:
            leaf.register_hook(refuse)
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: None, refuse):
        yield


def without_graph(tensor: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """A result of the block. Views can't lose their graph in place."""
    if any(tensor is given for given in inputs):
        return tensor
    return tensor.detach() if tensor._is_view() else tensor.detach_()


def refuse_transformed(block: str) -> None:
    """ValueError within torch.func's transforms and forward-mode differentiation."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise ValueError(
            f"block {block} is differentiated by torch.func or in forward mode, which its second run in the backward "
            "can't serve: use loss.backward(), or train without strategy='spilled'"
        )


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward whose results have no graph; ValueError where one is asked for."""
    once = once_differentiable(backward)

    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise ValueError(
                "gradients that are differentiable themselves (create_graph=True, as a gradient penalty or forces need "
                "them) don't go through blocks that run again in the backward: train without strategy='spilled'"
            )
        return once(ctx, *gradients)

    return checked
