"""Measured losses: batches and seconds until a method reaches the final loss of `ddp` with AdamW, by kind of model.

    seconds to the loss = batches to the loss * seconds of a batch

Batches don't depend on the network and hardly on the device, so they carry over to a user's own cluster, whose seconds
of a batch are predicted. `plan`, the hint of a strategy's start, error texts and docs/choosing.md read this one table,
`known_losses.json`, which `benchmarks/pages.py known --write` makes of the committed results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import log2

BASELINE = "ddp"
RECIPES = {"gpt": "text", "vit": "images, a transformer", "resnet": "images, a ResNet"}  # Kind of model of each recipe.


@dataclass(frozen=True)
class KnownLosses:
    """Measured losses of one model on `workers` workers."""

    kind: str  # kind of the model, a value of `RECIPES`
    recipe: str  # recipe whose runs were measured
    workers: int
    batch: int  # samples of a worker and step
    parameter_bytes: int
    loss: float  # final loss of `ddp` with AdamW; of images the cross-entropy of the test set
    seeds: int  # number of runs of each method
    batches: Mapping[str, int | None]  # batches until that loss, by method; None where as many steps don't reach it
    overrides: Mapping[str, str]  # those of `recipes/train.py` with the measured rate and momentum, by method
    seconds: Mapping[str, Mapping[str, float]]  # of a batch on hosts of one thread, {bits/s: {method: seconds}}

    def share(self, method: str) -> float | None:
        """Return the share of the baseline's batches that the method needs; None where it doesn't reach the loss."""
        own, whole = self.batches.get(method), self.batches[BASELINE]
        return own / whole if own and whole else None

    def distance(self, workers: int, batch: int, parameter_bytes: int) -> float:
        """Return the distance to a user's setting: doublings of batch and parameters, and twice of workers."""
        # A method's loss compared with `ddp`'s depends most on the number of workers.
        pairs = (self.workers, workers, 2), (self.batch, batch, 1), (self.parameter_bytes, max(1, parameter_bytes), 1)
        return sum(weight * abs(log2(known / asked)) for known, asked, weight in pairs)

    def is_far(self, workers: int, parameter_bytes: int) -> bool:
        """Return whether a user has more than twice the workers or eight times the parameters."""
        return workers > 2 * self.workers or parameter_bytes > 8 * self.parameter_bytes

    def __str__(self) -> str:
        size = f"{self.parameter_bytes / 4e6:.2g} M parameters"
        return f"recipe {self.recipe.split('-')[0]}, {size}, {self.workers} workers, batches of {self.batch}"


@cache
def known_losses() -> tuple[KnownLosses, ...]:
    """Return every measured setting, text on four workers first."""
    text = files("lightning_decentral.shared.plan").joinpath("known_losses.json").read_text()
    return tuple(KnownLosses(**found) for found in json.loads(text))


def overrides_of(method: str) -> str | None:
    """Return the overrides of `recipes/train.py` that train text on four workers with the method."""
    return known_losses()[0].overrides.get(method)


def nearest(kind: str, workers: int, batch: int, parameter_bytes: int) -> KnownLosses | None:
    """Return the measured setting of this kind nearest to a user's; None for a kind that wasn't measured."""
    alike = [one for one in known_losses() if one.kind == kind]
    return min(alike, key=lambda one: one.distance(workers, batch, parameter_bytes), default=None)


def kind_of(overrides: Sequence[str]) -> str | None:
    """Return the kind of model that overrides of `recipes/train.py` make; None for a model of the user's own."""
    chosen = dict(one.lstrip("+").partition("=")[::2] for one in overrides)
    return None if "model" in chosen else RECIPES.get(chosen.get("recipe", ""))
