"""What a newcomer takes of Lightning's loops as it begins to take part."""

from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from lightning_decentral.gossip.elastic.loops import agreed_states, restored


def of(metrics: list[float]) -> Any:
    """A trainer whose schedule has seen these."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    plateau, step = ReduceLROnPlateau(optimizer, patience=1), StepLR(optimizer, 1)
    for metric in metrics:
        plateau.step(metric)
    configs = [SimpleNamespace(scheduler=scheduler) for scheduler in (step, plateau)]
    return SimpleNamespace(lr_scheduler_configs=configs, callbacks=[], optimizer=optimizer)


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
