"""A trial copy of a network, by whose runs cuts are found; of several workers, which run theirs together.

What a step changes is put back for the next run: the module's buffers and parameters' gradients (`untouched`), and its
Python side (`own_state`: counters, queues, generators). What a step keeps outside of its module isn't seen.
"""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lightning_decentral.partial.compute.cut import Judged, judge
from lightning_decentral.shared.compute.around import Remembered
from lightning_decentral.shared.compute.block_cost import Run, measure
from lightning_decentral.shared.plan.profile import BlockCost

Found = TypeVar("Found")
PLAIN = (bool, int, float, complex, str, bytes, type(None))
HOLDING = (list, tuple, dict, set, deque)
DRAWING = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
LONGEST = 10_000  # a longer list is data, not what a step counts or keeps: it would be copied for every run


class Decide(Protocol):
    """Decides what a run of the copy showed, where several workers run theirs together."""

    def __call__(self, compute: Callable[[], Found], /) -> Found: ...


def by_itself(compute: Callable[[], Found], /) -> Found:
    """Result of this worker's own run."""
    return compute()


@dataclass(frozen=True)
class Trial:
    """A copy of the network and its step. What the search goes by is what its runs show, and nothing else."""

    module: nn.Module
    run: Run
    decide: Decide = by_itself

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def try_out(self) -> None:
        """ValueError where the step itself can't be run on the copy."""

        def once() -> None:
            self.run()

        self.decide(once)

    def judge(self, boundaries: Sequence[str]) -> list[Judged]:
        return self.decide(lambda: judge(self.module, list(boundaries), self.run))

    def measure(self, names: Sequence[str], sizes: Sequence[int]) -> tuple[BlockCost, ...]:
        return self.decide(lambda: measure(self.module, names, sizes, self.run))

    def entered(self) -> list[str]:
        """Modules in the order in which a forward enters them, but for those entered twice."""

        def watched() -> list[str]:
            names: list[str] = []
            note = lambda name, *_: names.append(name)  # noqa: E731
            hooks = [m.register_forward_pre_hook(partial(note, name)) for name, m in self.module.named_modules()]
            try:
                self.run()
            finally:
                for hook in hooks:
                    hook.remove()
            return [name for name in names if names.count(name) == 1]  # a boundary is met once in a pass

        return self.decide(watched)


def trial_copy(module: nn.Module) -> nn.Module:
    """A copy in which every parameter may show its gradient; ValueError if it can't be copied."""
    attributes = [value for part in module.modules() for value in vars(part).values()]
    # What pruning has computed from mask and parameter, which torch doesn't copy; a forward computes it anew.
    computed = {id(v): v.detach().clone() for v in attributes if isinstance(v, Tensor) and not v.is_leaf}
    # A LightningModule leaves its trainer out of copies, but not its Fabric.
    around = {id(fabric): fabric for fabric in (vars(part).get("_fabric") for part in module.modules())}
    try:
        trial = copy.deepcopy(module, {**computed, **around})
    except (RuntimeError, TypeError) as error:
        reason = str(error).split(". ")[0]
        raise ValueError(
            f"{type(module).__name__} can't be copied, and cuts are verified on a copy ({reason}): "
            "keep what can't be copied out of the module"
        ) from error
    generator = torch.Generator().manual_seed(0)  # its own: the run's random numbers stay as they are
    for parameter in trial.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
            # A matrix of zeros passes no gradient on, which would hide what lies below it.
            if parameter.ndim > 1 and not parameter.detach().any():
                noise = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.data.copy_(noise)
    return trial


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Put back what runs of a copy change in the module itself: a copy shares the functions that it keeps (a lambda).
    ValueError, behind the runs: gradients have reached the module's own parameters.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    before = {name: _state_of(p.grad) for name, p in module.named_parameters()}
    gradients = [(p, p.grad) for p in module.parameters()]
    remembered = Remembered(module)
    try:
        yield
    finally:
        remembered.put_back()
        for buffer, value in buffers:
            write_back(buffer, value)
        reached = next((n for n, p in module.named_parameters() if _state_of(p.grad) != before[n]), None)
        for parameter, gradient in gradients:
            parameter.grad = gradient
    if reached is not None:
        raise ValueError(
            f"{type(module).__name__} keeps a function (a lambda, a closure) that computes with its own {reached}, "
            "also in the copy on which cuts are verified: make it a method"
        )


def _state_of(gradient: Tensor | None) -> tuple[int, int]:
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def own_state(module: nn.Module) -> Callable[[], None]:
    """A function that gives every part of the module the plain attributes that it has now."""
    # Tensors and modules that a list refers to are put back as what they are, not as copies.
    held = {id(one): one for one in (*module.modules(), *module.parameters(), *module.buffers())}
    parts = [vars(part) for part in module.modules()]
    saved = [(own, _copied({n: v for n, v in own.items() if _is_state(n, v)}, held)) for own in parts]

    def put_back() -> None:
        for attributes, before in saved:
            for name in [name for name, value in attributes.items() if _is_state(name, value) and name not in before]:
                del attributes[name]
            attributes.update(_copied(before, held))

    return put_back


def _is_state(name: str, value: Any) -> bool:
    if name.startswith("_") or name == "training":
        return False  # torch's and Lightning's own
    return isinstance(value, (*PLAIN, *DRAWING)) or (isinstance(value, HOLDING) and len(value) <= LONGEST)


def _copied(state: dict[str, Any], held: dict[int, Any]) -> dict[str, Any]:
    found = {}
    for name, value in state.items():
        try:
            found[name] = copy.deepcopy(value, dict(held))
        except (RuntimeError, TypeError):  # a file, a lock: it stays as a step leaves it
            continue
    return found


@torch.no_grad()
def write_back(buffer: Tensor, value: Tensor) -> None:
    """buffer <- value, where it has changed. Others may be of a kind that can't be written: expanded, sparse."""
    if buffer.layout is not torch.strided:
        return
    if buffer.shape != value.shape or not torch.equal(buffer.nan_to_num(), value.nan_to_num()):
        buffer.resize_(value.shape).copy_(value)
