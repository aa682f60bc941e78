"""Descriptors after a fit: what a strategy opens is closed at its end, also before Python's collector comes by."""

import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy, SpilledStrategy
from lightning_decentral.gossip import Complete
from tests.apart import lines, started_apart
from tests.tiny import QUIET, Net, SizedBatches, in_processes

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": DDPStrategy,
    "gossip": GossipStrategy,
    "gossip without a delay": partial(GossipStrategy, topology=Complete(), delay=0),
    "compressed": CompressedStrategy,
    "partial_backprop": partial(PartialBackpropStrategy, cuts=["second"]),
}
FITS = 4
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")


def counted(make: Callable[[], Any], devices: int) -> list[int]:
    """Open descriptors after each fit of this process; its collector sleeps, as it may in a user's."""
    gc.disable()
    found = []
    for _ in range(FITS):
        trainer = Trainer(**QUIET, devices=devices, max_epochs=1, strategy=make())
        trainer.fit(Net(dropout=0.0), SizedBatches(2), SizedBatches(1))
        found.append(len(os.listdir("/proc/self/fd")))
    return found


def of_worker(rank: int, name: str) -> str:
    return " ".join(map(str, counted(STRATEGIES[name], 2)))


@pytest.mark.sampled
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_fit_leaves_no_more_descriptors_than_the_one_before(tmp_path: Path, name: str) -> None:
    for text in lines(started_apart(of_worker, 2, tmp_path, name)):
        first, *others = map(int, text.split())
        # The store's server notices a moment later that both connections were closed.
        assert max(others) <= first + 2, text


def test_nor_does_one_process_alone() -> None:
    found = in_processes(counted, partial(SpilledStrategy, memory_bytes=10**9), 1)
    assert found == found[:1] * FITS
