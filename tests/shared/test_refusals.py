"""Devices and backends that can't be used: one line with the value and the remedy, under every strategy."""

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

from lightning_decentral import (
    CompressedStrategy,
    GossipStrategy,
    PartialBackpropStrategy,
    TokenPipelineStrategy,
)
from lightning_decentral.compressed.fabric import FabricCompressedStrategy
from lightning_decentral.gossip.fabric import FabricGossipStrategy
from lightning_decentral.partial.fabric import FabricPartialBackpropStrategy
from lightning_decentral.shared.refusals import refuse_backend
from tests.crew import crew
from tests.tiny import QUIET, Net, SizedBatches

LINE = (
    "ValueError: this process has local rank {} (LOCAL_RANK, or SLURM_LOCALID under SLURM) and was given devices=2: "
    "start as many processes as devices on each host, with local ranks from 0"
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


BACKEND = (
    "ValueError: workers can't communicate by process_group_backend='nonsense' on cpu: choose 'gloo', or leave it out"
)
TRAINERS = [GossipStrategy, CompressedStrategy, PartialBackpropStrategy, TokenPipelineStrategy]
FABRICS = [FabricGossipStrategy, FabricCompressedStrategy, FabricPartialBackpropStrategy]


def fit_by(strategy: Any) -> None:
    Trainer(**QUIET, devices=2, strategy=strategy(process_group_backend="nonsense")).fit(Net(), SizedBatches(1))


def launch_by(strategy: Any) -> None:
    Fabric(accelerator="cpu", devices=2, strategy=strategy(process_group_backend="nonsense")).launch()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("run", "strategy"), [*((fit_by, cls) for cls in TRAINERS), *((launch_by, cls) for cls in FABRICS)]
)
def test_an_unknown_backend_is_named_before_workers_meet(run: Any, strategy: Any) -> None:
    (outcome,) = crew(1, run, strategy, own={0: {"LOCAL_RANK": "0"}}, seconds=60)
    assert outcome.error == BACKEND


@pytest.mark.parametrize("start_method", ["popen", "spawn", "fork"])
@pytest.mark.parametrize("strategy", TRAINERS)
def test_it_is_named_once_before_a_process_starts(
    strategy: Any, start_method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a process would start")

    for launcher in (_MultiProcessingLauncher, _SubprocessScriptLauncher):
        monkeypatch.setattr(launcher, "launch", never)
    for backend, error, words in (
        ("mpi2", ValueError, "='mpi2' on cpu: choose"),
        ("gloo", AssertionError, "would start"),
    ):
        given = strategy(process_group_backend=backend, start_method=start_method)
        with pytest.raises(error, match=words):
            Trainer(**QUIET, devices=2, strategy=given).fit(Net(), SizedBatches(1))


@pytest.mark.parametrize(("name", "device"), [
    ("gloo", "cpu"), ("gloo", "cuda"), ("nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo,cuda:nccl", "cuda"),
])  # fmt: skip
def test_backends_by_which_workers_talk(name: str, device: str) -> None:
    refuse_backend(name, torch.device(device))


@pytest.mark.parametrize("name", ["mpi", "nccl", "", "cuda:nccl", "cpu:mpi"])
def test_backends_by_which_none_talks_on_the_host(name: str) -> None:
    with pytest.raises(ValueError, match="choose 'gloo', or leave it out"):
        refuse_backend(name, torch.device("cpu"))
