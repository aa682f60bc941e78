"""Pruning in an elastic run, by torch's functions: refused by name while it trains, and free before and after it."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.nn.utils import prune

from lightning_decentral import GossipStrategy
from lightning_decentral.elastic.pruned import Unpruned
from lightning_decentral.gossip import Elastic
from tests.elastic.wire.lobbies import LobbyProcess
from tests.tiny import QUIET, Net, SizedBatches, in_processes


class Own(prune.BasePruningMethod):
    """A method of the user's."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t: Any, default_mask: Any) -> Any:
        return default_mask


WAYS = {
    "one": lambda module: prune.l1_unstructured(module[0], "weight", 0.5),
    "global": lambda module: prune.global_unstructured([(module[0], "weight")], prune.L1Unstructured, amount=0.5),
    "rows": lambda module: prune.ln_structured(module[0], "weight", 0.5, n=2, dim=0),
    "own": lambda module: Own.apply(module[0], "weight"),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_torchs_is_refused_until_the_end(way: str) -> None:
    module, other = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    unpruned = Unpruned(module)
    try:
        with pytest.raises(RuntimeError, match="pruning Linear while training doesn't go with elastic: each worker"):
            WAYS[way](module)
        assert not prune.is_pruned(module)
        WAYS[way](other)  # of another model
    finally:
        unpruned.close()
    WAYS[way](module)
    assert prune.is_pruned(module)


def test_a_mask_that_is_given_is_the_same_on_all() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    unpruned = Unpruned(module)
    try:
        prune.custom_from_mask(module[0], "weight", torch.eye(4))
    finally:
        unpruned.close()
    assert prune.is_pruned(module)


class Pruned(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            prune.l1_unstructured(self.head, "weight", 0.5)


def fit(lobby: str) -> None:
    strategy = GossipStrategy(elastic=Elastic(lobby=lobby, workers=(1, 1), host="127.0.0.1"))
    trainer = Trainer(**{**QUIET, "use_distributed_sampler": False}, max_steps=4, devices=1, strategy=strategy)
    trainer.fit(Pruned(dropout=0.0), SizedBatches(4))


def test_a_step_that_prunes_ends_the_worker_by_name() -> None:
    with LobbyProcess(least=1, most=1) as lobby, pytest.raises(RuntimeError, match="pruning Linear while training"):
        in_processes(fit, lobby.place)
