"""Whole trainings of what only some models have: packed rows, the loss of routers, adapters by `peft`."""

import peft
import pytest
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.pipeline.causal import VOCABULARY
from tests.pipeline.compute.causal.families import family
from tests.pipeline.compute.causal.stages import random
from tests.pipeline.training import LENGTH, alone, distance, fit, forked, pipeline


class Documents(LightningModule):
    """Two documents in each row."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def _loss(self, batch):
        ids, positions = batch
        return self.model(input_ids=ids, position_ids=positions, use_cache=False, labels=ids).loss

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def train_dataloader(self):
        ids = torch.randint(3, VOCABULARY, (12, LENGTH), generator=torch.Generator().manual_seed(2))
        cuts = torch.arange(12)[:, None] % 9 + 2
        places = torch.arange(LENGTH).expand(12, -1)
        dataset = TensorDataset(ids, torch.where(places < cuts, places, places - cuts))
        return DataLoader(dataset, batch_size=3, sampler=DistributedSampler(dataset, 1, 0, shuffle=False))

    val_dataloader = train_dataloader


def adapted():
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=3, target_modules="all-linear", task_type="CAUSAL_LM")
    return random(peft.get_peft_model(family("qwen3")(), lora))


@pytest.mark.sampled
@pytest.mark.parametrize("make", [family("olmoe"), adapted], ids=["experts", "adapters"])
def test_training_is_that_of_one_process(tmp_path, make):
    """Up to float32, in which norms are computed."""
    wanted, losses, metrics = fit(Documents(make()), alone(), tmp_path / "alone")
    found, found_losses, found_metrics = forked(Documents(make()), pipeline(2), tmp_path / "pipeline")
    assert found_losses == pytest.approx(losses, rel=1e-6)
    assert distance(found, wanted) < 1e-5
    assert found_metrics == pytest.approx(metrics, rel=1e-6)
