"""Workers that stop alone or meet where the others don't: all finish as promised or end with an error; none hangs."""

import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy, TokenPipelineStrategy
from lightning_decentral.pipeline import Uniform
from tests.apart import lines, started_apart
from tests.pipeline.training import Language
from tests.tiny import QUIET, Batches, Net

LONG, SHORT = timedelta(seconds=40), timedelta(seconds=1)
"""Short where nobody can finish: then all are to give up soon."""


class Lone(Callback):
    """Worker 1 alone averages a value over all workers, which wait for it in vain."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            trainer.strategy.reduce(torch.ones(()))


class Stops(Callback):
    """Worker 1 alone has enough."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        trainer.should_stop |= trainer.global_rank == 1 and trainer.global_step == 3


STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "compressed": CompressedStrategy,
    "gossip": GossipStrategy,
    "partial": partial(PartialBackpropStrategy, cuts=["second"]),
    "stages": partial(TokenPipelineStrategy, slicing=Uniform(1)),
}


def fit(rank: int, name: str, timeout: timedelta, callback: Callback) -> str:
    """Two epochs of six batches."""
    options = {**QUIET, "use_distributed_sampler": False, "devices": 2, "max_epochs": 2, "callbacks": [callback]}
    trainer = Trainer(**options, limit_train_batches=6, strategy=STRATEGIES[name](timeout=timeout))
    if name == "stages":
        trainer.fit(Language(sgd=True))
    else:
        trainer.fit(Net(dropout=0.0), Batches(6))
    return f"trained {trainer.global_step} steps"


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["compressed", "partial", "stages"])
def test_who_stops_alone_where_all_take_the_same_updates_ends_all_with_the_remedy(tmp_path: Path, name: str) -> None:
    found = lines(started_apart(fit, 2, tmp_path, name, LONG, Stops()))
    assert re.match(r"\w+: worker 1 alone stops early \(trainer.should_stop\) .*reduce_boolean_decision", found[1]), (
        found
    )
    assert not found[0].startswith("trained"), found


def test_who_stops_alone_under_gossip_waits_for_the_others_epoch_and_all_stop(tmp_path: Path) -> None:
    """It takes part in their rounds meanwhile."""
    found = lines(started_apart(fit, 2, tmp_path, "gossip", LONG, Stops()))
    assert found == ["trained 6 steps", "trained 3 steps"]


@pytest.mark.sampled
@pytest.mark.parametrize("name", STRATEGIES)
def test_who_waits_for_all_alone_ends_all_within_the_timeout(tmp_path: Path, name: str) -> None:
    """As `sync_dist=True` on some workers only."""
    for text in started_apart(fit, 2, tmp_path, name, SHORT, Lone()):
        line, _, seconds = text.rpartition("\n")
        assert re.match(r"\w+(Error|Lost): ", line), text
        assert float(seconds) < 30, text
