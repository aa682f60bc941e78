"""What a newcomer takes of Lightning's loops as it begins to take part."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from lightning_decentral.elastic.dealt_loaders import Joining, refuse_combined
from lightning_decentral.elastic.loops import agreed_states, restored
from lightning_decentral.elastic.plan.dealing import Calendar
from lightning_decentral.shared.wire.plain import pack
from tests.tiny import QUIET


def of(metrics: list[float], steps: int = 0, manual: bool = False) -> Any:
    """A trainer whose schedule has seen these, after so many steps by hand."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    plateau, step = ReduceLROnPlateau(optimizer, patience=1), StepLR(optimizer, 1)
    for metric in metrics:
        plateau.step(metric)
    configs = [SimpleNamespace(scheduler=scheduler) for scheduler in (step, plateau)]
    logged = {"callback_metrics": {}, "_logger_connector": SimpleNamespace(_callback_metrics={})}
    total = SimpleNamespace(ready=steps, completed=steps)
    by_hand = SimpleNamespace(optim_step_progress=SimpleNamespace(total=total))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(manual_optimization=by_hand))
    logged |= {"fit_loop": loop, "lightning_module": SimpleNamespace(automatic_optimization=not manual)}
    return SimpleNamespace(lr_scheduler_configs=configs, callbacks=[], optimizer=optimizer, **logged)


def test_a_schedule_that_follows_a_metric_is_the_members_own() -> None:
    """The rate fell at the members while the newcomer, which healed before, was waiting for its view."""
    member, newcomer = of([1.0, 2.0, 2.0, 2.0]), of([1.0])
    restored(newcomer, agreed_states(member))
    for metric in (2.0, 2.0):
        for trainer in (member, newcomer):
            trainer.lr_scheduler_configs[1].scheduler.step(metric)
    rates = [trainer.optimizer.param_groups[0]["lr"] for trainer in (member, newcomer)]
    assert rates[0] < 0.1
    assert rates[1] == rates[0]


def test_under_manual_optimization_all_schedules_and_the_steps_are_the_members() -> None:
    for manual in (False, True):
        member, newcomer = of([1.0], steps=7 * manual, manual=manual), of([1.0], steps=3 * manual, manual=manual)
        for _ in range(4):
            member.optimizer.step()
            member.lr_scheduler_configs[0].scheduler.step()
        given = agreed_states(member)
        pack(given)  # it can be sent
        restored(newcomer, given)
        total = newcomer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
        assert (total.ready, total.completed) == ((7, 7) if manual else (0, 0))
        assert newcomer.lr_scheduler_configs[0].scheduler.last_epoch == (4 if manual else 0)


def joins(*batches: int, calendar: Calendar | None = None) -> Any:
    """A member of a first view that has loaded loaders of so many batches; the oldest has made this calendar."""
    progress = SimpleNamespace(started=0, processed=0)
    batch = SimpleNamespace(is_last_batch=False, current=SimpleNamespace(completed=0))
    loop = SimpleNamespace(epoch_progress=SimpleNamespace(current=progress), restarting=False, _combined_loader=None)
    loop.epoch_loop = SimpleNamespace(batch_progress=batch, global_step=0)
    trainer: Any = SimpleNamespace(
        fit_loop=loop, accumulate_grad_batches=1, limit_train_batches=1.0, lightning_module=None
    )
    member: Any = SimpleNamespace(round=-1, seed=None, calendar=None, view=SimpleNamespace(number=1), founders=2)

    def begin(made: Callable[[], Calendar]) -> None:
        member.round, member.calendar = 0, calendar

    joining = Joining(1, 1, begin)
    member.deals = lambda dealing, place: range
    for size in batches:
        joining.loader(member, trainer, range(size))
    return member


def test_loaders_of_several_lengths_are_refused_by_name() -> None:
    assert joins(20, 20).calendar == Calendar(20, weights=2)
    with pytest.raises(ValueError, match="loaders of 20 and of 40 batches can't be combined"):
        joins(20, 40)
    calendar = Calendar(20)
    loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[1, 2]), max_batches=40)
    trainer: Any = SimpleNamespace(fit_loop=loop)
    with pytest.raises(ValueError, match="2 loaders make an epoch of 40 batches, but this elastic run's epoch has 20"):
        refuse_combined(trainer, calendar)
    loop.max_batches = 20
    refuse_combined(trainer, calendar)


def test_a_founder_with_other_data_than_the_oldest_is_refused() -> None:
    assert joins(20, calendar=Calendar(20)).calendar == Calendar(20)
    with pytest.raises(ValueError, match="oldest worker has 20 batches, 1 in a step, and of this one 21"):
        joins(21, calendar=Calendar(20))


class Own(ModelCheckpoint):
    """With a count of its own, in addition to Lightning's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counted = 0


class Other(Callback):
    """That doesn't save."""

    counted = 0


def trainer(folder: Path, *savers: ModelCheckpoint) -> Trainer:
    other = Other()
    other.counted = 0
    return Trainer(**{**QUIET, "enable_checkpointing": True}, default_root_dir=folder, callbacks=[other, *savers])


def test_what_a_saver_remembers_is_the_members_and_what_it_was_given_its_own(tmp_path: Path) -> None:
    there, here = (
        trainer(tmp_path, Own(tmp_path / name, save_last=True), ModelCheckpoint(tmp_path / name, monitor="x"))
        for name in ("there", "here")
    )
    (_, first, second), (_, own, other) = there.callbacks[:3], here.callbacks[:3]
    saved: Any = {"_last_checkpoint_saved": "a.ckpt", "_last_global_step_saved": 40, "counted": 3}
    vars(first).update(saved)
    vars(second)["_defer_save_until_validation"] = True
    there._logger_connector._callback_metrics["score"] = torch.tensor(2.0)
    there._logger_connector._callback_metrics["loss"] = torch.tensor(1.0)
    here._logger_connector._callback_metrics["loss"] = torch.tensor(5.0)
    given = agreed_states(there)
    pack(given)  # it can be sent
    restored(here, {**given, "callbacks": {}})
    assert {name: vars(own)[name] for name in saved} == saved
    assert vars(other)["_defer_save_until_validation"]
    assert not vars(own)["_defer_save_until_validation"]
    assert own.dirpath == str(tmp_path / "here")  # type: ignore[attr-defined]
    assert {name: float(one) for name, one in here.callback_metrics.items()} == {"score": 2.0, "loss": 5.0}
