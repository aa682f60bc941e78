"""Forked and spawned workers that an exception ends: callbacks learn of it in the worker, where the trained model is.

Lightning itself calls `on_exception` in the process that started them alone, whose model was never trained.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.utilities.exceptions import _TunerExitException


def launched_by(strategy: Strategy, start_method: str) -> Any:
    """The strategy's launcher; of forked or spawned workers one without a file of the untrained model."""
    if start_method == "popen":
        return strategy.launcher
    return WorkersLauncher(strategy, start_method=start_method)  # type: ignore[arg-type]


class WorkersLauncher(_MultiProcessingLauncher):
    """Runs a fit, validation or test in processes of its own."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        vars(self._strategy).pop("save_checkpoint", None)
        try:
            return super().launch(partial(_run, trainer, function), *args, trainer=trainer, **kwargs)
        except BaseException:
            # On the instance, over the method of its class: the workers have saved, or couldn't.
            vars(self._strategy)["save_checkpoint"] = _save_nothing
            raise


def _run(trainer: Trainer | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function in a worker, as Lightning does where no process has to be started."""
    try:
        return function(*args, **kwargs)
    except _TunerExitException:
        raise
    except BaseException as error:
        if trainer is not None:
            _interrupt(trainer, error)
        raise


def _save_nothing(*args: Any, **kwargs: Any) -> None:
    """This process has the model that its workers began with."""
