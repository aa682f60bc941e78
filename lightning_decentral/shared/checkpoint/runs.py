"""W&B runs: a resumed or requeued training continues the W&B run that its checkpoint names.

Lightning opens the loggers before it reads the checkpoint, and a run can't be changed once it is open. So a launcher
looks the id up in the file, without its tensors, before anything is opened."""

import json
import os
import pickletools
import sys
import uuid
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from itertools import islice
from typing import Any, TypeAlias, TypeGuard

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

KEY = "lightning_decentral.runs"  # In a checkpoint: JSON of {project: id}.
CHECKPOINT = 4  # position of `ckpt_path` among the arguments of Lightning's fit


class OfWorkers(Logger):
    """Logger whose runs, one for each worker or one for all, share one id."""

    def __init__(self, project: str, group: str, id: str | None) -> None:
        super().__init__()
        self.project, self.group, self.id = project, group, id or uuid.uuid4().hex[:8]
        self.may_go_on = id is None


Resuming: TypeAlias = WandbLogger | OfWorkers


def set_id(logger: Resuming, run: str) -> None:
    """Make the logger, whose run isn't open yet, log to the run of this id."""
    if isinstance(logger, OfWorkers):
        logger.id = run
    else:
        logger._id = logger._wandb_init["id"] = run


def name_of(logger: Resuming) -> str:
    """Return the name of the logger's run in a checkpoint; a project's name has no slash."""
    return f"{logger.project}/workers" if isinstance(logger, OfWorkers) else str(logger._project)


def agree(loggers: Sequence[Logger], broadcast: Callable[[Any], Any]) -> None:
    """Give all workers' loggers worker 0's id and group, as each process drew its own: collective, before runs open.

    One broadcast whatever a worker logs to, as workers may have different loggers. A logger whose project worker 0
    doesn't log to keeps its own."""
    own = [logger for logger in loggers if isinstance(logger, OfWorkers)]
    first = broadcast([(logger.project, logger.id, logger.group) for logger in own])
    for logger in own:
        if alike := next((one for one in first if one[0] == logger.project), None):
            _, logger.id, logger.group = alike
            first.remove(alike)  # a second logger of the project has worker 0's second id


def keep(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Add the ids of the loggers' runs to a checkpoint."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]
    ids = {name_of(logger): getattr(logger._experiment, "id", None) or logger._id for logger in loggers}
    ids |= {name_of(logger): logger.id for logger in trainer.loggers if isinstance(logger, OfWorkers)}
    if any(ids.values()):
        checkpoint[KEY] = json.dumps(ids)


def kept_in(path: str) -> dict[str, str]:
    """Read {project: id} from a checkpoint's file, without executing or loading any of it; empty where it has none."""
    with suppress(Exception):  # Missing, damaged or no archive: the load reports it.
        with get_filesystem(path).open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            content = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
        rest = BytesIO(content[content.rindex(KEY.encode()) + len(KEY) :])
        # In the pickle the value follows its key, after an opcode that memoizes the key.
        text = next(value for _, value, _ in islice(pickletools.genops(rest), 2) if isinstance(value, str))
        return {project: run for project, run in json.loads(text).items() if isinstance(run, str)}
    return {}


def without_run(logger: Logger) -> TypeGuard[Resuming]:
    """Return whether this is a W&B logger whose run has no id of the user's choice, so that it may resume a run."""
    if isinstance(logger, OfWorkers):
        return logger.may_go_on
    if not isinstance(logger, WandbLogger) or logger._experiment is not None or logger._id:
        return False
    return logger._wandb_init.get("resume") not in (None, False, "never")


def opened() -> Any:
    """Return the W&B run that is open in this process, or None."""
    return getattr(sys.modules.get("wandb"), "run", None)


@contextmanager
def finished() -> Iterator[None]:
    """Finish a W&B run opened in this block: forked and spawned workers end without `atexit`, where W&B finishes it."""
    before, failed = opened(), True
    try:
        yield
        failed = False
    finally:
        if (run := opened()) is not None and run is not before:
            run.finish(exit_code=int(failed))


def decided() -> bool:
    """Return whether the W&B run is fixed already: by the environment, by an open run, or by a sweep.

    Members of a sweep may all begin with one checkpoint: each has a run of its own."""
    if os.environ.get("WANDB_RUN_ID") or opened() is not None:
        return True
    hydra = getattr(sys.modules.get("hydra.core.hydra_config"), "HydraConfig", None)
    return hydra is not None and hydra.initialized() and str(hydra.get().mode).endswith("MULTIRUN")


def go_on(trainer: Trainer, path: str | None) -> None:
    """Make W&B loggers continue the runs that the checkpoint to resume from names for their projects."""
    loggers = [logger for logger in trainer.loggers if without_run(logger)]
    if not loggers or decided():
        return
    connector = trainer._checkpoint_connector
    if path or not connector._user_managed:  # "last", and what SLURM's requeue finds
        path = connector._parse_ckpt_path(TrainerFn.FITTING, path, model_provided=True, model_connected=True)  # type: ignore[assignment]
    ids = kept_in(str(path or trainer.ckpt_path or ""))
    for logger in loggers:
        if run := ids.get(name_of(logger)):
            set_id(logger, run)
            rank_zero_info(
                f"wandb continues run {run} of the checkpoint; for a new run give the logger an id of its own"
            )


def launched(trainer: Trainer | None, arguments: Sequence[Any]) -> None:
    """Continue the W&B runs of the checkpoint that a Trainer is launched with, where it is launched to fit."""
    if trainer is not None and trainer.state.fn == TrainerFn.FITTING and len(arguments) > CHECKPOINT:
        go_on(trainer, arguments[CHECKPOINT])
