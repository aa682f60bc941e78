"""`strategy=ddp_fp16`: gradients are averaged in half precision, on gloo, too."""

from typing import Any

import torch
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_decentral.recipes.ddp import HalfPrecisionDDP

SMALL = 2.0**-30  # half precision has no such number
QUIET: dict[str, Any] = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


class Weights(LightningModule):
    """Two weights whose gradients are 1 and `SMALL`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return (self.weight * torch.tensor([1.0, SMALL])).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1.0)


def test_the_all_reduce_sends_half_precision() -> None:
    model = Weights()
    strategy = HalfPrecisionDDP(start_method="fork")
    trainer = Trainer(**QUIET, accelerator="cpu", devices=2, max_steps=1, strategy=strategy)
    trainer.fit(model, DataLoader(torch.zeros(4, 1)))
    assert model.weight.tolist() == [-1, 0]


def test_the_word_makes_it() -> None:
    with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
        cfg = compose("train", ["strategy=ddp_fp16"])
    assert isinstance(instantiate(cfg.strategy), HalfPrecisionDDP)
