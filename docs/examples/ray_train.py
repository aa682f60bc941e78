"""The script of docs/ray.md: `python docs/examples/ray_train.py`."""

import tempfile
from contextlib import nullcontext

import lightning as L
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset


class Line(L.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.layer, self.lr = torch.nn.Linear(2, 1), lr

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def train(config):
    import lightning_decentral  # in each worker: registers the names

    x = torch.randn(256, 2, generator=torch.Generator().manual_seed(0))
    trainer = L.Trainer(
        strategy=config["strategy"],
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        max_epochs=3,
        enable_checkpointing=False,
    )
    trainer = prepare_trainer(trainer)
    saved = ray.train.get_checkpoint()  # after a failure, or in a run that goes on
    with saved.as_directory() if saved else nullcontext() as folder:
        path = folder and f"{folder}/checkpoint.ckpt"
        trainer.fit(Line(config["lr"]), DataLoader(TensorDataset(x, x @ torch.ones(2, 1)), 16), ckpt_path=path)


if __name__ == "__main__":
    storage = tempfile.mkdtemp()  # where all hosts read and write: a bucket, NFS
    result = TorchTrainer(
        train,
        train_loop_config={"strategy": "gossip", "lr": 0.1},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage, failure_config=FailureConfig(max_failures=3)),
    ).fit()
    print(result.metrics["epoch"])  # 2
