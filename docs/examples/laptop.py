"""A whole program, two processes on a laptop: `python docs/examples/laptop.py`."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_decentral  # registers "gossip"


class Line(L.LightningModule):
    """y = 2 a - b, to be found from noisy examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_error", torch.nn.functional.mse_loss(self.layer(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


def examples(seed: int) -> DataLoader:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 2, generator=draw)
    y = x @ torch.tensor([[2.0], [-1.0]]) + 0.01 * torch.randn(256, 1, generator=draw)
    return DataLoader(TensorDataset(x, y), batch_size=16)


if __name__ == "__main__":
    trainer = L.Trainer(
        strategy="gossip",
        accelerator="cpu",
        devices=2,
        max_epochs=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Line()
    trainer.fit(model, examples(seed=0))
    (result,) = trainer.test(model, examples(seed=1), verbose=False)
    assert result["test_error"] < 0.01, result
    if trainer.is_global_zero:
        print("workers:", trainer.world_size)  # workers: 2
