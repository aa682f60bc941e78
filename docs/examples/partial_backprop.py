"""The script of docs/partial-backprop.md: `python docs/examples/partial_backprop.py`."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral import PartialBackpropStrategy
from lightning_decentral.partial import Temporal


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x):
        return x + self.layer(x).tanh()


class Classifier(L.LightningModule):
    """Which of two coordinates is larger."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [Block() for _ in range(4)]
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 16), *blocks, torch.nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    L.seed_everything(0, workers=True, verbose=False)
    x = torch.randn(512, 2)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > x[:, 1]).long()), batch_size=16)
    trainer = L.Trainer(
        strategy=PartialBackpropStrategy(depth=Temporal(warm_up=8)),
        accelerator="cpu",
        devices=2,
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader, loader)
    accuracy = float(trainer.callback_metrics["accuracy"])
    assert accuracy > 0.9, accuracy
    if trainer.is_global_zero:
        print("trained in four segments")  # trained in four segments
