"""Handwritten digits in unequal hands: each worker's shard has its own mix of classes, and a model for each worker."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

TRAINED, TUNED = 1120, 250  # examples to train and to tune on; the other 427 are the test
BRIGHTEST = 16


def dirichlet_shards(labels: NDArray[np.int64], workers: int, alpha: float, seed: int) -> list[NDArray[np.int64]]:
    """One shard of indices for each worker; every example is in exactly one, and sizes differ by at most one.

    Class c goes to worker i with probability q_ci, q_c ~ Dirichlet(alpha, ..., alpha) over the workers that have room.
    Small alpha: few workers share a class and see one or two classes each; large alpha: all alike. Source: Hsu et al.
    1909.06335, who draw per worker; per class as in Lin et al. 2102.04761, with shards of equal size.
    """
    random = np.random.default_rng(seed)
    room = np.array([len(labels) // workers + (i < len(labels) % workers) for i in range(workers)])
    shards: list[list[int]] = [[] for _ in range(workers)]
    for label in range(int(labels.max()) + 1):
        share = random.dirichlet([alpha] * workers)
        for example in random.permutation(np.flatnonzero(labels == label)):
            weights = share * (room > 0)
            weights = weights if weights.sum() > 0 else room
            worker = random.choice(workers, p=weights / weights.sum())
            shards[worker].append(int(example))
            room[worker] -= 1
    return [np.array(shard) for shard in shards]


def skew(labels: NDArray[np.int64], shards: Sequence[NDArray[np.int64]]) -> float:
    """Mean over the shards of the total variation between a shard's classes and all labels' classes: 0 alike, towards 1
    disjoint."""
    classes = int(labels.max()) + 1
    everyone = np.bincount(labels, minlength=classes) / len(labels)
    mine = [np.bincount(labels[shard], minlength=classes) / len(shard) for shard in shards]
    return float(np.mean([np.abs(p - everyone).sum() / 2 for p in mine]))


@dataclass(frozen=True)
class Digits:
    """Images [count, 64] in [0, 1] and labels of one split."""

    images: Tensor
    labels: Tensor


def digits() -> tuple[Digits, Digits, Digits]:
    """Training, tuning and test split; the same for every seed, none of them seen by another."""
    loaded = load_digits()
    order = np.random.default_rng(0).permutation(len(loaded.target))
    images = torch.from_numpy(loaded.data[order] / BRIGHTEST).float()
    labels = torch.from_numpy(loaded.target[order]).long()
    parts = (slice(None, TRAINED), slice(TRAINED, TRAINED + TUNED), slice(TRAINED + TUNED, None))
    trained, tuned, tested = (Digits(images[part], labels[part]) for part in parts)
    return trained, tuned, tested


class Network:
    """A multilayer perceptron 64-64-10 as a function of its flat parameters [4810], many of them at once."""

    def __init__(self) -> None:
        self._module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self._shapes = {name: parameter.shape for name, parameter in self._module.named_parameters()}
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        self.gradients = vmap(grad(self._loss))
        """(flat [models, dim], images [models, batch, 64], labels [models, batch]) -> [models, dim]"""

    def start(self, seed: int) -> Tensor:
        """torch's own initialization, flat."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for layer in (self._module[0], self._module[2]):
                layer.reset_parameters()
        return torch.cat([parameter.detach().flatten() for parameter in self._module.parameters()])

    def accuracy(self, flat: Tensor, of: Digits) -> Tensor:
        """[models, dim] -> [models], each in [0, 1]."""
        guesses = vmap(self._logits, in_dims=(0, None))(flat, of.images).argmax(-1)
        return (guesses == of.labels).float().mean(-1)

    def _logits(self, flat: Tensor, images: Tensor) -> Tensor:
        parts = zip(self._shapes.items(), flat.split(self._sizes), strict=True)
        return functional_call(self._module, {name: part.view(shape) for (name, shape), part in parts}, (images,))

    def _loss(self, flat: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self._logits(flat, images), labels)
