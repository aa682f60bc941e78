"""Logger in addition to Lightning's own: a Weights & Biases run per worker."""

import uuid
from argparse import Namespace
from collections.abc import Mapping
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import wandb
from lightning.fabric.utilities.logger import _convert_json_serializable, _convert_params, _sanitize_callable_params
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

STEP = "trainer/global_step"


class WandbPerWorker(Logger):
    """One W&B run for every worker, together in one group: each shows that worker's own losses, waiting and bytes.

    `lightning.pytorch.loggers.WandbLogger` makes one run, of worker 0; choose this one to see every worker's machine.

    Args:
        project: of all the runs.
        group: what the runs have in common; by default the name of `save_dir`, then each training needs its own.
        save_dir: where W&B keeps its files.
        offline: write files only; `wandb sync` sends them later.
    """

    def __init__(
        self,
        *,
        project: str = "lightning-decentral",
        group: str | None = None,
        save_dir: str = ".",
        offline: bool = False,
    ) -> None:
        super().__init__()
        self.project = project
        self.group = group or Path(save_dir).resolve().name
        self.offline = offline
        self._save_dir = save_dir
        self._token = uuid.uuid4().hex[:8]
        self._settings: dict[str, Any] = {}
        self._run: Any = None

    @property
    def name(self) -> str:
        return self.project

    @property
    def version(self) -> str:
        return self.group

    @property
    def save_dir(self) -> str:
        return self._save_dir

    @property
    def experiment(self) -> Any:
        """This worker's `wandb.Run`."""
        if self._run is None:  # not in the constructor, where no worker knows its rank
            rank = rank_zero_only.rank  # type: ignore[attr-defined]
            self._run = wandb.init(
                project=self.project,
                group=self.group,
                name=f"worker {rank}",
                id=f"{self._token}-{rank}",
                dir=self._save_dir,
                config=self._settings,
                mode="offline" if self.offline else None,
                resume=None if self.offline else "allow",
            )
            if parent_process() is not None:  # forked and spawned workers end without `atexit`, where W&B would finish
                Finalize(self, self._run.finish, exitpriority=1)
            self._run.define_metric(STEP)
            self._run.define_metric("*", step_metric=STEP, step_sync=True)
        return self._run

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.experiment.log({**metrics, **({} if step is None else {STEP: step})})

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        # Kept until the run begins: workers may not have been started yet.
        self._settings.update(_convert_json_serializable(_sanitize_callable_params(_convert_params(params))))
        if self._run is not None:
            self._run.config.update(self._settings, allow_val_change=True)
