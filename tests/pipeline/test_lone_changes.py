"""What one replica of a stage alone changes in the middle of a fit: named on all workers within seconds."""

import re
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_decentral import TokenPipelineStrategy
from lightning_decentral.gossip import GossipReplicas
from lightning_decentral.pipeline import AverageGradients, Chain, blocks_of
from tests.crew import crew
from tests.tiny import QUIET

TIMEOUT = timedelta(seconds=30)
REPLICAS: dict[str, Any] = {
    "gossip": GossipReplicas(),
    "blocking": GossipReplicas(delay=0),
    "equal": AverageGradients(),
}


class Piped(LightningModule):
    def __init__(self, change: str, ranks: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.change, self.ranks = change, ranks
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.net[1].requires_grad_(False)

    def pipeline_stages(self) -> Chain:
        return Chain(self.net, blocks_of(list(self.net)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank in self.ranks:
            if self.change == "replace":
                self.trainer.strategy.setup_optimizers(self.trainer)
            else:
                self.net.requires_grad_(self.change == "thaw")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(replicas: str, change: str, ranks: tuple[int, ...]) -> float:
    strategy = TokenPipelineStrategy(stages=2, replicas=REPLICAS[replicas], timeout=TIMEOUT)
    module = Piped(change, ranks)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))
    trainer = Trainer(**QUIET, max_steps=4, devices=4, strategy=strategy)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
    return float(torch.cat([p.detach().flatten() for p in module.parameters()]).sum())


@pytest.mark.parametrize(("replicas", "change", "rank", "words"), [
    ("gossip", "thaw", 2, r"net.1.weight \(4, 4\) .*, mixed after updates of optimizer 0 where worker 0 .*, not mixed"),
    ("blocking", "thaw", 0, r"net.1.weight .*, mixed after updates of optimizer 0 where worker 2 .*, not mixed"),
    ("equal", "replace", 3, r"optimizer 0 SGD .*, new at change 1 where worker 1 has optimizer 0 SGD"),
], ids=["gossip", "blocking", "replaced"])  # fmt: skip
def test_a_lone_change_ends_all_within_seconds_by_name(replicas: str, change: str, rank: int, words: str) -> None:
    outcomes = crew(4, fit, replicas, change, (rank,), seconds=40)
    assert re.match(f"RuntimeError: worker {rank} has {words}", outcomes[rank].error), outcomes[rank].error
    for other in (outcome for place, outcome in enumerate(outcomes) if place != rank):
        assert re.search(f"worker {rank} ended: RuntimeError: worker {rank} has {words}", other.error), other.error
    assert max(outcome.seconds for outcome in outcomes) < TIMEOUT.total_seconds() / 2


@pytest.mark.parametrize(("replicas", "change"), [("gossip", "thaw"), ("equal", "replace")])
def test_on_all_replicas_the_same_change_goes_on(replicas: str, change: str) -> None:
    one, *others = crew(4, fit, replicas, change, (0, 1, 2, 3), seconds=40)
    assert not one.error, one.error
    assert [other.value for other in others] == [one.value] * 3
