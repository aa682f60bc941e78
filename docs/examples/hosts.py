"""One process for each device of each host, started there by `two_machines.sh` or by `slurm.sbatch`.

NODE_RANK=0 MASTER_ADDR=10.8.0.1 MASTER_PORT=29500 python docs/examples/hosts.py --nodes 2 --slow
"""

import argparse

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral.gossip import Complete, Every, GossipStrategy, Int4, Int8, PseudoGradient


class Classifier(L.LightningModule):
    """Which of two coordinates is larger."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def strategy(slow: bool) -> GossipStrategy:
    """On a slow link outer rounds of 8 local steps in 4 bits; otherwise a neighbour in every step, in 8 bits."""
    if slow:
        rule = PseudoGradient(lr=0.7, momentum=0.5)
        return GossipStrategy(topology=Every(8, Complete()), delay=0, combine=rule, codec=Int4())
    return GossipStrategy(codec=Int8())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--devices", type=int, default=1, help="of each host")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--slow", action="store_true", help="tens of megabits per second between the hosts")
    options = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(2048, 2)
    data = DataLoader(TensorDataset(x, (x[:, 0] > x[:, 1]).long()), batch_size=16, shuffle=True)
    trainer = L.Trainer(
        strategy=strategy(options.slow),
        accelerator=options.accelerator,
        num_nodes=options.nodes,
        devices=options.devices,
        max_epochs=-1,
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier()
    trainer.fit(model, data)
    (result,) = trainer.test(model, data, verbose=False)
    if trainer.is_global_zero:
        print(f"{trainer.world_size} workers, accuracy {result['accuracy']:.2f}")
