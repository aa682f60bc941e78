"""Trial copy of a network, whose runs find the cuts; several workers run their copies together.

Each run's changes are undone for the next: the module's buffers and parameters' gradients (`untouched`), and its
Python state (`own_state`: counters, queues, generators). State that a step keeps outside of its module isn't seen."""

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
LONGEST = 10_000  # a longer list is data, not a step's counter or state: it would be copied for every run


class Decide(Protocol):
    """Interface: agrees on the result of a computation that several workers run together."""

    def __call__(self, compute: Callable[[], Found], /) -> Found: ...


def by_itself(compute: Callable[[], Found], /) -> Found:
    """Return the result of this worker's own run."""
    return compute()


@dataclass(frozen=True)
class Trial:
    """Copy of the network and its step. The search uses only results of its runs."""

    module: nn.Module
    run: Run
    decide: Decide = by_itself

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def try_out(self) -> None:
        """Raise ValueError if the step itself can't run on the copy."""
        self.decide(lambda: self.run().shape)  # not the loss itself, as results are sent

    def judge(self, boundaries: Sequence[str]) -> list[Judged]:
        return self.decide(lambda: judge(self.module, list(boundaries), self.run))

    def measure(self, names: Sequence[str], sizes: Sequence[int]) -> tuple[BlockCost, ...]:
        return self.decide(lambda: measure(self.module, names, sizes, self.run))

    def entered(self) -> list[str]:
        """List the modules in the order in which a forward enters them, without those entered twice."""

        def watched() -> list[str]:
            names: list[str] = []
            note = lambda name, *_: names.append(name)  # noqa: E731
            hooks = [m.register_forward_pre_hook(partial(note, name)) for name, m in self.module.named_modules()]
            try:
                self.run()
            finally:
                for hook in hooks:
                    hook.remove()
            return [name for name in names if names.count(name) == 1]  # a boundary is passed once in a forward

        return self.decide(watched)


def trial_copy(module: nn.Module) -> nn.Module:
    """Copy a module so that every parameter can show its gradient; ValueError if it can't be copied."""
    attributes = [value for part in module.modules() for value in vars(part).values()]
    # Tensors that pruning computed from mask and parameter aren't copied by torch; a forward computes them anew.
    computed = {id(v): v.detach().clone() for v in attributes if isinstance(v, Tensor) and not v.is_leaf}
    # A LightningModule leaves its trainer out of copies, but not its Fabric.
    around = {id(fabric): fabric for fabric in (vars(part).get("_fabric") for part in module.modules())}
    try:
        trial = copy.deepcopy(module, {**computed, **around})
    except (RuntimeError, TypeError) as error:
        reason = str(error).split(". ")[0]
        raise ValueError(
            f"{type(module).__name__} can't be copied, but cuts are verified on a copy ({reason}): "
            "don't store what can't be copied in the module"
        ) from error
    generator = torch.Generator().manual_seed(0)  # its own generator: the run's random state doesn't change
    for parameter in trial.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
            # A matrix of zeros passes no gradient on, which would hide what lies below.
            if parameter.ndim > 1 and not parameter.detach().any():
                noise = torch.randn(parameter.shape, generator=generator) * 0.02
                parameter.data.copy_(noise)
    return trial


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Undo changes that runs of a copy make in the module itself, as a copy shares its functions (a lambda).
    ValueError, after the runs: gradients have reached the module's own parameters."""
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
            f"{type(module).__name__} keeps a function (a lambda, a closure) that uses the module's own {reached} even "
            "in the copy on which cuts are verified: make the function a method"
        )


def _state_of(gradient: Tensor | None) -> tuple[int, int]:
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def own_state(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores the plain attributes of every part of the module."""
    # Tensors and modules in a list are restored as themselves, not as copies.
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
        except (RuntimeError, TypeError):  # a file, a lock: it stays as the step leaves it
            continue
    return found


@torch.no_grad()
def write_back(buffer: Tensor, value: Tensor) -> None:
    """Restore a buffer's value if it has changed. Unchanged buffers may be unwritable: expanded, sparse."""
    if buffer.layout is not torch.strided:
        return
    if buffer.shape != value.shape or not torch.equal(buffer.nan_to_num(), value.nan_to_num()):
        buffer.resize_(value.shape).copy_(value)
