"""Elastic workers as Ray's actors: Ray starts a lost one again, which joins; no other restarts.

python docs/examples/ray_elastic.py --workers 3
"""

import argparse

import lightning as L
import ray
import torch
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    """Which of two coordinates is larger."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))

    def training_step(self, batch, batch_idx):
        if self.global_step % 100 == 0:
            print(f"step {self.global_step}, {len(self.trainer.strategy.members)} workers train", flush=True)
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@ray.remote(num_cpus=0, max_concurrency=2)
class Lobby:
    """The rendezvous server, at a port that is free on its host."""

    def place(self):
        return f"{ray.util.get_node_ip_address()}:29400"

    def serve(self, least, most):
        from lightning_decentral.elastic.plan.view import Bounds, Times
        from lightning_decentral.elastic.wire.lobby_server import serve

        serve(Bounds(least, most), Times(10.0), "0.0.0.0", 29400, print)


@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)
class Worker:
    """One member of the run. Ray starts its process again when it is lost, anywhere, and calls `train` once more."""

    def train(self, lobby, least, most, steps):
        from lightning_decentral.gossip import Elastic, GossipStrategy

        x = torch.randn(2048, 2)
        data = DataLoader(TensorDataset(x, (x[:, 0] > x[:, 1]).long()), batch_size=16, shuffle=True)
        trainer = L.Trainer(
            strategy=GossipStrategy(elastic=Elastic(lobby=lobby, workers=(least, most))),
            accelerator="auto",
            devices=1,
            max_epochs=-1,
            max_steps=steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Classifier(), data)
        return trainer.global_step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--num-cpus", type=int, help="of a Ray on this machine alone: by default its processors")
    options = parser.parse_args()
    ray.init(num_cpus=options.num_cpus)
    lobby = Lobby.remote()
    place = ray.get(lobby.place.remote())
    lobby.serve.remote(2, options.workers)
    workers = [Worker.remote() for _ in range(options.workers)]
    print(ray.get([worker.train.remote(place, 2, options.workers, options.steps) for worker in workers]))
