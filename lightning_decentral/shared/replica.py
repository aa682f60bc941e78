"""What strategies with one model replica per worker share: launching, ranks, the mean model, stopping together.

The replicas may differ while training. Everything that Lightning does once for all of them (validation, checkpoints,
the model handed back after `fit`) sees their exact mean; each worker's own trajectory is never touched by it.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.shared.checkpoint import ReplicaCheckpoints
from lightning_decentral.shared.loop_patches import HostLoops
from lightning_decentral.shared.registration import StepWatch, refuse_sync_batch_norm, refuse_unknown
from lightning_decentral.shared.wire.agreement import RollCall, StopFlag, check_same_model, start_from_worker_0
from lightning_decentral.shared.wire.fsdp import refuse_sharded
from lightning_decentral.shared.wire.mean import floating, mean
from lightning_decentral.shared.wire.transport import Wire, connect, connected

Evaluate = Literal["mean", "own"]


class ReplicaStrategy(ReplicaCheckpoints, DDPStrategy):
    """A DDP strategy without the gradient all-reduce: no wrapper module, gradients stay local.

    Args:
        evaluate: "mean" validates, tests and predicts with the mean of the workers, "own" with each worker's model.
        sigterm_every: rounds between two looks whether some worker got a SIGTERM (read one interval later).
        **ddp: what DDPStrategy itself takes: cluster_environment, process_group_backend, start_method, ...
    """

    def __init__(
        self,
        *,
        evaluate: Evaluate = "mean",
        sigterm_every: int = 10,
        timeout: timedelta | None = default_pg_timeout,
        **ddp: Any,
    ) -> None:
        refuse_unknown(type(self), ddp)
        super().__init__(timeout=timeout, **ddp)
        if evaluate not in ("mean", "own"):
            raise ValueError(f"evaluate must be 'mean' or 'own', got {evaluate!r}")
        if sigterm_every < 1:
            raise ValueError(f"sigterm_every must be at least 1, got {sigterm_every}")
        self.evaluate: Evaluate = evaluate
        self._sigterm_every = sigterm_every
        self._wire: Wire | None = None
        self._roll: RollCall | None = None
        self._stop: StopFlag | None = None
        self._met = 0
        self._fits = 0
        self._steps = StepWatch(())
        self._host: HostLoops | None = None

    # ---- what a method adds -------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self, wire: Wire | None) -> None:
        """Check the plan and build what training needs; the optimizers exist. No wire: a single worker."""

    def arrange(self) -> None:
        """The model is equal everywhere and the optimizers don't exist yet."""

    @abstractmethod
    def advance(self, optimizer: Optimizer) -> None:
        """Run one round after the update of `optimizer`."""

    @abstractmethod
    def take_part(self, index: int) -> None:
        """Run one round of the optimizer with that index, without an update."""

    @abstractmethod
    def rounds(self) -> list[int]:
        """Rounds taken, one number for each optimizer."""

    @abstractmethod
    def wanted(self) -> list[int]:
        """Rounds that the others must have launched before this worker can go on."""

    @abstractmethod
    def release(self) -> None:
        """Give the model its own storage back."""

    def share(self) -> float | None:
        """This worker's weight in the mean of the workers; all sum to one. None: all equal."""
        return None

    # ---- set-up -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """As DDPStrategy, but without a wrapper, and with equal models at the start."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        refuse_sync_batch_norm(type(self), self.model, asked=self._layer_sync is not None)
        refuse_sharded(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self._wire is None and connected():
            self._wire = connect(self.root_device, self._timeout)
        self._equalize(fitting)
        self.arrange()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            self.prepare(self._wire)
            self._resume()
            self._listen(trainer)

    def configure_ddp(self) -> None:
        """No wrapper."""

    def _equalize(self, fitting: bool) -> None:
        """Start equal: restored workers keep what they restored, replicas that a fit left apart are averaged, and
        otherwise all take worker 0's values."""
        if self._wire is None or (not fitting and self.evaluate == "own"):
            return
        module = self._module
        check_same_model(module, self._wire.roll)
        if fitting and self.resuming:
            return
        if self._apart:
            self._average_in_place()
        start_from_worker_0([*module.parameters(), *module.buffers()], self._wire.world)

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # ---- training -----------------------------------------------------------------------------------------------

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """The user's update, exactly as in one process; then one round."""
        with self._steps:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._wire is not None:
            self._apart = self.drifts
            with self._watched():
                self.advance(optimizer)
                if optimizer is self.optimizers[0] and self._stop is not None:
                    self._stop.tick()
        return output

    def _watched(self) -> RollCall:
        assert self._roll is not None
        return self._roll

    def _take_part(self, index: int) -> None:
        self.take_part(index)
        if index == 0 and self._stop is not None:
            self._stop.tick()

    # ---- stopping together --------------------------------------------------------------------------------------

    def _listen(self, trainer: Trainer) -> None:
        if self._wire is None:
            return
        self._stop = StopFlag(self._wire.flags, self._sigterm_every)
        self._roll = RollCall(
            self._wire.roll,
            self._wire.store,
            self.rounds,
            self.wanted,
            self._take_part,
            lambda: self._met,
            f"fit-{self._fits}",
        )
        self._fits += 1
        self._steps = StepWatch(self.optimizers)
        self._host = HostLoops(trainer, self._stop, self._roll, self._forward_signal)

    def _forward_signal(self, signum: int) -> None:
        if self.launcher is not None:
            self.launcher.kill(signum)

    # ---- Lightning's collectives: counted, so that a worker that waits in one alone is found ------------------------

    def _meet(self, call: Callable[[], Any]) -> Any:
        if self._roll is None:
            return call()
        self._met += 1
        with self._roll:
            return call()

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all workers."""
        if not self.alone:
            self._meet(lambda: super(ReplicaStrategy, self).barrier(*args, **kwargs))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Worker `src`'s object."""
        return self._meet(lambda: super(ReplicaStrategy, self).broadcast(obj, src))

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """The mean, or another reduction, over the workers."""
        reduced: Tensor = self._meet(lambda: super(ReplicaStrategy, self).reduce(tensor, group, reduce_op))
        return reduced

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """[size, ...]: every worker's tensor."""
        if self._wire is None or sync_grads or group is not None:
            gathered: Tensor = self._meet(lambda: super(ReplicaStrategy, self).all_gather(tensor, group, sync_grads))
            return gathered
        pending, rows = self._wire.world.all_gather(tensor.detach().contiguous())
        self._meet(pending.wait)
        return torch.stack(rows)

    # ---- the mean model -----------------------------------------------------------------------------------------

    def _averaged(self) -> list[Tensor]:
        """What the mean model is made of; an averaged copy that a WeightAveraging callback validates with included."""
        callbacks = [c for c in self._trainer.callbacks if isinstance(c, WeightAveraging)]
        copies = [c._average_model for c in callbacks if c._average_model is not None]
        return floating([self._module, *copies])

    def mean_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The exact mean over the workers, by their shares; all must call it."""
        assert self._wire is not None
        world, share = self._wire.world, self.share()
        means: list[Tensor] = self._meet(lambda: mean(tensors, world, share))
        return means

    @property
    def _shows_mean(self) -> bool:
        return self._wire is not None and self._apart and self.evaluate == "mean"

    @property
    def _ends_at_mean(self) -> bool:
        """With `evaluate="own"` only where the model is handed to another process."""
        return self.evaluate == "mean" or self._start_method != "popen"

    # ---- the end ------------------------------------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        """An exception has taken this worker off the others' path: nothing collective may be called any more."""
        trainer = self._module._trainer if self.lightning_module is not None else None
        agreed = self._stop is not None and self._stop.agreed
        return trainer is not None and trainer.interrupted and not agreed and connected()

    def teardown(self) -> None:
        """Put Lightning's methods and the parameters' own storage back."""
        if self._roll is not None:
            self._roll.close()
        if self._host is not None:
            self._host.restore()
        self._steps.close()
        self._host, self._roll, self._swap = None, None, None
        self.release()
        super().teardown()
