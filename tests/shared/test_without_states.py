"""A checkpoint without states of the optimizers: whoever resumes it says so, under every strategy."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from lightning_decentral import (
    CompressedStrategy,
    GossipStrategy,
    PartialBackpropStrategy,
    SpilledStrategy,
    TokenPipelineStrategy,
)
from lightning_decentral.gossip import AllReduce, FullyShard
from lightning_decentral.pipeline import Given
from tests.pipeline.training import Language
from tests.tiny import QUIET, Net, SizedBatches, in_processes

FORKED = {"start_method": "fork", "process_group_backend": "gloo"}
RESUMING: dict[str, tuple[Callable[[], Strategy], int]] = {
    "gossip": (GossipStrategy, 1),
    "an island": (partial(GossipStrategy, island=AllReduce(2), **FORKED), 2),
    "an island of shards": (partial(GossipStrategy, island=FullyShard(2), **FORKED), 2),
    "compressed": (CompressedStrategy, 1),
    "partial_backprop": (partial(PartialBackpropStrategy, cuts=["second"]), 1),
    "spilled": (partial(SpilledStrategy, memory_bytes=10**9), 1),
    "token_pipeline": (partial(TokenPipelineStrategy, slicing=Given((5, 1, 4, 3)), **FORKED), 2),
}


def fitted(module: LightningModule, strategy: Any, devices: int, epochs: int, path: str | None = None) -> Trainer:
    trainer = Trainer(**QUIET, devices=devices, strategy=strategy, max_epochs=epochs)
    data = module._loader(6) if isinstance(module, Language) else SizedBatches(2)
    trainer.fit(module, data, ckpt_path=path)
    return trainer


def resumed(name: str, path: Path) -> None:
    make, devices = RESUMING[name]
    module: Callable[[], LightningModule] = Language if name == "token_pipeline" else Net
    fitted(module(), "auto", 1, 1).save_checkpoint(path)
    without = {**torch.load(path, weights_only=False), "optimizer_states": []}
    torch.save(without, path)
    fitted(module(), make(), devices, 2, str(path))


@pytest.mark.sampled
@pytest.mark.parametrize("name", RESUMING)
def test_what_resumes_a_file_without_states_says_so(name: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the checkpoint holds the states of 0 optimizers, this run has 1: resume"):
        in_processes(resumed, name, tmp_path / "a.ckpt")
