"""Verifying a cut by its gradients: is it what it claims to be? The doubling test, parameter by parameter.

Three gradients of the same loss: g plain, g2 with what flows back across the boundary doubled, g0 with the cut. A cut
is true if what flows across the boundary is exactly what the cut removes, for every parameter:

    g2 - g == g - g0

above   g2 == g,  g0 == g         the cut doesn't change it
below   g2 == 2 g,  no g0         all of it crosses the boundary
tied    both parts are there      used on both sides, each part crosses or doesn't
leak    the law is broken         something goes around the boundary (a skip connection): no cut here
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from lightning_decentral.partial.compute.cut import Cutter
from lightning_decentral.shared.compute.block_cost import Run

TOLERANCE = 1e-3  # of a parameter's gradient: closer ones are equal
FLOOR = 1e-6  # of the whole gradient: some are zero but for rounding (the bias of an attention's keys)

Gradients = dict[str, Tensor | None]


class Verdict(Enum):
    """Position of a parameter relative to a cut."""

    ABOVE = "above"
    BELOW = "below"
    TIED = "tied"
    UNUSED = "unused"
    LEAK = "leak"


@dataclass(frozen=True)
class Judged:
    """One boundary: the verdict of every parameter by name."""

    boundary: str
    verdicts: Mapping[str, Verdict]

    def refuse(self) -> None:
        """ValueError where the cut isn't one."""
        leaks = [name for name, verdict in self.verdicts.items() if verdict is Verdict.LEAK]
        if leaks:
            more = f" and {len(leaks) - 1} more" if len(leaks) > 1 else ""
            raise ValueError(
                f"no cut at {self.boundary}: gradient of {leaks[0]}{more} goes around the boundary "
                "(a skip connection, or a parameter shared with another module), so it couldn't be averaged "
                "exactly: cut elsewhere"
            )
        if not any(verdict in (Verdict.BELOW, Verdict.TIED) for verdict in self.verdicts.values()):
            raise ValueError(f"no cut at {self.boundary}: no parameter lies below it, nothing would be saved")


def judge(root: nn.Module, boundaries: list[str], run: Run) -> list[Judged]:
    """The verdict of every parameter about every boundary. Needs a module whose gradients nobody keeps.

    Three runs (one shared by all boundaries) of forward and backward; `run` must draw the same random numbers each
    time.

    Raises:
        ValueError: the forward doesn't pass the boundaries in this order, each once per pass.
    """
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
    """Gradients by name of the parameter; None where the loss doesn't reach it."""
    root.zero_grad(set_to_none=True)
    with cut:
        loss = run()
    if not loss.requires_grad:
        raise ValueError("cut like this the loss has no graph: the forward itself changes the grad mode around the cut")
    # Outside of the cut, as in training: what activation checkpointing runs again must come out the same.
    loss.backward()
    found = {name: p.grad for name, p in root.named_parameters()}
    root.zero_grad(set_to_none=True)
    return found


def _judged(root: nn.Module, cutter: Cutter, index: int, boundaries: list[str], run: Run, plain: Gradients) -> Judged:
    factors = [2.0 if j == index else 1.0 for j in range(len(boundaries))]
    try:
        doubled = gradients(root, run, cutter.at(None, factors))
        left = gradients(root, run, cutter.at(index))
    except torch.OutOfMemoryError:  # a RuntimeError, too, but no fault of the cut
        raise
    except RuntimeError as error:  # the plain step before worked
        reason = str(error).partition("\n")[0]
        raise ValueError(f"no cut at {boundaries[index]}: the step fails with it ({reason}): cut elsewhere") from error
    floor = FLOOR * float(torch.stack([g.double().norm() for g in plain.values() if g is not None]).norm())
    return Judged(boundaries[index], {n: verdict(plain[n], doubled[n], left[n], floor) for n in plain})


def verdict(plain: Tensor | None, doubled: Tensor | None, left: Tensor | None, floor: float) -> Verdict:
    """Verdict on one parameter from its three gradients; a difference of norm `floor` is rounding."""
    if plain is None or doubled is None:
        return Verdict.UNUSED
    rest = torch.zeros_like(plain) if left is None else left
    across, removed = doubled - plain, plain - rest
    small = TOLERANCE * max(float(plain.norm()), float(rest.norm())) + floor
    if not float((across - removed).norm()) <= small:  # so NaN is a leak, too
        return Verdict.LEAK
    if left is None:
        return Verdict.BELOW
    return Verdict.ABOVE if float(across.norm()) <= small else Verdict.TIED
