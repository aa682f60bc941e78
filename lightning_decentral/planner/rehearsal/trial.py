"""Which way to the gradients is the fastest, and whether a module allows it: steps of workers that send nothing."""

from contextlib import ExitStack
from statistics import median
from time import monotonic
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_decentral.planner.rehearsal.batches import shared_out
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.loop import Loop
from lightning_decentral.planner.rehearsal.members.strategies import Alone
from lightning_decentral.planner.rehearsal.worker import Worker
from lightning_decentral.shared.compute import cuda

ABREAST, STACKED, LONG_SECONDS = 7, 3, 1.0
"""Steps that are timed at most, each way; none begins after so long."""


def abreast(module: LightningModule, data: Any, workers: int, loop: Loop, threads: int) -> float | None:
    """Seconds of a step on so many threads over those one after the other, medians; None: steps draw random numbers, or
    fail, and whoever trains these workers hears why."""
    try:
        with ExitStack() as crews:
            apart, some = (
                crews.enter_context(_crew(module, data, workers, loop, threads=count)) for count in (1, threads)
            )
            pairs = _timed(some, apart, ABREAST)
    except Exception:  # the module's own
        return None
    return median(one for one, _ in pairs) / median(other for _, other in pairs)


def stacked(module: LightningModule, data: Any, workers: int, loop: Loop) -> tuple[float | None, str]:
    """(seconds of stacked gradients over those one after the other; None: they can't be stacked, and why).

    No reason where workers can't be computed at all: whoever trains them hears why.
    """
    with ExitStack() as crews:
        try:
            apart = crews.enter_context(_crew(module, data, workers, loop))
            apart.train(1)
        except Exception:  # the module's own
            return None, ""
        try:
            together = crews.enter_context(_crew(module, data, workers, loop, stacked=True))
            together.train(1)
            if not together.stacks:
                return None, "their batches differ in shape"
            if not all(map(_equal, apart.workers, together.workers)):
                return None, "stacked, their gradients are others"
            pairs = _timed(together, apart, STACKED)
        except Exception as error:  # whatever vmap refuses, and whatever the module does with a stacked tensor
            return None, f"{type(error).__name__}: {error}".splitlines()[0]
    return min(one for one, _ in pairs) / min(other for _, other in pairs), ""


def _crew(module: LightningModule, data: Any, workers: int, loop: Loop, **how: Any) -> Crew:
    return Crew(module, shared_out(data, workers)[0], Alone(), workers, 1, loop=loop, **how)


def _timed(one: Crew, other: Crew, most: int) -> list[tuple[float, float]]:
    """(seconds of a step of each), by turns, behind one that isn't timed."""
    pairs = [(_seconds(one), _seconds(other))]
    end = monotonic() + LONG_SECONDS
    while len(pairs) < 2 or (len(pairs) <= most and monotonic() < end):
        pairs.append((_seconds(one), _seconds(other)))
    return pairs[1:]


def _seconds(crew: Crew) -> float:
    begun = monotonic()
    crew.train(1)
    if crew.device.type == "cuda":
        cuda.synchronize(crew.device)
    return monotonic() - begun


def _equal(a: Worker, b: Worker) -> bool:
    """To rounding: the whole gradient, as some parameters' is nothing but rounding; and each buffer."""
    pairs = list(zip(a.module.parameters(), b.module.parameters(), strict=True))
    if any((p.grad is None) != (q.grad is None) for p, q in pairs):
        return False
    gradients = [(p.grad.double(), q.grad.double()) for p, q in pairs if p.grad is not None and q.grad is not None]
    off, size = (
        sum(float((x - y).square().sum()) for x, y in gradients),
        sum(float(x.square().sum()) for x, _ in gradients),
    )
    rounding = max((torch.finfo(p.dtype).eps for p, _ in pairs), default=0.0)
    buffers = zip(a.module.buffers(), b.module.buffers(), strict=True)
    return off <= rounding * size and all(torch.allclose(x, y, rtol=1e-3, atol=1e-5) for x, y in buffers)
