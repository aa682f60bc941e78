"""A sweep whose members share the devices of this machine.

python docs/examples/sweep.py -m lr=1,0.1,0.01 hydra/launcher=shard_parallel hydra.launcher.devices=2
"""

import hydra
import lightning as L
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from torch.utils.data import DataLoader, TensorDataset

ConfigStore.instance().store(name="sweep", node={"lr": 0.1, "steps": 200})


class Classifier(L.LightningModule):
    """Which of two coordinates is larger."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@hydra.main(version_base="1.3", config_path=None, config_name="sweep")
def main(cfg: DictConfig) -> float:
    L.seed_everything(0, verbose=False)
    x = torch.randn(512, 2)
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=-1,
        max_steps=cfg.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(cfg.lr), DataLoader(TensorDataset(x, (x[:, 0] > x[:, 1]).long()), batch_size=16))
    loss = float(trainer.callback_metrics["loss"])
    print(f"lr {cfg.lr:g}: loss {loss:.3f}")
    return loss


if __name__ == "__main__":
    main()
