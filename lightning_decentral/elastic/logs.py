"""Loggers of an elastic run: what the founder's began, the next oldest's goes on with, in one run or folder.

    founder     opens its loggers; their versions are the run's
    others      have these versions, and open nothing while another one logs
    the next    opens them when it becomes the oldest, and logs the hyperparameters again

Where a logger keeps its version is its own: those of Lightning are known; of any other it is warned.
"""

import csv
import os
import warnings
from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.utilities import _log_hyperparams

KEPT = "_version", "_id", "_run_id", "_experiment_key"
"""Attributes in which loggers keep their version."""
ARGUMENTS = {"_wandb_init": "id"}
"""Arguments of the version, in what a logger keeps until it opens its run."""


def began(trainer: Trainer) -> list[Any]:
    """Versions of the loggers, which are open now."""
    for logger in _in_order(trainer.loggers):
        _open(logger)
    return [logger.version for logger in trainer.loggers]


def go_on(loggers: Sequence[Logger], versions: Sequence[Any]) -> None:
    """Make what these loggers log, if they ever do, go into the run of those versions."""
    for logger, version in zip(loggers, versions, strict=False):
        kept = vars(logger)
        for name in set(KEPT).intersection(kept):
            setattr(logger, name, version)
        for name in set(ARGUMENTS).intersection(kept):
            kept[name][ARGUMENTS[name]] = version
        if logger.version != version:
            warnings.warn(
                f"{type(logger).__name__} can't go on in the oldest worker's run {version!r}: if that one is lost, "
                f"what is logged goes to {logger.version!r}; give it a fixed version",
                stacklevel=2,
            )


def take_over(trainer: Trainer) -> None:
    """Log from now on: this worker is the oldest now."""
    for logger in _in_order(trainer.loggers):
        if type(logger) is CSVLogger:
            _open_with_rows(logger)
        else:
            _open(logger)
    _log_hyperparams(trainer)


def _in_order(loggers: Sequence[Logger]) -> list[Logger]:
    """W&B first, as Lightning does it: it wants to see TensorBoard begin."""
    return sorted(loggers, key=lambda logger: not isinstance(logger, WandbLogger))


def _open(logger: Logger) -> None:
    getattr(logger, "experiment", None)


def _open_with_rows(logger: CSVLogger) -> None:
    """Open a CSV log and keep its rows: it would remove what another worker wrote. A half-written row is cut off."""
    files, file = get_filesystem(logger.log_dir), os.path.join(logger.log_dir, ExperimentWriter.NAME_METRICS_FILE)
    rows = files.cat_file(file) if files.isfile(file) else b""
    rows = rows[: rows.rfind(b"\n") + 1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*exists and is not empty.*")
        writer = logger.experiment
    if rows:
        files.pipe_file(file, rows)
        writer.metrics_keys = next(csv.reader([rows.decode().splitlines()[0]]))
