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

from lightning_decentral import (
    CompressedStrategy,
    GossipStrategy,
    PartialBackpropStrategy,
    SpilledStrategy,
    TokenPipelineStrategy,
)
from lightning_decentral.gossip import AllReduce, Complete, Elastic, ElasticGossipStrategy, FullyShard
from lightning_decentral.pipeline import Given
from tests.apart import lines, started_apart
from tests.elastic.wire.lobbies import LobbyProcess
from tests.pipeline.training import Language
from tests.tiny import QUIET, Net, SizedBatches, in_processes

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": DDPStrategy,
    "gossip": GossipStrategy,
    "gossip without a delay": partial(GossipStrategy, topology=Complete(), delay=0),
    "an island": partial(GossipStrategy, island=AllReduce(2)),
    "an island of shards": partial(GossipStrategy, island=FullyShard(2)),
    "compressed": CompressedStrategy,
    "partial_backprop": partial(PartialBackpropStrategy, cuts=["second"]),
    "token_pipeline": partial(TokenPipelineStrategy, slicing=Given((5, 1, 4, 3)), process_group_backend="gloo"),
}
FITS, MANY = 4, 100
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")


def counted(make: Callable[[], Any], devices: int, fits: int, module: Callable[[], Any] = Net) -> list[int]:
    """Open descriptors after each fit of this process; its collector sleeps, as it may in a user's."""
    gc.disable()
    found = []
    for _ in range(fits):
        trainer = Trainer(**QUIET, devices=devices, max_epochs=1, strategy=make())
        net = module()
        data = (SizedBatches(2), SizedBatches(1)) if isinstance(net, Net) else (net._loader(6), net._loader(3))
        trainer.fit(net, *data)
        found.append(len(os.listdir("/proc/self/fd")))
    return found


def elastic(fits: int) -> list[int]:
    """Of one worker, alone with a lobby of its own each time."""
    found = []
    for _ in range(fits):
        with LobbyProcess(1, 1) as lobby:
            make = partial(ElasticGossipStrategy, elastic=Elastic(lobby.place, workers=(1, 1)))
            found += counted(make, 1, 1)
        gc.collect()  # of what the test has made
    return found


def of_worker(rank: int, name: str, fits: int) -> str:
    module = partial(Language, ordered=False) if name == "token_pipeline" else Net
    return " ".join(map(str, counted(STRATEGIES[name], 2, fits, module)))


def grows(found: list[int]) -> bool:
    """The store's server notices a moment later that both connections were closed."""
    return max(found[1:]) > found[0] + 2


@pytest.mark.sampled
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_fit_leaves_no_more_descriptors_than_the_one_before(tmp_path: Path, name: str) -> None:
    for text in lines(started_apart(of_worker, 2, tmp_path, name, FITS)):
        assert not grows([*map(int, text.split())]), text


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STRATEGIES)
def test_nor_do_a_hundred(tmp_path: Path, name: str) -> None:
    for text in lines(started_apart(of_worker, 2, tmp_path, name, MANY, seconds=500)):
        assert not grows([*map(int, text.split())]), text


ALONE: dict[str, Callable[[int], list[int]]] = {
    "ddp": partial(counted, DDPStrategy, 1),
    "gossip": partial(counted, GossipStrategy, 1),
    "compressed": partial(counted, CompressedStrategy, 1),
    "partial_backprop": partial(counted, partial(PartialBackpropStrategy, cuts=["second"]), 1),
    "spilled": partial(counted, partial(SpilledStrategy, memory_bytes=10**9), 1),
    "elastic": elastic,
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", ALONE)
def test_nor_does_one_process_alone(name: str) -> None:
    found = in_processes(ALONE[name], FITS)
    assert not grows(found), found


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ALONE)
def test_nor_do_a_hundred_of_one_process_alone(name: str) -> None:
    found = in_processes(ALONE[name], MANY, seconds=500)
    assert not grows(found), found
