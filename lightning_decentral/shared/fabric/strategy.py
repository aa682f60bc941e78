"""Base class of Fabric strategies: for a user's own loop, made of the same parts as the strategies for Trainers.

A round follows `optimizer.step()`. A Trainer knows when to evaluate the mean, to save and to end; a user's loop calls
`with strategy.mean():`, `fabric.save` and `strategy.finish()`."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_decentral.shared.compute.layout import ModelLayout, lay_states
from lightning_decentral.shared.coordination import Result
from lightning_decentral.shared.fabric.checkpoints import FabricCheckpoints
from lightning_decentral.shared.fabric.loop import Accumulating, FabricWorkerGroup
from lightning_decentral.shared.meeting import TIMEOUT
from lightning_decentral.shared.refusals import StartMethod, refuse_sync_batch_norm, refuse_unknown
from lightning_decentral.shared.replica_health import ReplicaHealth
from lightning_decentral.shared.settings import compare, of_method, of_optimizers, of_place, versions
from lightning_decentral.shared.updates import Unchecked, Unfollowed
from lightning_decentral.shared.wire.agreement import check_same_model, start_from_worker_0
from lightning_decentral.shared.wire.fsdp import refuse_sharded
from lightning_decentral.shared.wire.mean import MeanModel, mean, of_mean
from lightning_decentral.shared.wire.meeting.placement import adapt, own_device, take_placement, workers_of_host
from lightning_decentral.shared.wire.objects import gather_world
from lightning_decentral.shared.wire.transport import Transport, Wire

MEAN_STANDS = "the mean of the workers stands in the model's place"


class FabricWorkers(DDPStrategy):
    """Fabric's DDPStrategy without the DDP wrapper: models start equal, and workers communicate after each update.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: Fabric's own arguments give these.
        process_group_backend, start_method: as for Fabric's DDPStrategy.
        timeout: how long a worker waits for another, anywhere, before it ends.
    """

    wire: Wire | None = None  # groups that every method needs; None before `launch`, and for a single worker
    on_host: int | None = None  # workers of each host, where the environment has placed them
    root_device, num_processes = property(own_device), property(workers_of_host)
    gradient_check, followed = Unchecked(), Unfollowed()
    cut_off, heals, devices_per_worker = False, 0, 1
    introduction: Callable[[], Sequence[str]]  # lines printed at the first step
    own: ClassVar[Sequence[str]] = ()  # settings that may differ between workers
    drifts: ClassVar[bool]  # whether workers may differ between steps

    def __init__(
        self,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = TIMEOUT,
        start_method: StartMethod = "popen",
        **unknown: Any,  # ValueError for any other option
    ) -> None:
        refuse_unknown(type(self), unknown)
        settings: Any = {"process_group_backend": process_group_backend, "timeout": timeout}
        parts = accelerator, parallel_devices, cluster_environment, checkpoint_io, precision
        super().__init__(*parts, **settings, start_method=start_method)
        self.modules, self.optimizers = list[nn.Module](), list[Optimizer]()  # those that were set up
        self.steps = 0  # turns: one update of each optimizer
        self._begins = self._shown = False
        self._stepped: set[Optimizer] = set()  # optimizers that have taken their update of this turn
        self.model_layout, self.health = ModelLayout(), ReplicaHealth(self)
        self.mean_model, self._group = MeanModel(self.health.mean), FabricWorkerGroup(self, timeout)
        self._checkpoints = FabricCheckpoints(self, self.mean_model)
        self._backward_sync_control = Accumulating(self.accumulating)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} for {DDPStrategy.__module__.removesuffix('.strategies.ddp')}.Fabric>"

    # ---- what a method adds -----------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer) -> None:
        """Build the method's parts for an optimizer, if it has any, where there is more than one worker. Collective."""

    @abstractmethod
    def advance(self, optimizer: Optimizer) -> None:
        """Do the method's work after an update of `optimizer`."""

    def settle(self) -> None:
        """Wait for the messages in flight and apply them."""

    def share(self) -> float | None:
        """Return this worker's weight in the mean of the workers; all weights sum to one. None: all are equal."""
        return None

    def accumulating(self, module: nn.Module) -> AbstractContextManager[None]:
        """Context in which gradients of this module are only accumulated."""
        return nullcontext()

    @property
    def keeps(self) -> bool:
        """Return whether a worker has state that no other worker has, and that exact resuming needs."""
        return self.drifts

    def plan(self) -> dict[str, str]:
        """Return, as text, the settings that a run must share with the run that it resumes."""
        return {}

    def changeable(self) -> dict[str, str]:
        """Return, as text, the settings that may differ from those of the run that is resumed."""
        return {}

    @abstractmethod
    def progress_state(self) -> dict[str, Any]:
        """Return messages in flight and residuals of rounding, as tensors and primitives."""

    @abstractmethod
    def load_progress_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `progress_state` returned."""

    @abstractmethod
    def restart(self) -> None:
        """Begin the rounds anew from the parameters as they are now. Collective."""

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def place_on_hosts(self) -> None:
        """Adapt the method to the numbers of workers and hosts. ValueError: it can't serve them."""

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        take_placement(self)

    def _setup_distributed(self) -> None:
        adapt(self)  # before any worker communicates
        reset_seed()
        self._set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        self._group.come()
        compare({**versions(), **of_method(self, self.precision), **of_place(self)}, self._group.timeout, "set-up")
        self._group.join_groups()
        self._group.begin()

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Return the module itself, now with worker 0's parameters on all workers."""
        refuse_sharded(module)
        refuse_sync_batch_norm(type(self), module, asked=False)
        if self.wire is not None:
            with self._telling():
                self._group.setting_up(module)
                averaged, carried = of_mean(self.modules)
                if self.mean_model.diverged and {*module.parameters()} & {*averaged}:
                    self.settle()  # workers that have diverged in parts of this module begin at their mean
                    self.mean_model.take(averaged, carried)
                    self.restart()
                check_same_model(module, self.wire.roll)
                start_from_worker_0([*module.parameters(), *module.buffers()], self.wire.world, self.root_device)
                self.health.look(module.buffers())
        self.model_layout.note(module.parameters())
        self.modules = [*dict.fromkeys([*self.modules, module])]
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self.optimizers = [*dict.fromkeys([*self.optimizers, optimizer])]
        if self.wire is not None:
            with self._telling():
                self._group.setting_up(optimizer)
                compare(of_optimizers([optimizer]), self._group.timeout, "the optimizers")
                self.adopt(optimizer)
                self._group.watch()
        return optimizer

    # ---- a step -----------------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Take the user's update, exactly as in one process; then do the method's work after an update."""
        if self._shown:
            raise RuntimeError(f"{MEAN_STANDS}: call optimizer.step() after the block `with strategy.mean():`")
        self._group.set_ups.begin()  # not by an override of `backward`, which would refuse `loss.backward()`
        if isinstance(optimizer, LBFGS) and self.wire is not None and not self.drifts:
            # With its own loss each worker would call the closure a different number of times, and wait in vain.
            loss = kwargs["closure"]
            kwargs["closure"] = lambda: self.all_reduce(loss().detach().clone())
        with self._group.updating:
            output = super().optimizer_step(optimizer, **self.gradient_check.of_step(kwargs, optimizer, self.precision))
        # A turn is one update of each optimizer; optimizers that no longer step are left out.
        self._begins = not self._stepped or optimizer in self._stepped
        self._stepped = {optimizer} if self._begins else {*self._stepped, optimizer}
        self._group.set_ups.done()
        if self.wire is not None:
            self.mean_model.diverged = self.drifts
            with self._telling():
                self.advance(optimizer)
        self.steps += self._begins
        return output

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Report an exception that ends this worker to the others; give an error about a lost peer its reason."""
        try:
            yield
        except BaseException as error:
            self._group.leave(error)
            raise

    # ---- the mean of the workers ------------------------------------------------------------------------------------

    def mean_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the exact mean over the workers. Collective."""
        assert self.wire is not None
        return mean(tensors, self.wire.world, self.share())

    @contextmanager
    def mean(self) -> Iterator[None]:
        """Context in which every module that was set up has the mean of the workers; afterwards, bit for bit, its own
        parameters. Collective: all workers enter it after the same step."""
        if self._shown:
            raise RuntimeError(f"{MEAN_STANDS} already: don't nest `with strategy.mean():`")
        if self.mean_model.diverged:
            with self._telling():
                self.mean_model.show(*of_mean(self.modules))
        self._shown = True
        try:
            yield
        finally:
            self.mean_model.hide()
            self._shown = False

    def finish(self) -> None:
        """Set all modules to the mean of the workers, after messages in flight. Collective; the last call of a loop."""
        self._group.rest()
        if self.wire is not None:
            with self._telling():
                self.health.check_equal()
                if self.mean_model.diverged:
                    self.settle()
                    self.mean_model.take(*of_mean(self.modules))
                self.barrier()  # no worker leaves while another still receives from it

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Save a plain file with the mean of the workers and, with an optimizer in `state`, each worker's own state."""
        if self.wire is None:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        converted = self._convert_stateful_objects_in_state(state, filter=filter or {})
        with self._telling():
            self.health.check_equal()
            self._checkpoints.save(path, state, converted, storage_options)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load each worker's own state if all workers have one and `state` has an optimizer; otherwise the mean."""
        if self.wire is None:
            return super().load_checkpoint(path, state, strict, weights_only)
        with self._telling(), self._checkpoints.reading(path, state, weights_only):
            remainder: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
        for optimizer in self.optimizers:
            lay_states(optimizer)
        return remainder

    # ---- what checkpoints and the mean model need of a worker -------------------------------------------------------

    @property
    def lightning_module(self) -> Any:
        return nn.ModuleList(self.modules)

    def rounds(self) -> list[int]:
        return [self.steps]

    def replica_group(self) -> Transport | None:
        return None if self.wire is None else self.wire.world

    def meet(self, call: Callable[[], Result]) -> Result:
        return call()  # waiting workers aren't counted: a user's own loop can't be made to run one more round

    def gather(self, value: Any) -> list[Any]:
        """Gather every worker's value, in order of rank. Collective."""
        return gather_world(value)
