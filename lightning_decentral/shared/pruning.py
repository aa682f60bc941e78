"""Callbacks that change parameters: `ModelPruning`, and whatever swaps some in where an evaluation begins.

The mean of the workers is pruned, by one mask for all, and stays pruned where training ends. By itself each worker
would choose a mask from its own parameters, and a mean of different masks prunes less than each.

The mean is put in place before any other callback sees that an evaluation begins. Lightning asks a strategy last, when
it begins and when it ends: what a callback changes and takes back (adapters merged, averages swapped in) would be
changed in a worker's own parameters then, and taken back in the mean.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn

from lightning_decentral.shared.wire.mean import MeanModel, floating


class PrunedTogether:
    """In place of what the ModelPruning callbacks of a trainer do to the model, for the time of one fit.

    Args:
        from_worker_0: every worker gets worker 0's values of these tensors; collective.
        arrive: land what is in flight and meet where training ends; collective.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: nn.Module,
        mean_model: MeanModel,
        from_worker_0: Callable[[Sequence[Tensor]], None],
        arrive: Callable[[], None],
    ) -> None:
        self._module, self._mean_model = module, mean_model
        self._from_worker_0, self._arrive = from_worker_0, arrive
        self._undo: list[Callable[[], None]] = []
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ModelPruning):
                self._replace(callback, "_run_pruning", self._prune)
                self._replace(callback, "on_train_end", self._end)

    def close(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def _replace(self, callback: ModelPruning, name: str, by: Callable[..., None]) -> None:
        setattr(callback, name, functools.partial(by, getattr(callback, name)))
        self._undo.append(lambda: delattr(callback, name))

    def _prune(self, inner: Callable[[int], None], epoch: int) -> None:
        """What this writes stays, on all workers alike; what it leaves is each worker's own again."""
        with self._mean_model.standing(floating([self._module])) as keep:
            parameters = list(self._module.parameters())
            before = [parameter.detach().clone() for parameter in parameters]
            inner(epoch)
            # Masks may be drawn, and values be rewound to where each worker began.
            self._from_worker_0([*parameters, *self._module.buffers()])
            keep([p for p, was in zip(parameters, before, strict=True) if not torch.equal(p, was)])

    def _end(self, inner: Callable[..., None], *args: Any) -> None:
        # A message that lands later would fill what was pruned for good.
        self._arrive()
        inner(*args)


class BeforeOthers(Callback):
    """Calls `begin` where a validation, test or prediction begins; the first of a trainer's callbacks, for one run."""

    def __init__(self, trainer: Trainer, begin: Callable[[], None]) -> None:
        self._begin, self._callbacks = begin, trainer.callbacks  # type: ignore[attr-defined]
        self._callbacks.insert(0, self)

    def remove(self) -> None:
        """From the trainer, which may train again with another strategy."""
        self._callbacks[:] = [callback for callback in self._callbacks if callback is not self]

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin()

    on_test_start: Any = on_validation_start
    on_predict_start: Any = on_validation_start
