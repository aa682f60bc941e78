"""Evaluation of the mean model: the workers' mean is swapped in for evaluations, or taken at the end of training.

`ModelPruning` prunes the mean model, with one mask for all workers, and it stays pruned when training ends. Alone, each
worker would choose a mask from its own parameters, and a mean of models with different masks has fewer zeros than each.

The mean is swapped in before any other callback sees that an evaluation begins. Lightning calls a strategy's hooks
last, so a callback that changes parameters and restores them (merges adapters, swaps averages in) would change a
worker's own parameters, and restore the mean's."""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn

from lightning_decentral.shared.wire.mean import MeanModel, Swap, of_mean

if TYPE_CHECKING:
    import lightning_decentral.shared.setup_and_step as strategies


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Return the Trainer's own list of callbacks, not a copy, in order."""
    found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return found


class PrunedTogether:
    """Prunes with one mask on all workers, in place of the Trainer's `ModelPruning` callbacks, until `close`."""

    def __init__(
        self,
        trainer: Trainer,
        module: nn.Module,
        mean_model: MeanModel,
        from_worker_0: Callable[[Sequence[Tensor]], None],  # gives every worker worker 0's values; collective
        arrive: Callable[[], None],  # receives messages in flight, and waits for the other workers; collective
    ) -> None:
        self._module, self._mean_model = module, mean_model
        self._from_worker_0, self._arrive = from_worker_0, arrive
        self._undo = ExitStack()
        self.close = self._undo.close  # the callbacks' own methods again
        for callback in callbacks_of(trainer):
            if isinstance(callback, ModelPruning):
                for name, by in {"_run_pruning": self._prune, "on_train_end": self._end}.items():
                    setattr(callback, name, functools.partial(by, getattr(callback, name)))
                    self._undo.callback(delattr, callback, name)

    def _prune(self, inner: Callable[[int], None], epoch: int) -> None:
        """Prune the mean: parameters that change stay pruned on all workers; each worker gets its others back."""
        with self._mean_model.standing(*of_mean([self._module])) as keep:
            parameters = list(self._module.parameters())
            before = [parameter.detach().clone() for parameter in parameters]
            inner(epoch)
            # Masks may be random, and values may be rewound to each worker's initial ones.
            self._from_worker_0([*parameters, *self._module.buffers()])
            keep([p for p, was in zip(parameters, before, strict=True) if not torch.equal(p, was)])

    def _end(self, inner: Callable[..., None], *args: Any) -> None:
        # A message mixed later would fill elements that are pruned for good.
        self._arrive()
        inner(*args)


class Evaluation(Callback):
    """Callback that evaluates the workers' mean, or equal replicas, wherever Lightning evaluates once for all workers.
    It is the Trainer's first callback for one run, so it acts before any other callback when an evaluation begins, at
    its batches and after the last batch."""

    def __init__(self, owner: "strategies.WorkersStrategy") -> None:
        self._strategy = owner  # not named `owner`, by which `settings` would compare it whole
        self._callbacks: list[Callback] = []
        self._loop: Any = None
        self._awaited = False  # whether the first batch is still to come
        self._swapped_in: Swap | None = None

    def watch(self, trainer: Trainer) -> None:
        """Watch the Trainer's evaluations from now on, until `close`."""
        self._callbacks = callbacks_of(trainer)
        self._callbacks.insert(0, self)
        self._loop = loop = trainer.fit_loop.epoch_loop.val_loop
        loop.setup_data = functools.partial(self._set_up_loaders, loop.setup_data)  # type: ignore[method-assign]

    def _set_up_loaders(self, inner: Callable[[], None]) -> None:
        """Check that all workers have equally many validation loaders: Lightning makes workers wait at each of them."""
        before = self._loop._combined_loader
        inner()
        if self._loop._combined_loader is not before:
            self._strategy.health.check_met("set-up of validation loaders")

    def _begin(self) -> None:
        self._strategy.health.check_equal()
        if self._strategy.shows_mean:
            self._strategy.mean_model.show(*self._strategy.averaged())
            self._awaited = True

    def _evaluate(self) -> None:
        """Evaluate the mean over workers of parameters that hooks swapped in, where each worker swapped in its own.

        At the first batch, after all hooks; an optimizer's average of parameters is an example. Collective."""
        if not self._awaited:
            return
        self._awaited = False
        parameters, mean_model = dict(self._strategy._module.named_parameters()), self._strategy.mean_model
        if not self._strategy.health.shown_alike(parameters, mean_model.written()):
            tensors = list(parameters.values())
            self._swapped_in = Swap(tensors, mean_model.mean_of(tensors))

    def arrive(self) -> None:
        """Receive messages in flight; give all workers the mean model where training ends with it. Collective."""
        self._strategy.health.check_equal()
        if self._strategy.mean_model.diverged:
            self._strategy.settle()
            if self._strategy.ends_at_mean:
                self._strategy.mean_model.take(*of_mean([self._strategy._module]))

    def close(self) -> None:
        """Stop watching the Trainer, and forget the mean."""
        self._strategy.mean_model.forget()
        self._awaited, self._swapped_in = False, None
        # The Trainer may train again with another strategy.
        self._callbacks[:] = [callback for callback in self._callbacks if callback is not self]
        self._callbacks = []
        if self._loop is not None:
            vars(self._loop).pop("setup_data", None)
        self._loop = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin()

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        self._evaluate()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore swapped-in parameters, bit for bit, before the callback that swapped them in restores its own."""
        self._evaluate()  # a worker without a batch takes part
        if self._swapped_in is not None:
            self._swapped_in.undo()
            self._swapped_in = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._strategy.health.check_met("validation")

    on_test_start: Any = on_validation_start
    on_predict_start: Any = on_validation_start
    on_test_batch_start: Any = on_validation_batch_start
    on_predict_batch_start: Any = on_validation_batch_start
    on_test_epoch_end: Any = on_validation_epoch_end
    on_predict_epoch_end: Any = on_validation_epoch_end
