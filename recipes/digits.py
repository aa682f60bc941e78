"""Handwritten digits that come with scikit-learn: 1,797 images of 8x8 pixels. A sanity scale, no benchmark."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import TensorDataset

from lightning_decentral.recipes.extras import extra
from lightning_decentral.recipes.loaders import Examples, Loaders, split

BRIGHTEST = 16


class Digits(Loaders):
    """Images [1, 8, 8] in [-1, 1] and labels 0 to 9: 1,257 for training, 180 for validation, 360 for test."""

    @property
    def sizes(self) -> dict[str, int]:
        """Ten labels, 8x8 pixels, one channel."""
        return {"num_labels": 10, "image_size": 8, "num_channels": 1}

    def read(self) -> Sequence[Examples]:
        """From the installed package, nothing is downloaded."""
        digits = extra("sklearn.datasets").load_digits()
        images = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / (BRIGHTEST / 2) - 1
        labels = torch.as_tensor(digits.target, dtype=torch.int64)
        return split(TensorDataset(images, labels), (180, 360), self.seed)
