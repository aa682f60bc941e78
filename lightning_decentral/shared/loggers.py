"""Logger in addition to Lightning's own: one Weights & Biases run for each worker."""

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
SHARES = TorchVersion("0.19.9")  # The first version of W&B with a shared mode.


class WandbPerWorker(OfWorkers):
    """Logs every worker to a W&B run of its own, all in one group: that worker's losses, waiting time and bytes sent.

    `lightning.pytorch.loggers.WandbLogger` logs worker 0 alone; choose `WandbPerWorker` to see every worker's machine.
    A resumed training continues its runs.

    Args:
        project: W&B project of all the runs.
        group: W&B group of all the runs; by default the name of `save_dir`, which then must differ between trainings.
        save_dir: folder of W&B's files.
        offline: write files only; `wandb sync` sends them later.
        id: id of the shared run, and the beginning of each worker's run id; equal on all workers. By default worker 0
            chooses it under this package's strategies.
        shared: log all workers to one run, by W&B's shared mode: worker k's keys begin with `worker_k/`, worker 0's
            have no prefix, and hosts' system metrics are labelled.

    Raises:
        ValueError: `shared` together with `offline`, or with a W&B older than 0.19.9, which has no shared mode.
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
            raise ValueError("shared=True needs a connection to W&B, got offline=True: give one of the two, not both")
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
    """Return a worker's settings in a W&B run that all workers write to: worker 0 describes and ends the run."""
    first, label = rank == 0, f"worker {rank}"
    return wandb.Settings(mode="shared", x_primary=first, x_label=label, x_update_finish_state=first)
