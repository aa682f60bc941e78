"""The base of all strategies with several workers: set-up, a step, when the mean model is shown; no DDP wrapper.

What is common to all is in parts: `SameSettings` (agreeing before they train), `MeanModel` (workers that drift apart),
`ReplicaHealth` (poison), `Checkpoints` (saving, resuming), `Coordination` (stopping and ending epochs together),
`Attendance` (who is there).
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.shared.checkpoint.worker import Checkpoints
from lightning_decentral.shared.coordination import Coordination
from lightning_decentral.shared.gradient_check import Unchecked
from lightning_decentral.shared.meeting import MeetingStrategy
from lightning_decentral.shared.pruning import BeforeOthers
from lightning_decentral.shared.registration import refuse_sync_batch_norm
from lightning_decentral.shared.replica_health import ReplicaHealth
from lightning_decentral.shared.settings import SameSettings
from lightning_decentral.shared.wire.mean import MeanModel, floating
from lightning_decentral.shared.wire.transport import Transport, Wire


class WorkersStrategy(MeetingStrategy):
    """Workers that run Lightning's loops side by side and meet where their method says.

    Attributes:
        mean_model: the mean of workers that drift apart.
        checkpoints: how this method saves and resumes; the constructor of a subclass sets it.
        own: what may differ between workers: names of arguments, `parameters of the optimizers`.
    """

    checkpoints: Checkpoints
    gradient_check = Unchecked()
    own: ClassVar[Sequence[str]] = ()

    devices_per_worker: int = 1

    heals: int = 0
    """How often a worker may be healed by the others; with any, also by their mean where that is taken."""

    def __init__(self, **workers: Any) -> None:
        super().__init__(**workers)
        self._fits = 0
        self._same = SameSettings(self)
        self.health = ReplicaHealth(self)
        self.mean_model = MeanModel(
            self.health.mean, self.shown
        )  # a method: a spawned process gets the strategy pickled
        self._before_others: BeforeOthers | None = None

    # ---- what a method adds -----------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def drifts(self) -> bool:
        """Whether workers may differ between steps."""

    def refuse(self, module: nn.Module, fitting: bool) -> None:
        """ValueError for what the method can't train."""
        refuse_sync_batch_norm(type(self), module, asked=self._layer_sync is not None)

    @abstractmethod
    def place(self, fitting: bool) -> None:
        """The model on its device, equal on all workers; the optimizers don't exist yet."""

    @abstractmethod
    def prepare(self, wire: Wire | None) -> None:
        """Build what training needs; the optimizers exist. No wire: a single worker."""

    @abstractmethod
    def advance(self, optimizer: Optimizer) -> None:
        """What follows an update of `optimizer`."""

    @abstractmethod
    def rounds(self) -> list[int]:
        """Rounds taken, one number for each optimizer; none outside of training."""

    @abstractmethod
    def wanted(self) -> list[int]:
        """Rounds that the others must have launched before this worker can go on."""

    def take_part(self, index: int) -> None:
        """Run one round of the optimizer with that index, without an update.

        Raises:
            RuntimeError: the method can't, all its workers take the same updates.
        """
        raise RuntimeError(
            f"worker {self.global_rank} ended its epoch after {self.rounds()[index]} steps while another goes on, and "
            "all must take the same updates: give every worker the same number of batches "
            "(drop_last=True, limit_train_batches)"
        )

    @abstractmethod
    def mean_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The exact mean over the workers; all must call it."""

    def replica_group(self) -> Transport | None:
        """The group of those that hold what this worker holds, itself included; None: there are none. Collective."""
        return None

    def changeable(self) -> dict[str, str]:
        """What a run may have other than the one that it goes on from, in words: that is said."""
        return {}

    def settle(self) -> None:
        """Land what is in flight."""

    @abstractmethod
    def release(self) -> None:
        """Give the model its own storage back."""

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        super().setup_environment()
        self._same.plan()

    def setup(self, trainer: Trainer) -> None:
        """As DDPStrategy, but without a wrapper, and with equal models at the start."""
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
        self._before_others = BeforeOthers(trainer, self.begin_evaluation)
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            self.prepare(self.wire)
            self.checkpoints.resume()
            self._coordinate(trainer)
        self._attendance.ready = True

    def convert(self, module: nn.Module) -> nn.Module:
        return self.precision_plugin.convert_module(module)

    def _coordinate(self, trainer: Trainer) -> None:
        if self.wire is None:
            return
        stop, presence = self._attendance.stop(self._patience)
        self._together = Coordination(
            self.wire,
            trainer,
            self.optimizers,
            self,
            stop=stop,
            presence=presence,
            forward_signal=self._forward_signal,
            name=f"fit-{self._fits}",  # the store still has what earlier fits wrote
        )
        self._fits += 1

    # ---- training ---------------------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """The user's update, exactly as in one process; then what the method does after it."""
        with self._together.updating:
            checked = self.gradient_check.after(closure, optimizer, self.precision_plugin)
            output = super().optimizer_step(optimizer, checked, model, **kwargs)
        if self.wire is not None:
            self.mean_model.apart = self.drifts  # not before: up to the first update all are equal
            with self._together.waiting:
                self.advance(optimizer)
                if optimizer is self.optimizers[0]:  # once a round, however many optimizers there are
                    self._together.tick()
        return output

    # ---- the mean model: what Lightning does once for all workers sees it -------------------------------------------

    def shown(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What stands for these tensors of the module in the mean of the workers."""
        return tensors

    @property
    def shows_mean(self) -> bool:
        """Whether the mean is evaluated, not what this worker has."""
        return self.mean_model.apart

    @property
    def ends_at_mean(self) -> bool:
        """Whether training ends with all workers at the mean."""
        return True

    def averaged(self) -> list[Tensor]:
        return floating([self._module])

    def begin_evaluation(self) -> None:
        """Before any callback's hook; Lightning would ask behind them."""
        self.health.check_equal()
        if self.shows_mean:
            self.mean_model.show(self.averaged())

    def on_validation_end(self) -> None:
        self.mean_model.hide()

    on_test_end = on_predict_end = on_validation_end

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.mean_model.own(super().lightning_module_state_dict())  # the mean may stand in its place

    def on_train_end(self) -> None:
        super().on_train_end()
        self.arrive()

    def arrive(self) -> None:
        """Land what is in flight; the mean of the workers for all where training ends at it. Collective."""
        self.health.check_equal()
        if self.mean_model.apart:
            self.settle()
            if self.ends_at_mean:
                self.mean_model.take(floating([self._module]))

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        between, self._attendance.saving = self.wire is None, True
        self.health.check_equal()
        self.checkpoints.save(checkpoint, filepath, storage_options)
        self._attendance.saving = False  # after an error it stays: that is where this worker ends
        if between:  # two fits, or after the last: groups made for this checkpoint alone
            self._disconnect(self.alone)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        self.checkpoints.remove(filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._same.resuming(True)
        return self.checkpoints.load(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Lightning's, with one line for a checkpoint of another model."""
        try:
            super().load_model_state_dict(checkpoint, strict=strict)
        except RuntimeError as error:
            first = next(iter([line.strip() for line in str(error).splitlines() if line.strip()][1:2]), error)
            raise ValueError(
                f"the checkpoint is of another model: {first} (build the model with the settings it was saved with)"
            ) from error

    def on_train_start(self) -> None:
        super().on_train_start()
        self.checkpoints.start()

    def teardown(self) -> None:
        alone = self.alone
        self._together.close()
        self.mean_model.forget()
        if self._before_others is not None:
            self._before_others.remove()
        self._before_others = None
        self.release()
        self._disconnect(alone)
        super().teardown()
        self._attendance.close(alone)
