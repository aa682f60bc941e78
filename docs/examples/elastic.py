"""Workers that come and go: start it once for each, anywhere; the lobby first.

lightning-decentral lobby --port 29400 --workers 2:16
python docs/examples/elastic.py 10.8.0.1:29400
"""

import argparse

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral.gossip import Elastic, GossipStrategy


class Classifier(L.LightningModule):
    """Which of two coordinates is larger."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("lobby", help="where it listens: 10.8.0.1:29400")
    parser.add_argument("--least", type=int, default=2)
    parser.add_argument("--most", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    x = torch.randn(2048, 2)
    data = DataLoader(TensorDataset(x, (x[:, 0] > x[:, 1]).long()), batch_size=16, shuffle=True)
    elastic = Elastic(lobby=options.lobby, workers=(options.least, options.most))
    trainer = L.Trainer(
        strategy=GossipStrategy(elastic=elastic),
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    trainer.fit(model, data)
    right = (model.net(x).argmax(1) == (x[:, 0] > x[:, 1])).float().mean()
    print(f"step {trainer.global_step}, accuracy {float(right):.2f}")
