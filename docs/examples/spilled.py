"""The script of docs/spilled.md: `python docs/examples/spilled.py`."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral import SpilledStrategy


class Chain(L.LightningModule):
    """Eight wide layers, 32 MiB, with gradients and Adam's state 128; room for four: two, and two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return torch.nn.functional.mse_loss(self.layers(x), x)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def train(strategy):
    L.seed_everything(0, verbose=False)
    module = Chain()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(12, 1024)), batch_size=4))
    return module.state_dict()


if __name__ == "__main__":
    spilled = train(SpilledStrategy(memory_bytes=17 * 2**20))
    plain = train("auto")
    assert all(torch.equal(spilled[name], plain[name]) for name in plain)
    print("the same weights")  # the same weights
