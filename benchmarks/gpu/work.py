"""What is trained to measure a step on a GPU: two recipes in their usual sizes, on batches of random numbers."""

from dataclasses import dataclass

import torch
from hydra import compose, initialize_config_module
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import Dataset

from common import from_checkout  # noqa: F401
from lightning_decentral.recipes.train import build_model


@dataclass(frozen=True)
class Work:
    """A recipe, how large it is, and a batch of it made of random numbers."""

    words: tuple[str, ...]
    sizes: dict[str, int]
    batch: int

    def model(self) -> LightningModule:
        """Untrained."""
        with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
            return build_model(compose("train", list(self.words)), dict(self.sizes))

    def examples(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """A batch, on the device."""
        random = torch.Generator().manual_seed(0)
        if "n_positions" in self.sizes:
            shape = (self.batch, self.sizes["n_positions"] + 1)
            tokens = torch.randint(self.sizes["vocab_size"], shape, generator=random).to(device)
            return tokens[:, :-1], tokens[:, 1:]
        side = self.sizes["image_size"]
        images = torch.randn(self.batch, self.sizes["num_channels"], side, side, generator=random)
        labels = torch.randint(self.sizes["num_labels"], (self.batch,), generator=random)
        return images.to(device), labels.to(device)


WORKS = {
    "GPT-2 small, 8 x 1024 tokens": Work(
        ("recipe=gpt", "model.config.n_embd=768", "model.config.n_layer=12", "model.config.n_head=12"),
        {"vocab_size": 50_304, "n_positions": 1024},
        batch=8,
    ),
    "ResNet-50, 64 images of 224 x 224": Work(
        (
            "recipe=resnet",
            "model.config.embedding_size=64",
            "model.config.hidden_sizes=[256,512,1024,2048]",
            "model.config.depths=[3,4,6,3]",
            "model.config.layer_type=bottleneck",
        ),
        {"num_labels": 1000, "image_size": 224, "num_channels": 3},
        batch=64,
    ),
}


class Repeated(Dataset[tuple[Tensor, Tensor]]):
    """One batch again and again, where it is computed on: loading costs nothing."""

    def __init__(self, batch: tuple[Tensor, Tensor], times: int) -> None:
        self._batch, self._times = batch, times

    def __len__(self) -> int:
        return self._times

    def __getitem__(self, _: int) -> tuple[Tensor, Tensor]:
        return self._batch
