"""Image transforms as values: each maps one image [channels, height, width] of floats to another.

Written with torch alone; random ones draw from torch's global generator, which Lightning seeds per worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Transform = Callable[[Tensor], Tensor]


def chain(transforms: Sequence[Transform], image: Tensor) -> Tensor:
    """The transforms one after the other."""
    for transform in transforms:
        image = transform(image)
    return image


@dataclass(frozen=True)
class Normalise:
    """(image - mean) / std, one mean and one std per channel."""

    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, image: Tensor) -> Tensor:
        return (image - torch.tensor(self.mean)[:, None, None]) / torch.tensor(self.std)[:, None, None]


@dataclass(frozen=True)
class RandomFlip:
    """The image or its mirror image, left to right, with equal chance."""

    def __call__(self, image: Tensor) -> Tensor:
        return image.flip(-1) if _uniform(0, 1) < 0.5 else image


@dataclass(frozen=True)
class RandomCrop:
    """`padding` zeros on every side, then a random window of the original size (He et al., 1512.03385, section 4.2)."""

    padding: int

    def __call__(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        padded = functional.pad(image, [self.padding] * 4)
        top, left = (int(torch.randint(2 * self.padding + 1, ())) for _ in range(2))
        return padded[:, top : top + height, left : left + width]


@dataclass(frozen=True)
class RandomResizedCrop:
    """A window of 8 % to 100 % of the area and sides 3:4 to 4:3, resized to size x size (Szegedy et al., 1409.4842)."""

    size: int
    smallest_area: float = 0.08

    def __call__(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        area = height * width * _uniform(self.smallest_area, 1)
        ratio = (4 / 3) ** _uniform(-1, 1)
        rows = min(height, max(1, round((area / ratio) ** 0.5)))
        columns = min(width, max(1, round((area * ratio) ** 0.5)))
        top = int(torch.randint(height - rows + 1, ()))
        left = int(torch.randint(width - columns + 1, ()))
        return _resized(image[:, top : top + rows, left : left + columns], self.size, self.size)


@dataclass(frozen=True)
class Resize:
    """The shorter side becomes `size` pixels, the ratio of the sides stays."""

    size: int

    def __call__(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        scale = self.size / min(height, width)
        return _resized(image, round(height * scale), round(width * scale))


@dataclass(frozen=True)
class CenterCrop:
    """The size x size pixels in the middle."""

    size: int

    def __call__(self, image: Tensor) -> Tensor:
        top, left = ((side - self.size) // 2 for side in image.shape[-2:])
        return image[:, top : top + self.size, left : left + self.size]


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


def _resized(image: Tensor, height: int, width: int) -> Tensor:
    resized = functional.interpolate(image[None], (height, width), mode="bilinear", antialias=True, align_corners=False)
    return resized[0]
