"""What a newcomer takes of Lightning's loops as it begins to take part."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from lightning_decentral.elastic.joining import refuse_combined, refuse_other_calendar, refuse_several_lengths
from lightning_decentral.elastic.loops import agreed_states, restored
from lightning_decentral.elastic.plan.calendar import Calendar


def of(metrics: list[float]) -> Any:
    """A trainer whose schedule has seen these."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    plateau, step = ReduceLROnPlateau(optimizer, patience=1), StepLR(optimizer, 1)
    for metric in metrics:
        plateau.step(metric)
    configs = [SimpleNamespace(scheduler=scheduler) for scheduler in (step, plateau)]
    logged = {"callback_metrics": {}, "_logger_connector": SimpleNamespace(_callback_metrics={})}
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


def test_loaders_of_several_lengths_are_refused_by_name() -> None:
    calendar = Calendar(20)
    refuse_several_lengths(20, calendar)
    with pytest.raises(ValueError, match="loaders of 20 and of 40 batches don't go together"):
        refuse_several_lengths(40, calendar)
    loop = SimpleNamespace(_combined_loader=SimpleNamespace(flattened=[1, 2]), max_batches=40)
    trainer: Any = SimpleNamespace(fit_loop=loop)
    with pytest.raises(ValueError, match="2 loaders make an epoch of 40 batches, and an elastic run's has 20"):
        refuse_combined(trainer, calendar)
    loop.max_batches = 20
    refuse_combined(trainer, calendar)


def test_a_founder_with_other_data_than_the_oldest_is_refused() -> None:
    refuse_other_calendar(Calendar(20, before=3), Calendar(20))
    with pytest.raises(ValueError, match="oldest worker has 20 batches, 1 in a step, and of this one 21"):
        refuse_other_calendar(Calendar(21), Calendar(20))
