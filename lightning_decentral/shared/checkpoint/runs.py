"""Runs that loggers write to: a training that is resumed or requeued goes on in the run of its checkpoint.

Lightning opens the loggers before it reads the checkpoint, and a W&B run can't be changed once it is open. So a
launcher looks the id up in the file, without its tensors, before anything is opened.
"""

import json
import pickletools
import zipfile
from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.trainer.states import TrainerFn

KEY = "lightning_decentral.runs"  # In a checkpoint: JSON of the loggers' ids, in their order.

RUN_IDS = "_id", "_run_id", "_experiment_key"
"""Attributes in which loggers of W&B, MLflow and Comet keep the id of their run."""
ARGUMENTS = {"_wandb_init": "id"}  # Arguments of the id, in what a logger keeps until it opens its run.
CHECKPOINT = 4  # its place among the arguments of Lightning's fit


def set_version(logger: Logger, version: Any, names: Sequence[str] = RUN_IDS) -> None:
    """Make what this logger logs go into that run; it isn't open yet."""
    kept = vars(logger)
    for name in set(names).intersection(kept):
        setattr(logger, name, version)
    for name in set(ARGUMENTS).intersection(kept):
        kept[name][ARGUMENTS[name]] = version


def ids_of(loggers: Sequence[Logger]) -> list[Any]:
    """Ids of the loggers' runs; None for a logger without, such as CSV's."""
    return [logger.version if set(RUN_IDS).intersection(vars(logger)) else None for logger in loggers]


def keep(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Add the runs to a checkpoint."""
    ids = ids_of(trainer.loggers)
    if any(ids):
        checkpoint[KEY] = json.dumps(ids)


def kept_in(path: str) -> list[Any]:
    """Ids in the file of a checkpoint, of which nothing is executed or loaded; none where it has none."""
    files = get_filesystem(path)
    if not files.isfile(path):
        return []
    with files.open(path, "rb") as file:
        if not zipfile.is_zipfile(file):
            return []
        with zipfile.ZipFile(file) as archive:
            pickles = [archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl")]
    for content in pickles:
        texts = [value for _, value, _ in pickletools.genops(content) if isinstance(value, str)]
        if KEY in texts[:-1]:
            found: list[Any] = json.loads(texts[texts.index(KEY) + 1])
            return found
    return []


def go_on(trainer: Trainer, path: str | None) -> None:
    """Make the loggers go on in the runs of the checkpoint that a fit would resume from; one with an id keeps it."""
    of = trainer._checkpoint_connector
    if path or not of._user_managed:  # "last", and what SLURM's requeue finds
        path = of._parse_ckpt_path(TrainerFn.FITTING, path, model_provided=True, model_connected=True)  # type: ignore[assignment]
    ids = kept_in(str(path or trainer.ckpt_path or ""))
    for logger, own, kept in zip(trainer.loggers, ids_of(trainer.loggers), ids, strict=False):
        if kept and not own:
            set_version(logger, kept)


def launched(trainer: Trainer | None, arguments: Sequence[Any]) -> None:
    """Go on in the runs of what a Trainer is launched with, where that is a fit."""
    if trainer is not None and trainer.state.fn == TrainerFn.FITTING and len(arguments) > CHECKPOINT:
        go_on(trainer, arguments[CHECKPOINT])
