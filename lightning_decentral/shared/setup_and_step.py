"""Base class of all strategies with several workers: order of set-up, optimizer step, evaluation; no DDP wrapper.

Its parts: `WorkerGroup` (process groups), `SameSettings`, `MeanModel`, `Evaluation`, `ReplicaHealth`, `Checkpoints`."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.shared.checkpoint import runs
from lightning_decentral.shared.checkpoint.checkpoints import Checkpoints, launched_by
from lightning_decentral.shared.checkpoint.reading import of_this_model
from lightning_decentral.shared.coordination import Result
from lightning_decentral.shared.evaluation import Evaluation
from lightning_decentral.shared.introduction import introduce
from lightning_decentral.shared.meeting import TIMEOUT, WorkerGroup
from lightning_decentral.shared.refusals import StartMethod, named, refuse_sync_batch_norm, refuse_unknown
from lightning_decentral.shared.replica_health import ReplicaHealth
from lightning_decentral.shared.settings import SameSettings
from lightning_decentral.shared.updates import Follows, Unchecked, Unfollowed
from lightning_decentral.shared.wire.agreement import uneven
from lightning_decentral.shared.wire.mean import MeanModel, of_mean
from lightning_decentral.shared.wire.meeting.placement import adapt, own_device, take_placement, workers_of_host
from lightning_decentral.shared.wire.objects import broadcast_world, gather_rows, gather_world, reduce_alike
from lightning_decentral.shared.wire.transport import Transport, Wire


class WorkersStrategy(DDPStrategy):
    """Runs Lightning's loops on several workers, which wait for each other only where the method needs it.

    Args:
        accelerator, parallel_devices, checkpoint_io, precision_plugin: the Trainer's own arguments give these.
        cluster_environment: the environment that started the processes.
        process_group_backend: nccl, gloo, ...; by default the device's.
        timeout: how long a worker waits for another, in set-up, in a step or anywhere, before it ends.
        start_method: how the processes of a host are started.

    Raises:
        ValueError: for any other option, also those of DDP's wrapper: no wrapper reads them.
    """

    checkpoints: Checkpoints  # how this method saves and resumes; the constructor of a subclass sets it
    wire: Wire | None = None  # the groups that every method needs; None before set-up, and for a single worker
    on_host: int | None = None  # workers of each host, where the environment has placed them
    root_device, num_processes = property(own_device), property(workers_of_host)
    cut_off = property(attrgetter("_group.cut_off"))
    __repr__ = named
    gradient_check = Unchecked()
    followed: Follows = Unfollowed()
    own: ClassVar[Sequence[str]] = ()  # may differ between workers: arguments, `parameters of the optimizers`
    devices_per_worker: int = 1
    heals: int = 0  # how often a worker may be healed by the others (if more than 0, also when a mean is taken)

    def __init__(
        self,
        *,  # every one by name: LightningCLI reads the constructor's signature, and passes every option that it finds
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = TIMEOUT,
        start_method: StartMethod = "popen",
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), unknown)
        parts = accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        settings: dict[str, Any] = {"process_group_backend": process_group_backend, "timeout": timeout}
        super().__init__(*parts, **settings, start_method=start_method)
        self._group = WorkerGroup(self, timeout)
        self._same, self.health, self.evaluation = SameSettings(self), ReplicaHealth(self), Evaluation(self)
        self.mean_model = MeanModel(self.health.mean, self.shown)  # methods: lambdas can't be pickled

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register nothing: the package registers its names itself, and DDP's method would name this class `ddp`."""

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    @abstractmethod
    def drifts(self) -> bool:
        """Return whether the workers' parameters may differ between steps."""

    def refuse(self, module: nn.Module, fitting: bool) -> None:
        """Raise ValueError for a module that the method can't train."""
        refuse_sync_batch_norm(type(self), module, asked=self._layer_sync is not None)

    @abstractmethod
    def place(self, fitting: bool) -> None:
        """Move the model to its device and make it equal on all workers, before the optimizers exist."""

    @abstractmethod
    def prepare(self, wire: Wire | None) -> None:
        """Build what training needs, after the optimizers. `wire` is None for a single worker."""

    @abstractmethod
    def advance(self, optimizer: Optimizer) -> None:
        """Do the method's work after an update of `optimizer`, such as a round."""

    @abstractmethod
    def rounds(self) -> list[int]:
        """Return the number of rounds so far for each optimizer; an empty list outside of training."""

    @abstractmethod
    def wanted(self) -> list[int]:
        """Return how many rounds the others must launch before this worker can continue, its present round included.
        Another thread calls this at any time. A number too high would ask for a round of a worker whose epoch ended."""

    def take_part(self, index: int) -> None:
        """Run one round of the optimizer with that index, without an update; RuntimeError if the method has none."""
        raise uneven(self.global_rank, self.rounds()[index])

    @abstractmethod
    def mean_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the exact mean over the workers. Collective."""

    def replica_group(self) -> Transport | None:
        """Return the process group of all replicas of this worker's parameters, or None. Collective."""
        return None

    def plan(self) -> dict[str, str]:
        """Return, as text, the settings that a run must share with the run that it resumes."""
        return {}

    def changeable(self) -> dict[str, str]:
        """Return settings that may differ from those of the run that is resumed: a difference is reported."""
        return {}

    def introduction(self) -> Sequence[str]:
        """Return lines to print when training starts: method, workers, bytes of a step, evaluated model, a hint."""
        return ()

    def settle(self) -> None:
        """Wait for the messages in flight and apply them."""

    @abstractmethod
    def release(self) -> None:
        """Give the parameters storage of their own again, not views of buckets."""

    def place_on_hosts(self) -> None:
        """Adapt the method to the numbers of workers and hosts, before they communicate. ValueError: it can't."""

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._launcher = launched_by(self, self._start_method)
        take_placement(self)

    def setup_distributed(self) -> None:
        """Create the process group as DDPStrategy does, with an error that names missing workers."""
        adapt(self)  # before any worker communicates
        reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        self._group.come()
        self._same.plan()
        runs.agree(self._module.trainer.loggers, partial(WorkersStrategy.broadcast, self))

    def setup(self, trainer: Trainer) -> None:
        """Set up as DDPStrategy does, but without a wrapper, and with equal models at the start."""
        self._same.resuming(False)
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.refuse(self.model, fitting)
        self.model = self.convert(self.model)
        self.place(fitting)
        if fitting:
            self.setup_optimizers(trainer)
            self._same.optimizers()
        self.setup_precision_plugin()
        self.evaluation.watch(trainer)
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            self.prepare(self.wire)
            self.checkpoints.resume()
            self._group.coordinate(trainer, self)
        self._group.ready = True

    def convert(self, module: nn.Module) -> nn.Module:
        return self.precision_plugin.convert_module(module)

    def meet(self, call: Callable[[], Result]) -> Result:
        """Run a call that waits for other workers, under the coordination of the fit that runs now."""
        return self._group.coordination.meet(call)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self.cut_off:
            self.meet(partial(super().barrier, *args, **kwargs))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.meet(lambda: broadcast_world(obj, src))

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        return self.meet(partial(reduce_alike, super().reduce, self._group.phase, tensor, group, reduce_op))

    def gather(self, value: Any) -> list[Any]:
        return self.meet(lambda: gather_world(value))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self.wire is None or self.health.gathers(sync_grads) or group is not None:
            return self.meet(partial(super().all_gather, tensor, group, sync_grads))
        return gather_rows(self.wire.world, tensor, self.meet)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take the user's update, exactly as in one process; then do the method's work after an update."""
        coordination = self._group.coordination
        with coordination.updating:
            checked = self.gradient_check.after(closure, optimizer, self.precision_plugin)
            output = super().optimizer_step(optimizer, checked, model, **kwargs)
        if self.wire is not None:
            self.mean_model.diverged = self.drifts  # not earlier: up to the first update all models are equal
            with coordination.waiting:
                self.advance(optimizer)
                coordination.tick()
        return output

    def shown(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the tensors that the mean model has in place of these tensors of the module."""
        return tensors

    @property
    def shows_mean(self) -> bool:
        """Return whether the mean model is evaluated, not this worker's own model."""
        return self.mean_model.diverged

    @property
    def ends_at_mean(self) -> bool:
        """Return whether all workers have the mean model when training ends."""
        return True

    def averaged(self) -> tuple[list[Tensor], list[Tensor]]:
        return of_mean([self._module])

    def on_validation_end(self) -> None:
        self.mean_model.hide()

    on_test_end = on_predict_end = on_validation_end

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.mean_model.own(super().lightning_module_state_dict())  # the mean may be swapped in for it

    def on_train_end(self) -> None:
        super().on_train_end()
        self.evaluation.arrive()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        runs.keep(self._module.trainer, checkpoint)
        with self._group.saving():
            self.health.check_equal()
            self.checkpoints.save(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        self.checkpoints.remove(filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._same.resuming(True)
        return self.checkpoints.load(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with of_this_model():
            super().load_model_state_dict(checkpoint, strict=strict)

    def on_train_start(self) -> None:
        super().on_train_start()
        self.checkpoints.start()
        introduce(self.introduction(), self._module.trainer)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._group.leave(exception)

    def teardown(self) -> None:
        cut_off = self.cut_off
        self._group.coordination.close()
        self.evaluation.close()
        self.release()
        self._group.leave_groups(cut_off)
        super().teardown()
        self._group.close(cut_off)
