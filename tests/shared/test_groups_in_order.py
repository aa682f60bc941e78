"""Groups are made by all workers alike, whatever the method, and as many as its parts need.

On NCCL a group is a communicator: one that others make in another order is waited for without an end.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy, TokenPipelineStrategy
from lightning_decentral.gossip import AllReduce, Complete, FullyShard, GossipReplicas, Ring
from lightning_decentral.pipeline import AverageGradients, Uniform
from lightning_decentral.shared.wire.meeting import groups
from tests.pipeline.training import Language
from tests.tiny import QUIET, in_processes

SIZE = 4


class Chain(LightningModule):
    """Blocks of one shape, for every method but the pipelines."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.blocks(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=2)


def fit(folder: Path, module: type[LightningModule], strategy: Any) -> None:
    make = groups.new_group

    def noted(of: Any, backend: str | None, timeout: Any) -> Any:
        with (folder / f"{dist.get_rank()}.txt").open("a") as stream:
            stream.write(f"{of}, {backend}\n")
        return make(of, backend, timeout)

    groups.new_group = noted  # in a process of its own
    settings = {**QUIET, "max_steps": 2, "limit_val_batches": 0}
    Trainer(**settings, devices=SIZE, strategy=strategy).fit(module())


WIRE = 3  # tensors, and two on the hosts: flags, and the roll call


def links(stages: int) -> int:
    """The pipeline's, of its devices and of its hosts, and one for each direction between neighbours."""
    return 2 + 2 * (stages - 1)


def pipelines(stages: int, **options: Any) -> Any:
    return TokenPipelineStrategy(start_method="fork", stages=stages, slicing=Uniform(2), **options)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("module", "strategy", "more"),
    [
        (Chain, GossipStrategy(start_method="fork", topology=Ring()), 1),
        (Chain, GossipStrategy(start_method="fork", topology=Complete()), 1),
        (Chain, GossipStrategy(start_method="fork", island=AllReduce(2)), 4),  # gradients, their flags, gathers, peers
        (
            Chain,
            GossipStrategy(start_method="fork", island=FullyShard(2)),
            4,
        ),  # shards, who used what, their whole worker's, peers
        (Chain, CompressedStrategy(start_method="fork"), 4),
        (Chain, PartialBackpropStrategy(start_method="fork"), 3),  # buffers, gradients, who used what
        (Language, pipelines(4), links(4)),  # without replicas, without a group of them
        (
            Language,
            pipelines(2, replicas=AverageGradients()),
            links(2) + 4,
        ),  # a mean's, gradients, who used what, running statistics
        (Language, pipelines(2, replicas=GossipReplicas(topology=Complete())), links(2) + 3),
    ],
    ids=["gossip", "cliques", "all-reduce", "shards", "compressed", "partial", "pipeline", "pipelines", "gossiping"],
)
def test_all_workers_make_the_same_groups_in_one_order(
    tmp_path: Path, module: type[LightningModule], strategy: Any, more: int
) -> None:
    in_processes(fit, tmp_path, module, strategy)
    made = [(tmp_path / f"{rank}.txt").read_text().splitlines() for rank in range(SIZE)]
    assert all(others == made[0] for others in made)
    assert len(made[0]) == WIRE + more
