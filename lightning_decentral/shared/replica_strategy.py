"""Strategies whose workers each have a whole model (gossip, partial backprop): equal at first, evaluated as a mean.

The replicas may differ while training. Everything that Lightning does once for all of them (validation, checkpoints,
the model returned after `fit`) uses their exact mean, which doesn't change how a worker trains."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_decentral.shared.checkpoint.reading import refuse_other_number
from lightning_decentral.shared.checkpoint.resuming_replicas import ReplicaCheckpoints, WholeModel
from lightning_decentral.shared.compute.device import DeviceSteps
from lightning_decentral.shared.compute.layout import ModelLayout, lay_states
from lightning_decentral.shared.evaluation import PrunedTogether, callbacks_of
from lightning_decentral.shared.setup_and_step import WorkersStrategy
from lightning_decentral.shared.wire.agreement import check_same_model, start_from_worker_0
from lightning_decentral.shared.wire.fsdp import is_sharded, refuse_sharded
from lightning_decentral.shared.wire.mean import mean, of_mean
from lightning_decentral.shared.wire.transport import Transport

Call = Callable[[], Any]
Evaluate = Literal["mean", "own"]


class ReplicaStrategy(WorkersStrategy):
    """Trains one replica of the model on each worker; gradients stay local unless the method sends them."""

    evaluate: Evaluate = "mean"
    """Model that is validated, tested and used for prediction: the mean of the workers, or each worker's own model."""

    starts_on_host: bool = False  # True where `arrange` brings the model to the device, part by part.
    checkpoints: ReplicaCheckpoints
    member: DeviceSteps = DeviceSteps()  # Steps on this device, which may be one of a worker's several.

    def __init__(self, **workers: Any) -> None:
        super().__init__(**workers)
        self.checkpoints = ReplicaCheckpoints(self, self.mean_model, WholeModel())
        self._pruned: PrunedTogether | None = None
        self.model_layout: ModelLayout = ModelLayout()
        self._trained: nn.Module | None = None

    def arrange(self) -> None:
        """Prepare the model, which is equal on all workers, before the optimizers exist."""

    @property
    def keeps(self) -> bool:
        """Return whether a worker has state that no other worker has, and that exact resuming needs."""
        return self.drifts

    def progress_state(self) -> dict[str, Any]:
        """Return rounds and messages in flight, as tensors and primitives."""
        return {}

    def load_progress_state(self, state: dict[str, Any]) -> None:
        """Restore the rounds and messages that `progress_state` returned."""

    def share(self) -> float | None:
        """Return this worker's weight in the mean of the workers; all weights sum to one. None: all are equal."""
        return None

    def refuse(self, module: nn.Module, fitting: bool) -> None:
        super().refuse(module, fitting)
        refuse_sharded(module)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self.wire is not None and trainer.state.fn == TrainerFn.FITTING:
            model = self._module, self.mean_model
            self._pruned = PrunedTogether(trainer, *model, self._from_worker_0, self.evaluation.arrive)

    def _from_worker_0(self, tensors: Sequence[Tensor]) -> None:
        assert self.wire is not None
        world = self.wire.world
        self.meet(lambda: start_from_worker_0(tensors, world, self.root_device))

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.drifts:  # parameters are sent, not gradients
            self.model_layout.restore()
        for optimizer in self.optimizers:
            lay_states(optimizer)

    # ---- steps --------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        with self.precision_plugin.train_step_context():
            return self.member.train(module, *self._calls(module, "training_step", args, kwargs))

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self.member.evaluate(*self._calls(self._module, "validation_step", args, kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self.member.evaluate(*self._calls(self._module, "test_step", args, kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self.member.evaluate(*self._calls(self._module, "predict_step", args, kwargs))

    def _calls(self, module: LightningModule, name: str, args: Any, kwargs: Any) -> tuple[Call, Call]:
        """Return two functions that run a step: by itself, and inside the module's own call."""
        return (
            lambda: getattr(module, name)(*args, **kwargs),
            lambda: self._forward_redirection(module, module, name, *args, **kwargs),
        )

    def pre_backward(self, closure_loss: Tensor) -> None:
        self.member.before(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        self.member.after()

    def block_backward_sync(self) -> Any:
        return self.member.blocked()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take an optimizer step; where all workers take the same one, LBFGS's line search gets their mean loss."""
        alike = isinstance(optimizer, LBFGS) and self.wire is not None and not self.drifts
        # Under manual optimization the devices of a worker have averaged gradients in the backward.
        assert self.lightning_module is not None
        automatic = self.lightning_module.automatic_optimization
        whole = partial(self.member.averaging, closure) if automatic else closure
        output = super().optimizer_step(optimizer, partial(self._mean_loss, whole) if alike else whole, model, **kwargs)
        self.member.updated(optimizer)
        return output

    def _mean_loss(self, closure: Callable[[], Any]) -> Any:
        # With its own loss each worker would call the closure a different number of times, and wait in vain.
        loss = closure()
        return loss if loss is None else self.reduce(loss.detach().clone())

    def teardown(self) -> None:
        if self._pruned is not None:
            self._pruned.close()
        super().teardown()

    def place(self, fitting: bool) -> None:
        before, self._trained = self._trained, self._module if fitting else self._trained
        if before is not None and before is not self._module and not self.checkpoints.resuming:
            self.mean_model.diverged = False  # another module than the one whose replicas a fit left diverged
        if not self.starts_on_host or self.mean_model.diverged:  # tensors must be on the device for a mean
            self.model_to_device()
        self._group.join_groups()
        self._equalize(fitting)
        self.health.look(self._module.buffers())
        self.arrange()
        if self.starts_on_host:
            self.model_to_device()  # parts that `arrange` left on the host
        self.model_layout = ModelLayout(p for p in self._module.parameters() if not is_sharded(p))

    def _equalize(self, fitting: bool) -> None:
        if self.wire is None or (not fitting and self.evaluate == "own"):
            return
        module = self._module
        check_same_model(module, self.wire.roll)
        if fitting and self.checkpoints.resuming:  # each worker from the state that it restored
            return
        if self.mean_model.diverged:  # as the previous fit left them
            self.mean_model.take(*of_mean([module]))
        start_from_worker_0([*module.parameters(), *module.buffers()], self.wire.world, self.root_device)

    def restart(self) -> None:
        """Begin the rounds anew from the parameters as they are now. Collective."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        saved = self.checkpoints
        if saved.fits(self.optimizers):
            refuse_other_number(checkpoint, self.optimizers)
            super().load_optimizer_state_dict(saved.held.optimizers(self.optimizers, checkpoint, saved.resuming))
        else:
            self.restart()

    def on_exception(self, exception: BaseException) -> None:
        self.member.explain(exception)
        super().on_exception(exception)

    # ---- the mean model -----------------------------------------------------------------------------------------

    def averaged(self) -> tuple[list[Tensor], list[Tensor]]:
        self.member.rest()
        # A WeightAveraging callback validates with a copy of its own.
        callbacks = [c for c in callbacks_of(self._module.trainer) if isinstance(c, WeightAveraging)]
        copies = [c._average_model for c in callbacks if c._average_model is not None]
        return of_mean([self._module, *copies])

    def mean_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        wire = self._group.join_groups()  # again, where a checkpoint is saved after the fit
        assert wire is not None
        world, share = wire.world, self.share()
        return self.meet(lambda: mean(tensors, world, share))

    def replica_group(self) -> Transport | None:
        wire = self._group.join_groups()
        return None if wire is None else wire.world

    @property
    def shows_mean(self) -> bool:
        return self.mean_model.diverged and self.evaluate == "mean"

    @property
    def ends_at_mean(self) -> bool:
        # Spawned and forked workers end with `fit`: one model is handed to the process that started them.
        return self.evaluate == "mean" or self._start_method != "popen"
