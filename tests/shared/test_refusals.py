"""A process whose local rank has no device: one line with the number and the remedy, under every strategy."""

from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.pytorch import Trainer

from tests.crew import crew
from tests.tiny import QUIET, Net, SizedBatches

LINE = (
    "ValueError: this process has local rank {} (LOCAL_RANK, or SLURM_LOCALID under SLURM) and was given devices=2: "
    "start as many processes as devices on each host, with ranks from 0"
)


def fit(strategy: str) -> None:
    Trainer(**QUIET, devices=2, strategy=strategy).fit(Net(), SizedBatches(1))


def launch(strategy: str) -> None:
    Fabric(accelerator="cpu", devices=2, strategy=strategy).launch()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("run", "strategy"),
    [
        *((fit, name) for name in ("gossip", "compressed", "partial_backprop", "token_pipeline")),
        *((launch, name) for name in ("gossip", "compressed", "partial_backprop")),
    ],
)
def test_a_local_rank_beyond_the_devices_is_named(run: Any, strategy: str) -> None:
    (outcome,) = crew(1, run, strategy, own={0: {"LOCAL_RANK": "3"}}, seconds=60)
    assert outcome.error == LINE.format(3)
