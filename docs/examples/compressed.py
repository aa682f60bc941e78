"""The script of docs/compressed.md: `python docs/examples/compressed.py`."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_decentral  # registers "compressed"


class Classifier(L.LightningModule):
    """Which of two coordinates is larger."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


x = torch.randn(1024, 2)
data = DataLoader(TensorDataset(x, (x[:, 0] > x[:, 1]).long()), batch_size=32)
if __name__ == "__main__":
    trainer = L.Trainer(
        strategy="compressed", devices=2, accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False
    )
    trainer.fit(Classifier(), data)
