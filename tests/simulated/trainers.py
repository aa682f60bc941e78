"""Real Trainers whose strategy computes on the simulated device; a worker is a process, their messages go by gloo."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_decentral.shared.meeting import Attendance
from tests import simulated
from tests.simulated import CUDA, fsdp
from tests.tiny import QUIET

Make = Callable[[], tuple[type[Strategy], dict[str, Any], LightningModule, tuple[Any, ...]]]
"""() -> (strategy, its options, module, loaders)"""


UNBOUND = property(lambda self: {"timeout": self.timeout})
"""A world whose groups torch doesn't bind to a device: there is none that it knows."""


class Accelerator(CPUAccelerator):
    """Of the device that is simulated."""

    def setup_device(self, device: torch.device) -> None: ...


class Waits(Callback):
    """What made this worker's host wait for its device: in each training step but the first, in each validation batch.

    Attributes:
        steps: "what file:line", in order.
        validation: the same.
    """

    def __init__(self) -> None:
        self.steps, self.validation = list[str](), list[str]()
        self._before = 0

    def _begin(self, *_: Any) -> None:
        engine = simulated.here()
        self._before = len(engine.waits) if engine else 0

    def _since(self) -> list[str]:
        engine = simulated.here()
        return engine.waits[self._before :] if engine else []

    on_train_batch_start = on_validation_batch_start = _begin

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > 1:
            self.steps += self._since()

    def on_validation_batch_end(self, *_: Any) -> None:
        self.validation += self._since()


def fit(
    make: Make, on_device: bool, settings: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, float], list[str], list[str]]:
    """One worker: (the module after the fit, what was logged, waits of steps and of validation)."""
    strategy, options, module, loaders = make()
    where: dict[str, Any] = {}
    if on_device:
        there = {"root_device": property(lambda self: CUDA, lambda self, device: None)}
        strategy, where = type(strategy.__name__, (strategy,), there), {"accelerator": Accelerator()}
        options = {**options, "process_group_backend": "gloo"}
    waits = Waits()
    with ExitStack() as stack:
        if on_device:
            stack.enter_context(fsdp.door())
            stack.enter_context(simulated.device(seed=3))
            stack.enter_context(mock.patch.object(Attendance, "_settings", UNBOUND))
        trainer = Trainer(**{**QUIET, **where}, **settings, strategy=strategy(**options), callbacks=[waits])
        trainer.fit(module, *loaders)
        found = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return found, logged, waits.steps, waits.validation
