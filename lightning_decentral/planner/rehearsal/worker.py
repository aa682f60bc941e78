"""One worker of a rehearsal: a module and Lightning's own Trainer, which calls what it calls in a run."""

from collections.abc import Iterator
from typing import Any, TypeVar

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch.optim import Optimizer

from lightning_decentral.planner.rehearsal.binding import Binding, Common, Park
from lightning_decentral.planner.rehearsal.loop import LoopSettings as LoopSettings  # of a crew
from lightning_decentral.planner.rehearsal.members.member import Member, MemberPlace
from lightning_decentral.planner.rehearsal.turns import Ended

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "max_epochs": -1,
}
Module = TypeVar("Module", bound=LightningModule)


class KeepsNothing(DummyLogger):
    """Takes what a module gives it. What is written into its folder goes with the crew."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    @property
    def save_dir(self) -> str:
        return self._folder

    root_dir = log_dir = save_dir


class RehearsedWorker:
    """Trains its own module.

    Attributes:
        error: what ended it.

    Raises:
        ValueError: the module optimizes by hand.
    """

    def __init__(self, module: LightningModule, data: Any, place: MemberPlace, common: Common) -> None:
        if not module.automatic_optimization:
            raise ValueError(f"{type(module).__name__} optimizes by hand: only automatic optimization can be rehearsed")
        self.module, self._data, self._rank, self._common = module, data, place.worker, common
        self.error: BaseException | None = None
        self.binding = Binding(place, common)
        whole_nodes = place.workers % place.per_node == 0
        self._trainer = Trainer(
            **QUIET,
            devices=place.per_node if whole_nodes else place.workers,
            num_nodes=place.workers // place.per_node if whole_nodes else 1,
            max_steps=common.loop.run_steps,
            limit_train_batches=common.loop.epoch_steps if isinstance(data, Iterator) else None,
            gradient_clip_val=common.loop.clip,
            strategy=self.binding,
            logger=KeepsNothing(common.folder),
            callbacks=[Park(self.binding)],
        )

    @property
    def member(self) -> Member:
        """Its part of the strategy."""
        return self.binding.member

    @property
    def optimizer(self) -> Optimizer:
        return self.binding.optimizers[0]

    def goes_on(self) -> None:
        """Also behind the end of the run."""
        self._trainer.fit_loop.epoch_loop.max_steps = -1

    def run(self) -> None:
        """All of the fit, in a thread of its own."""
        self._common.turn.is_of(self._rank)
        given = "datamodule" if isinstance(self._data, LightningDataModule) else "train_dataloaders"
        try:
            with self._common.turn:
                self._trainer.fit(self.module, **{given: self._data})
            if len(self.binding.losses) < self._common.quota.allowed:  # the others would wait for it
                self._common.close()
        except Ended:
            pass
        except BaseException as error:
            self.error = error
            self._common.close()
        finally:
            self._common.quota.done(self._rank)


def quiet(module: Module) -> Module:
    """Make the module's `self.log` and `self.log_dict` do nothing."""
    module.__dict__["log"] = module.__dict__["log_dict"] = lambda *_, **__: None
    return module
