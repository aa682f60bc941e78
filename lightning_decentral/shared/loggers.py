"""Logger in addition to Lightning's own: a Weights & Biases run per worker."""

from argparse import Namespace
from collections.abc import Mapping
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import wandb
from lightning.fabric.utilities.logger import _convert_json_serializable, _convert_params, _sanitize_callable_params
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.torch_version import TorchVersion

from lightning_decentral.shared.checkpoint.runs import OfWorkers

STEP = "trainer/global_step"
SHARES = TorchVersion("0.19.9")  # The first W&B with a shared mode.


class WandbPerWorker(OfWorkers):
    """One W&B run for every worker, together in one group: each shows that worker's own losses, waiting and bytes.

    `lightning.pytorch.loggers.WandbLogger` makes one run, of worker 0; choose this one to see every worker's machine.
    A training that is resumed goes on in its runs.

    Args:
        project: of all the runs.
        group: what the runs have in common; by default the name of `save_dir`, then each training needs its own.
        save_dir: where W&B keeps its files.
        offline: write files only; `wandb sync` sends them later.
        id: of the shared run, and the beginning of each worker's id; the same on all workers. By default worker 0's
            choice under this package's strategies.
        shared: one run for all workers, by W&B's shared mode: worker k's keys begin with `worker_k/`, but worker 0's
            are as they are, and hosts' system metrics are labelled.

    Raises:
        ValueError: `shared` offline or with a W&B older than 0.19.9, which can't.
    """

    def __init__(
        self,
        *,
        project: str = "lightning-decentral",
        group: str | None = None,
        save_dir: str = ".",
        offline: bool = False,
        id: str | None = None,
        shared: bool = False,
    ) -> None:
        if shared and offline:
            raise ValueError(
                "shared=True needs a connection, got offline=True: give one of them, or sync runs per worker"
            )
        if shared and TorchVersion(wandb.__version__) < SHARES:
            raise ValueError(f"shared=True needs wandb {SHARES}, got {wandb.__version__}: pip install -U wandb")
        super().__init__(project, group or Path(save_dir).resolve().name, id)
        self.shared = shared
        self.offline = offline
        self._save_dir = save_dir
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
            rank = self._rank
            own: dict[str, Any] = {"name": f"worker {rank}", "id": f"{self.id}-{rank}"}
            if self.shared:
                own = {"id": self.id, "settings": shared_by(rank)}
            self._run = wandb.init(
                **own,
                project=self.project,
                group=self.group,
                dir=self._save_dir,
                config=self._settings,
                mode="offline" if self.offline else None,
                # Every writer of a shared run joins it by its id.
                resume=None if self.offline or self.shared else "allow",
            )
            if parent_process() is not None:  # forked and spawned workers end without `atexit`, where W&B would finish
                Finalize(self, self._run.finish, exitpriority=1)
            self._run.define_metric(STEP)
            self._run.define_metric("*", step_metric=STEP, step_sync=True)
        return self._run

    @property
    def _rank(self) -> int:
        return int(rank_zero_only.rank)  # type: ignore[attr-defined]

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self.shared and self._rank > 0:
            metrics = {f"worker_{self._rank}/{key}": value for key, value in metrics.items()}
        self.experiment.log({**metrics, **({} if step is None else {STEP: step})})

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        # Kept until the run begins: workers may not have been started yet.
        self._settings.update(_convert_json_serializable(_sanitize_callable_params(_convert_params(params))))
        if self._run is not None:
            self._run.config.update(self._settings, allow_val_change=True)


def shared_by(rank: int) -> wandb.Settings:
    """Settings of a worker in a run that all write to: worker 0 describes and ends it."""
    first = rank == 0
    label = f"worker {rank}"
    return wandb.Settings(mode="shared", x_primary=first, x_label=label, x_update_finish_state=first)
