"""Models without slices: a pipeline of micro-batches against the single process."""

from functools import partial

import pytest
import torch
import transformers
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_decentral.pipeline import (
    Counted,
    Keep,
    OneForwardOneBackward,
    Planned,
    Recompute,
    TeraPipe,
    Uniform,
    ZeroBubble,
)
from lightning_decentral.pipeline.compute.adapters import Chain, blocks_of
from tests.pipeline.training import alone, distance, fit, forked, pipeline

VIT = transformers.ViTConfig(
    hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
    num_channels=1, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
RESNET = transformers.ResNetConfig(
    num_channels=1, embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], layer_type="basic", num_labels=3
)
MODELS = {
    "vit": lambda: transformers.ViTForImageClassification(VIT),
    "resnet": lambda: transformers.ResNetForImageClassification(RESNET),
}


class Images(LightningModule):
    def __init__(self, name, size=8):
        super().__init__()
        torch.manual_seed(0)
        self.model = MODELS[name]().double()
        self._size = size

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(pixel_values=images).logits, labels)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val/loss", nn.functional.cross_entropy(self.model(images).logits, labels), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(3)
        images = torch.randn(24, 1, self._size, self._size, generator=generator, dtype=torch.float64)
        dataset = TensorDataset(images, torch.randint(0, 3, (24,), generator=generator))
        return DataLoader(dataset, batch_size=6, sampler=DistributedSampler(dataset, 1, 0, shuffle=False))

    val_dataloader = train_dataloader


class Perceptron(Images):
    """A model that nobody knows, with the way of saying how it's cut."""

    def __init__(self):
        LightningModule.__init__(self)
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3)
        ).double()
        self._size = 8

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch, batch_idx):
        pass

    def pipeline_stages(self):
        return Chain(self.model, blocks_of(list(self.model)))


class Shared(Perceptron):
    """One linear map in three blocks, one activation everywhere, once inside of another block."""

    def __init__(self):
        super().__init__()
        linear, tanh = nn.Linear(16, 16), nn.Tanh()
        blocks = [linear, tanh, linear, tanh, nn.Linear(16, 16), nn.Sequential(tanh, linear)]
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), *blocks, nn.Linear(16, 3)).double()


class Doubled(nn.Module):
    """Writes to what it is given; twice would be something else."""

    def forward(self, x):
        return x.mul_(2)


class InPlace(Perceptron):
    """The first block of every stage writes to what comes in."""

    def __init__(self):
        super().__init__()
        parts = [Doubled(), nn.Linear(16, 16), Doubled(), nn.ReLU(True), nn.Linear(16, 16), Doubled(), nn.Linear(16, 3)]
        self.model = nn.Sequential(nn.Sequential(Doubled(), nn.Flatten(), nn.Linear(64, 16)), *parts).double()


class AtTheEnd(Callback):
    def __init__(self, folder):
        self._folder = folder

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self._folder / "end.ckpt")


CASES = {
    "vit, two micro-batches": (partial(Images, "vit"), 2, 2, Planned()),
    "vit, three stages": (partial(Images, "vit"), 3, 3, None),
    "resnet": (partial(Images, "resnet", 16), 2, 1, Uniform(1)),
    "pipeline_stages()": (Perceptron, 2, 3, None),
    "modules in several blocks, two stages": (Shared, 2, 1, None),
    "modules in several blocks, three stages": (Shared, 3, 2, None),
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", CASES)
def test_training_is_that_of_one_process(tmp_path, case):
    """ResNet in one micro-batch: BatchNorm takes its statistics from each micro-batch by itself."""
    make, devices, microbatches, slicing = CASES[case]
    wanted, losses, metrics = fit(make(), alone(), tmp_path / "alone")
    how = pipeline(devices, microbatches=microbatches, slicing=slicing)
    found, found_losses, found_metrics = forked(make(), how, tmp_path / "pipeline")
    assert found_losses == pytest.approx(losses, rel=1e-10)
    floats = [name for name, tensor in wanted.items() if tensor.is_floating_point()]
    assert distance({n: found[n] for n in floats}, {n: wanted[n] for n in floats}) < 1e-8
    assert all(torch.equal(found[n], wanted[n]) for n in wanted if n not in floats)
    assert found_metrics == pytest.approx(metrics, rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_slices_are_refused_and_it_is_said_why(tmp_path, name):
    words = r"can't be cut into slices: leave slicing=Uniform\(n=4\) out .*: strategy/slicing=planned, the default"
    with pytest.raises(RuntimeError, match=words):
        forked(Images(name), pipeline(2, slicing=Uniform(4)), tmp_path)


def test_an_unknown_model_says_what_is_known(tmp_path):
    class Unknown(Images):
        def __init__(self):
            LightningModule.__init__(self)
            self.model, self._size = nn.Linear(4, 3), 8

    with pytest.raises(
        RuntimeError, match=r"found none. Known are transformers' causal language models.*return a Chain from a method"
    ):
        forked(Unknown(), pipeline(2), tmp_path)


@pytest.mark.sampled
@pytest.mark.parametrize("activations", [Keep(), Recompute()])
@pytest.mark.parametrize(
    "schedule", [OneForwardOneBackward(), TeraPipe(), ZeroBubble()], ids=lambda s: type(s).__name__
)
def test_blocks_may_write_to_what_comes_in(tmp_path, schedule, activations):
    wanted, losses, _ = fit(InPlace(), alone(), tmp_path / "alone", max_steps=2)
    how = {"partition": Counted((1, 2, 5)), "microbatches": 2, "slicing": None}
    how = pipeline(3, schedule=schedule, activations=activations, **how)
    found, found_losses, _ = forked(InPlace(), how, tmp_path / "p", max_steps=2)
    assert found_losses == pytest.approx(losses, rel=1e-10)
    assert distance(found, wanted) < 1e-8


def test_what_blocks_share_is_saved_and_given_back(tmp_path):
    wanted, *_ = fit(Shared(), alone(), tmp_path / "alone")
    found, *_ = forked(Shared(), pipeline(3, slicing=None), tmp_path, callbacks=[AtTheEnd(tmp_path)])
    assert distance(found, wanted) < 1e-8
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert list(saved["state_dict"]) == list(Shared().state_dict())
    assert all(torch.equal(saved["state_dict"][name], tensor) for name, tensor in found.items())
    assert sum(len(group["params"]) for group in saved["optimizer_states"][0]["param_groups"]) == 8


class Normed(Perceptron):
    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(16)
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), norm, nn.Linear(16, 16), norm, nn.Linear(16, 3))


def test_running_statistics_of_several_blocks_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match="several blocks of the Chain share one BatchNorm1d, whose running stat"):
        forked(Normed(), pipeline(2, slicing=None), tmp_path)
