"""LBFGS, which calls the closure as often as the loss asks: together with the others, or each by itself."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_decentral import CompressedStrategy, GossipStrategy
from lightning_decentral.gossip import AllReduce, Complete, Plain, Solo
from tests.tiny import QUIET, Quadratic, Record, in_processes, recorded

SIZE, STEPS = 3, 4


class Counted(Record):
    """A round for each step."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        assert trainer.world_size == 1 or trainer.strategy.rounds() == [trainer.global_step]


class Bent(Quadratic):
    """|x - rank|^2 and a fourth power: line searches of the workers by themselves take different numbers of steps."""

    def loss_of(self, rank: int) -> Tensor:
        apart = self.x - rank
        return apart.square().sum() + (1 + rank) * apart.pow(4).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(self.global_rank)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")


class BentTogether(Bent):
    """The mean of the workers' losses, in one process."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.stack([self.loss_of(rank) for rank in range(SIZE)]).mean()


class BentAlike(Bent):
    """The same loss for all workers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(1)


def fit(folder: Path, module: Quadratic, make: Any, devices: int) -> None:
    strategy = make() if make is not None else "auto"
    trainer = Trainer(**QUIET, devices=devices, max_steps=STEPS, strategy=strategy, callbacks=[Counted(folder)])
    trainer.fit(module)


def steps_of(folder: Path, module: Quadratic, make: Any, devices: int = SIZE) -> Tensor:
    folder.mkdir()
    in_processes(fit, folder, module, make, devices)
    return recorded(folder, devices)


def test_replicas_search_as_one_process_with_the_mean_of_their_losses(tmp_path: Path) -> None:
    compressed = partial(CompressedStrategy, codec=Plain(), start_method="fork")
    found = steps_of(tmp_path / "all", Bent(), compressed)
    alone = steps_of(tmp_path / "one", BentTogether(), None, devices=1)
    torch.testing.assert_close(found, alone.expand_as(found))


@pytest.mark.parametrize("delay", [0, 1])
def test_gossip_mixes_once_a_step_however_often_the_closure_is_called(tmp_path: Path, delay: int) -> None:
    """Where all have one loss, mixing changes nothing."""
    gossip = partial(GossipStrategy, topology=Complete(), delay=delay, start_method="fork")
    found = steps_of(tmp_path / "all", BentAlike(), gossip)
    alone = steps_of(tmp_path / "one", BentAlike(), None, devices=1)
    torch.testing.assert_close(found, alone.expand_as(found))


def test_devices_of_an_island_can_not() -> None:
    optimizers = [Bent().configure_optimizers()]
    Solo().refuse(optimizers)
    with pytest.raises(ValueError, match=r"LBFGS runs the backward .* AllReduce\(devices=2"):
        AllReduce(devices=2).refuse(optimizers)
