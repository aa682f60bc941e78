"""An elastic worker as Lightning sees it: a single process, ranked by age among the members; the members' collectives.

The oldest member logs. When it ends, the next oldest continues in the same logger run or folder:

    founder     opens its loggers; their versions become the run's versions
    others      take over these versions, and open no logger while another worker logs
    the next    opens its loggers when it becomes the oldest, and logs the hyperparameters again

Attributes in which Lightning's loggers keep their version are known; other loggers get a warning."""

import csv
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.rank_zero import rank_zero_only as rank_zero_of_fabric
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_decentral.elastic import launcher
from lightning_decentral.elastic.checks import JoinCheck
from lightning_decentral.elastic.compute.gathered import first_of, means_of, moved, reduced
from lightning_decentral.elastic.loops import plain
from lightning_decentral.elastic.plan.view import ElasticSettings
from lightning_decentral.elastic.wire.island_participants import member_of
from lightning_decentral.elastic.wire.participant import Participant
from lightning_decentral.elastic.wire.starter import LOBBY, SEAT, STARTER
from lightning_decentral.shared.checkpoint import runs
from lightning_decentral.shared.checkpoint.checkpoints import launched_by
from lightning_decentral.shared.setup_and_step import WorkersStrategy


class OneProcess(WorkersStrategy):
    """Strategy whose members form no process group, as members change. Only an island's devices form a group."""

    elastic: ElasticSettings
    _member: Participant | None
    _given: JoinCheck
    devices: int  # Number of devices of one worker.
    batches: int
    _rank: int | None = None
    _early: Participant | None = None  # The participant, while this worker is set up.
    _logs = False  # True once this worker has logged for the run.
    _beside = 0

    def _configure_launcher(self) -> None:
        cluster, devices, method = self.cluster_environment, self.parallel_devices, self._start_method
        assert cluster is not None
        assert devices is not None
        launcher.refuse_restarting_all(cluster, self.devices)
        if STARTER in os.environ:
            self._beside = len(devices)
            seat = int(os.environ.get(SEAT, "0"))  # other workers on this machine take the following devices
            self.parallel_devices = [devices[seat % len(devices)]]
            self._launcher = launcher.FollowingLauncher(cluster, 1, 1)
        elif self._starts_others:
            launcher.refuse_unstarted(self.elastic, self.devices, cluster, len(devices), self.num_nodes, str(method))
            self._launcher = launcher.ElasticLauncher(cluster, len(devices), 1, self.elastic)
        else:
            self._launcher = launched_by(self, str(method))

    @property
    def _starts_others(self) -> bool:
        """True if this process only starts workers and trains nothing itself."""
        return not (self.elastic.lobby or LOBBY in os.environ or STARTER in os.environ)

    def set_world_ranks(self) -> None:
        """Give rank 0 to the worker that was started first until the oldest member is known; never to a starter."""
        assert self.cluster_environment is not None
        if self._rank is None:
            later = self.cluster_environment.local_rank() > 0
            self._rank = int(later or self._starts_others)
        super().set_world_ranks()

    def setup_environment(self) -> None:
        """Set up; then, for a fit, find out which worker founds the run, before any worker opens a log or a folder."""
        super().setup_environment()
        trainer = self._module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            self.refuse(self._module, fitting=True)  # before others wait for this one; `setup` has the whole model
            self._group.join_groups()
            self._early = self.comes()
            founds = self._early.founds()
            self._logs = founds and self._early.leads
            self._rank_as(int(not founds))
            versions = self.broadcast(began(trainer) if founds else None)
            if not founds:
                go_on(trainer.loggers, versions or ())

    def comes(self) -> Participant:
        """Make this worker's `Participant`, which connects to the lobby."""
        elastic = replace(self.elastic, lobby=self.elastic.lobby or os.environ[LOBBY])
        seconds = self._group.timeout.total_seconds()
        # Called when a donor has sent its state, after set-up.
        return member_of(elastic, seconds, self.wire, self.batches, lambda value: self._given.refuses(value))

    def setup_distributed(self) -> None:
        if self.devices > 1:
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()

    @property
    def local_rank(self) -> int:
        assert self.cluster_environment is not None
        return self.cluster_environment.local_rank() if self.devices > 1 else 0

    @property
    def global_rank(self) -> int:
        """Rank of this worker: 0 for the oldest member, which writes files and logs."""
        return self._rank or 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    def _rank_as(self, rank: int) -> None:
        self._rank = rank
        of_all: Any = rank_zero_only
        of_all.rank = rank_zero_of_fabric.rank = rank  # type: ignore[attr-defined]

    # ---- collectives in place of Lightning's ------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        if self._member is not None and self.wire is not None:
            self._member.leave()  # before this worker's devices find out which one is lost, and why: that takes seconds
        super().on_exception(exception)

    def together(self, value: Any, made: Callable[[Sequence[Any]], Any], of_each: bool = True) -> Any:
        """Return `made` of the values of all members' devices (or first devices only), the oldest member first; outside
        of training, of this worker's values. Tensors travel through the host, and come back to their device."""
        # After an exception a worker calls no collective: the others still wait for its message of the round.
        given, member = moved(value, torch.device("cpu")), None if self._module.trainer.interrupted else self._member
        calls = None if member is None else member.together if of_each else member.of_members
        found = made([given]) if calls is None else calls(given, made)
        travelled = any(leaf.device.type != "cpu" for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
        return moved(found, self.root_device) if travelled else found

    def mean_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Mean over the members' first devices: devices of an island have equal parameters, and buffers as under DDP.
        Tensors of other than floating type are the oldest member's."""
        means = self.together([tensor.detach() for tensor in tensors], means_of, of_each=False)
        return [mean.clone() for mean in means]

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: values of other members are awaited where they are needed."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the oldest member's object (in set-up the founder's); return `obj` where that can't be sent."""
        if self._member is None and self._early is not None:
            return self._early.as_founded(obj)
        return self.together(obj, first_of) if plain("", obj) else obj

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        value = tensor if isinstance(tensor, Tensor) else torch.tensor(float(tensor))
        return self.together(value.detach(), partial(reduced, str(reduce_op).lower().rpartition(".")[2])).clone()

    def gather(self, value: Any) -> list[Any]:
        return list(self.together(value, list))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        rows: Tensor = self.together(tensor.detach(), torch.stack)  # type: ignore[arg-type]  # of a list
        return rows

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        given = self.gather(bool(decision))
        return bool(min(given) if all else max(given))


KEPT = "_version", "_run_id", "_experiment_key"  # Where Lightning's loggers, except W&B's, keep their version.


def began(trainer: Trainer) -> list[Any]:
    """Open the loggers and return their versions."""
    for logger in _in_order(trainer.loggers):
        getattr(logger, "experiment", None)
    return [logger.version for logger in trainer.loggers]


def go_on(loggers: Sequence[Logger], versions: Sequence[Any]) -> None:
    """Set these versions on the loggers, so that this worker would continue the oldest worker's log."""
    for logger, version in zip(loggers, versions, strict=False):
        for name in set(KEPT).intersection(vars(logger)):
            setattr(logger, name, version)
        if isinstance(logger, WandbLogger):
            runs.set_id(logger, version)
        if logger.version != version:
            warnings.warn(
                f"{type(logger).__name__} can't continue the oldest worker's run {version!r}: if that worker is lost, "
                f"values are logged to {logger.version!r}; give the logger a fixed version",
                stacklevel=2,
            )


def take_over(trainer: Trainer) -> None:
    """Open the loggers, and log from now on, as this worker has become the oldest."""
    for logger in _in_order(trainer.loggers):
        if type(logger) is CSVLogger:
            _open_with_rows(logger)
        else:
            getattr(logger, "experiment", None)
    _log_hyperparams(trainer)


def _in_order(loggers: Sequence[Logger]) -> list[Logger]:
    """Sort the loggers with W&B first, as Lightning does: W&B must see TensorBoard begin."""
    return sorted(loggers, key=lambda logger: not isinstance(logger, WandbLogger))


def _open_with_rows(logger: CSVLogger) -> None:
    """Open a CSV log and keep the rows that another worker wrote, which Lightning would remove; no half-written row."""
    files, file = get_filesystem(logger.log_dir), os.path.join(logger.log_dir, ExperimentWriter.NAME_METRICS_FILE)
    rows = files.cat_file(file) if files.isfile(file) else b""
    rows = rows[: rows.rfind(b"\n") + 1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*exists and is not empty.*")
        writer = logger.experiment
    if rows:
        files.pipe_file(file, rows)
        writer.metrics_keys = next(csv.reader([rows.decode().splitlines()[0]]))
