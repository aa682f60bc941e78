"""Truncated backward: below a cut the forward runs without an autograd graph; gradients across a boundary are scaled.

Segments above a cut that aren't trained make no gradient (`Bypass`, the only place that changes `requires_grad`).

A cut is verified by its gradients with the doubling test, parameter by parameter.

Three gradients of the same loss: g plain, g2 with the gradient across the boundary doubled, g0 with the cut. A cut
is valid if the gradient across the boundary is exactly what the cut removes, for every parameter:

    g2 - g == g - g0

above   g2 == g,  g0 == g         the cut doesn't change the gradient
below   g2 == 2 g,  no g0         all of the gradient crosses the boundary
tied    both parts exist          used on both sides, each part crosses or doesn't
leak    the equation fails        a path goes around the boundary (a skip connection): no cut here"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_decentral.shared.compute.block_cost import Run
from lightning_decentral.shared.compute.modules import compiles


class _ScaleGradient(torch.autograd.Function):
    """Identity whose gradient is scaled: y = x;  dL/dx = factor dL/dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        # The same memory and version: a block that begins in place and must not stays an error. Not a view, which
        # autograd doesn't let change in place: where others read x, too, the gradient around the boundary is found as a
        # leak.
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def scale_gradient(value: Any, factor: float) -> Any:
    """Return the same tensors, with their gradients multiplied by the factor."""
    if factor == 1.0:
        return value

    def scaled(leaf: Any) -> Any:
        follows = isinstance(leaf, Tensor) and leaf.requires_grad
        return _ScaleGradient.apply(leaf, factor) if follows else leaf  # type: ignore[no-untyped-call]

    return tree_map(scaled, value)


class Cutter:
    """Cuts a module, or a LightningModule around it, at boundaries: the inputs of some of its blocks, by their names,
    in the order of the forward.

    Within `with cutter.at(cut, factors)` everything before boundary `cut` runs without a graph: no saved activations,
    no backward. Gradients across boundary j are multiplied by factors[j]. Code outside the module isn't changed."""

    def __init__(self, root: nn.Module, boundaries: Sequence[str]) -> None:
        self.met: list[int] = []  # the boundaries met since `at` began, by index
        self._cut: int | None = None
        self._factors: Sequence[float] = [1.0] * len(boundaries)
        self._active, self._graph_wanted = False, True
        if compiles():
            # Code compiled before (a first validation) doesn't know the hooks and would bypass them.
            torch.compiler.reset()
        blocks = [root.get_submodule(name) for name in boundaries]
        self._hooks = [b.register_forward_pre_hook(self._crossing(j), with_kwargs=True) for j, b in enumerate(blocks)]
        # The child of `root` that contains all boundaries; None if root's own forward runs them.
        heads, nested = {name.partition(".")[0] for name in boundaries}, all("." in name for name in boundaries)
        found = root.get_submodule(heads.pop()) if len(heads) == 1 and nested else None
        # A list has no forward to hook.
        self._network = None if isinstance(found, (nn.ModuleList, nn.ModuleDict)) else found
        if self._network is not None:
            # The network may run several times in a step, each time from its bottom.
            self._hooks.append(self._network.register_forward_pre_hook(self._enter))
            self._hooks.append(self._network.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def at(self, cut: int | None, factors: Sequence[float] | None = None) -> Iterator[None]:
        """Cut at this boundary, or nowhere. The grad mode is restored afterwards, also after an exception."""
        before = torch.is_grad_enabled()
        self.met, self._cut, self._active = [], cut, True
        self._factors = factors or [1.0] * len(self._factors)
        try:
            if self._network is None:  # root's own forward runs the boundaries: what runs first lies below
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

        # Not compiled with the block after it: the hook sets the grad mode for all that follows.
        return torch.compiler.disable(hook) if compiles() else hook


class Bypass:
    """Turns off `requires_grad` of parameters from `begin` to `end`. Gradients flow through what the parameters
    compute, but none is made for the parameters themselves, and nothing is saved for it.

    It lasts through the backward: activation checkpointing runs the forward again in the backward, in the same
    state."""

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Bypass these parameters from now on, and no others."""
        self.end()
        self._parameters = [p for p in parameters if p.requires_grad]
        self._require(False)

    def end(self) -> None:
        """Restore `requires_grad` of all parameters as the user set it."""
        self._require(True)
        self._parameters = []

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Restore `requires_grad` as the user set it, within this context."""
        self._require(True)
        try:
            yield
        finally:
            self._require(False)

    def _require(self, gradient: bool) -> None:
        for parameter in self._parameters:
            parameter.requires_grad_(gradient)


# ---- verification --------------------------------------------------------------------------------------

TOLERANCE = 1e-3  # of a parameter's gradient: smaller differences count as equal
FLOOR = 1e-6  # of the whole gradient: some are zero except for rounding (the bias of an attention's keys)

Gradients = dict[str, Tensor | None]


class Verdict(Enum):
    """Position of a parameter relative to a cut: above, below, tied, a leak."""

    ABOVE = "above"
    BELOW = "below"
    TIED = "tied"
    UNUSED = "unused"
    LEAK = "leak"


@dataclass(frozen=True)
class Judged:
    """Verdicts of one boundary: every parameter's position, by name."""

    boundary: str
    verdicts: Mapping[str, Verdict]

    def refuse(self) -> None:
        """Raise ValueError if the boundary isn't a valid cut."""
        leaks = [name for name, verdict in self.verdicts.items() if verdict is Verdict.LEAK]
        if leaks:
            more = f" and {len(leaks) - 1} more" if len(leaks) > 1 else ""
            raise ValueError(
                f"no cut at {self.boundary}: gradient of {leaks[0]}{more} goes around the boundary "
                "(a skip connection, or a parameter shared with another module), so it couldn't be averaged "
                "exactly: cut elsewhere"
            )
        if not any(verdict in (Verdict.BELOW, Verdict.TIED) for verdict in self.verdicts.values()):
            raise ValueError(f"no cut at {self.boundary}: no parameter lies below it, so it saves nothing: cut higher")


def judge(root: nn.Module, boundaries: list[str], run: Run) -> list[Judged]:
    """Judge every parameter's position relative to every boundary. Changes the module's gradients. Runs three forwards
    and backwards (one shared by all boundaries); `run` must draw the same random numbers each time. ValueError: the
    forward doesn't pass the boundaries in this order, each once per pass."""
    cutter = Cutter(root, boundaries)
    try:
        plain = gradients(root, run, cutter.at(None))
        met, passes = cutter.met, len(cutter.met) // len(boundaries)
        if not met or met != list(range(len(boundaries))) * passes:
            passed = [boundaries[j] for j in met]
            raise ValueError(f"the forward doesn't pass the cuts {boundaries} in this order: it passes {passed}")
        return [_judged(root, cutter, j, boundaries, run, plain) for j in range(len(boundaries))]
    finally:
        cutter.remove()


def gradients(root: nn.Module, run: Run, cut: AbstractContextManager[None]) -> Gradients:
    """Gradients by parameter name; None if the loss doesn't depend on the parameter."""
    root.zero_grad(set_to_none=True)
    with cut:
        loss = run()
    if not loss.requires_grad:
        raise ValueError("the forward changes the grad mode around the cut, so the loss has no graph: cut elsewhere")
    # After the cut, as in training: activation checkpointing must recompute the same.
    loss.backward()
    found = {name: p.grad for name, p in root.named_parameters()}
    root.zero_grad(set_to_none=True)
    return found


def _judged(root: nn.Module, cutter: Cutter, index: int, boundaries: list[str], run: Run, plain: Gradients) -> Judged:
    factors = [2.0 if j == index else 1.0 for j in range(len(boundaries))]
    try:
        doubled = gradients(root, run, cutter.at(None, factors))
        left = gradients(root, run, cutter.at(index))
    except torch.OutOfMemoryError:  # a RuntimeError, too, but not caused by the cut
        raise
    except RuntimeError as error:  # the plain step before worked
        reason = str(error).partition("\n")[0]
        raise ValueError(f"no cut at {boundaries[index]}: the step fails with it ({reason}): cut elsewhere") from error
    floor = FLOOR * float(torch.stack([g.double().norm() for g in plain.values() if g is not None]).norm())
    return Judged(boundaries[index], {n: verdict(plain[n], doubled[n], left[n], floor) for n in plain})


def verdict(plain: Tensor | None, doubled: Tensor | None, left: Tensor | None, floor: float) -> Verdict:
    """Judge one parameter by its three gradients; a difference of norm `floor` is rounding."""
    if plain is None or doubled is None:
        return Verdict.UNUSED
    rest = torch.zeros_like(plain) if left is None else left
    across, removed = doubled - plain, plain - rest
    small = TOLERANCE * max(float(plain.norm()), float(rest.norm())) + floor
    if not float((across - removed).norm()) <= small:  # so NaN counts as a leak, too
        return Verdict.LEAK
    if left is None:
        return Verdict.BELOW
    return Verdict.ABOVE if float(across.norm()) <= small else Verdict.TIED
