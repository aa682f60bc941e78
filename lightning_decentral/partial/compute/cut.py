"""Truncated backward: what lies below a cut runs without an autograd graph, gradients across a boundary are scaled.

What is passed above a cut makes no gradient (`Bypass`, the one place that touches `requires_grad` within a step).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_decentral.shared.compute.modules import compiles


class _ScaleGradient(torch.autograd.Function):
    """y = x;  dL/dx = factor dL/dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        # The same memory and version: what a block that begins in place must not change stays an error. No view, of
        # which autograd allows no change in place: where others read x, too, the gradient that goes by is seen as a
        # leak.
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def scale_gradient(value: Any, factor: float) -> Any:
    """The same tensors; what flows back through them is multiplied by the factor."""
    if factor == 1.0:
        return value

    def scaled(leaf: Any) -> Any:
        follows = isinstance(leaf, Tensor) and leaf.requires_grad
        return _ScaleGradient.apply(leaf, factor) if follows else leaf  # type: ignore[no-untyped-call]

    return tree_map(scaled, value)


class Cutter:
    """Boundaries in a module: the inputs of some of its blocks, in the order of the forward.

    Between `with cutter.at(cut, factors)` what runs before boundary `cut` has no graph: no saved activations, no
    backward. Gradients that flow back across boundary j are multiplied by factors[j]. Outside the module is untouched.

    Args:
        root: the module, or a LightningModule around it.
        boundaries: names of modules.

    Attributes:
        met: the boundaries met since `at` began, by index.
    """

    def __init__(self, root: nn.Module, boundaries: Sequence[str]) -> None:
        self.met: list[int] = []
        self._cut: int | None = None
        self._factors: Sequence[float] = [1.0] * len(boundaries)
        self._active, self._graph_wanted = False, True
        if compiles():
            # What was compiled before (a first validation) knows nothing of the hooks, and would pass them by.
            torch.compiler.reset()
        blocks = [root.get_submodule(name) for name in boundaries]
        self._hooks = [b.register_forward_pre_hook(self._crossing(j), with_kwargs=True) for j, b in enumerate(blocks)]
        # The member of `root` that holds all boundaries; None where root's own forward passes them.
        heads, nested = {name.partition(".")[0] for name in boundaries}, all("." in name for name in boundaries)
        found = root.get_submodule(heads.pop()) if len(heads) == 1 and nested else None
        # A list has no forward whose beginning could be hooked.
        self._network = None if isinstance(found, (nn.ModuleList, nn.ModuleDict)) else found
        if self._network is not None:
            # It may run several times in a step, and each time its own bottom comes first.
            self._hooks.append(self._network.register_forward_pre_hook(self._enter))
            self._hooks.append(self._network.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Take the hooks out of the module."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def at(self, cut: int | None, factors: Sequence[float] | None = None) -> Iterator[None]:
        """Cut at this boundary, or nowhere. The grad mode afterwards is the one before, also after an exception."""
        before = torch.is_grad_enabled()
        self.met, self._cut, self._active = [], cut, True
        self._factors = factors or [1.0] * len(self._factors)
        try:
            if self._network is None:  # root's own forward passes the boundaries: what runs first lies below
                self._enter()
            yield
        finally:
            self._active = False
            torch.set_grad_enabled(before)

    def _enter(self, *_: Any) -> None:
        if self._active and self._cut is not None:
            self._graph_wanted = torch.is_grad_enabled()  # not where the user runs it without a graph
            # Not `detach` at the boundary: a detached prefix builds its whole graph before it drops it.
            torch.set_grad_enabled(False)

    def _leave(self, *_: Any) -> None:
        if self._active and self._cut is not None:
            torch.set_grad_enabled(self._graph_wanted)

    def _crossing(self, index: int) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._active:
                return None
            self.met.append(index)
            if index == self._cut:
                torch.set_grad_enabled(self._graph_wanted)
            factor = self._factors[index]
            return scale_gradient(args, factor), scale_gradient(kwargs, factor)

        # Not compiled with what it stands before: it sets the grad mode for all that follows.
        return torch.compiler.disable(hook) if compiles() else hook


class Bypass:
    """No parameter requires a gradient from `begin` to `end`, of those that do otherwise. Gradients flow through what
    they compute; none is made for them, and nothing is kept to make one.

    That long, and not for the forward only: activation checkpointing runs the forward again in the backward, and must
    find what it found.
    """

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Bypass these parameters from now on, no others."""
        self.end()
        self._parameters = [p for p in parameters if p.requires_grad]
        self._require(False)

    def end(self) -> None:
        """All as the user set them."""
        self._require(True)
        self._parameters = []

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Restore for a while `requires_grad` as the user set it."""
        self._require(True)
        try:
            yield
        finally:
            self._require(False)

    def _require(self, gradient: bool) -> None:
        for parameter in self._parameters:
            parameter.requires_grad_(gradient)
