"""Real Trainers whose strategy computes on the simulated device; a worker is a process, their messages go by gloo."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_decentral.shared.meeting import WorkerGroup
from lightning_decentral.shared.wire import plain
from tests import simulated
from tests.simulated import CUDA, fsdp
from tests.simulated.tensors import Simulated
from tests.tiny import QUIET

Make = Callable[[], tuple[type[Strategy], dict[str, Any], LightningModule, tuple[Any, ...]]]
"""() -> (strategy, its options, module, loaders)"""


UNBOUND = property(lambda self: {"timeout": self.timeout})
"""A world whose groups torch doesn't bind to a device: there is none that it knows."""


class Accelerator(CPUAccelerator):
    """Of the device that is simulated."""

    def setup_device(self, device: torch.device) -> None: ...


def there(strategy: type[Strategy]) -> type[Strategy]:
    """The same on the device."""
    at = {"root_device": property(lambda self: CUDA, lambda self, device: None)}
    return type(strategy.__name__, (strategy,), at)


SETTINGS: dict[str, Any] = {"process_group_backend": "gloo"}
"""Of a strategy there."""


@contextmanager
def device(seed: int) -> Iterator[None]:
    """Within, this process has one, on which Trainers and FSDP compute."""
    unbound = mock.patch.object(WorkerGroup, "_settings", UNBOUND)
    with fsdp.door(), simulated.device(seed), unbound, mock.patch.object(plain, "_down", _down):
        yield


def _down(value: Any, *where: Any) -> Any:
    """A tensor of the device is sent as torch's own is, whose class alone is known there."""
    return down(value.detach().to("cpu") if isinstance(value, Simulated) else value, *where)


down = plain._down


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


@dataclass(frozen=True)
class Fitted:
    """
    Attributes:
        state: of the module after the fit.
        logged: in the end.
        steps, validation: what made this worker's host wait.
        saved: by worker 0 where the run was cut.
    """

    state: dict[str, Tensor]
    logged: dict[str, float]
    steps: list[str]
    validation: list[str]
    saved: dict[str, Any]


def fit(make: Make, on_device: bool, settings: dict[str, Any], cut: int = 0, folder: Path | None = None) -> Fitted:
    """One worker.

    Args:
        cut: after so many steps it's saved, in the folder, and goes on with another Trainer; 0: at once to the end.
    """
    waits = Waits()
    with device(seed=3) if on_device else nullcontext():
        saved = None if folder is None else folder / f"step={cut}.ckpt"
        if cut:
            saving = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=cut)
            _trained(make, on_device, {**settings, "max_steps": cut, "enable_checkpointing": True}, [waits, saving])
        trainer = _trained(make, on_device, settings, [waits], saved)
        state = {name: tensor.detach().cpu() for name, tensor in trainer.lightning_module.state_dict().items()}
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    written = torch.load(saved, weights_only=False)["state_dict"] if saved and trainer.is_global_zero else {}
    return Fitted(state, logged, waits.steps, waits.validation, written)


def _trained(
    make: Make, on_device: bool, settings: dict[str, Any], callbacks: list[Callback], saved: Path | None = None
) -> Trainer:
    strategy, options, module, loaders = make()
    where: dict[str, Any] = {}
    if on_device:
        strategy, options, where = there(strategy), {**options, **SETTINGS}, {"accelerator": Accelerator()}
    trainer = Trainer(**{**QUIET, **where, **settings}, strategy=strategy(**options), callbacks=callbacks)
    trainer.fit(module, *loaders, ckpt_path=saved)
    return trainer
