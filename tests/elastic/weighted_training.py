"""Trains two workers, the second with batches three times as large: run as a script, with a folder.

Short, as `test_weighted` says what must be true of it.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral.elastic.wire import starter
from lightning_decentral.gossip import Complete, Elastic, GossipStrategy
from tests.tiny import QUIET

BATCH, EXAMPLES, EPOCHS, WEIGHT = 2, 48, 2, 3


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(EXAMPLES, 4, dtype=torch.float64, generator=draw)
    return TensorDataset(torch.arange(EXAMPLES), x, torch.randn(EXAMPLES, 1, dtype=torch.float64, generator=draw))


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Linear(4, 1, dtype=torch.float64)
        self.taken: list[list[int]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        places, x, y = batch
        self.taken.append(places.tolist())
        loss: Tensor = (self.net(x) - y).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data(), batch_size=BATCH, shuffle=True)


def main(folder: Path) -> None:
    starter.HASTY_SECONDS = 0.0
    number = int(os.environ.get(starter.WORKER, "0"))
    elastic = Elastic(workers=(2, 2), weight=WEIGHT if number else 1)
    strategy = GossipStrategy(elastic=elastic, topology=Complete(), delay=0)
    trainer = Trainer(**QUIET, strategy=strategy, devices=2, max_epochs=EPOCHS)
    module = Net()
    trainer.fit(module)
    kept = {"taken": module.taken, "rate": trainer.optimizers[0].param_groups[0]["lr"], **module.state_dict()}
    torch.save(kept, folder / f"w{number}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
