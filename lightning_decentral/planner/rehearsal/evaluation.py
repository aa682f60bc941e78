"""Loss of the mean of the workers' models on held-out batches, the same at every mark."""

import copy
from collections.abc import Sequence
from itertools import islice, zip_longest
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_decentral.planner.rehearsal.abreast import ThreadPool
from lightning_decentral.planner.rehearsal.worker import (
    CPU,
    Module,
    loss_of,
    moved,
    quiet,
    random_states,
    set_random_states,
)
from lightning_decentral.shared.compute.carried import carried

BATCHES = 16
"""Of the validation data, the first ones."""
PAIRED = 4
"""Of these, where losses are compared on the same batches: what makes one batch harder is in both, and falls out."""


class Evaluation:
    """mean_b loss(mean_i x_i, batch b): `training_step` in evaluation mode, without dropout.

    Args:
        module: whose copy takes the means.
        device: where the workers are.
        threads: that share the batches out, unless the step draws random numbers.
    """

    def __init__(
        self, module: LightningModule, batches: Sequence[Any], device: torch.device = CPU, threads: int = 1
    ) -> None:
        self._module, self._device = quiet(copy.deepcopy(module)).eval().to(device), device
        self._batches = [moved(module, batch, device) for batch in batches]
        self._copies = [_same_values(self._module) for _ in range(min(threads, len(batches)) - 1)]

    def loss(self, modules: Sequence[LightningModule], batches: int = BATCHES) -> float:
        """Of these workers, on the first so many. Random numbers are drawn from the same seed each time."""
        self._mean([list(module.state_dict().values()) for module in modules])
        some, before = list(enumerate(self._batches[:batches])), random_states(self._device)
        losses = self._on_threads(some) if self._copies else None
        if losses is None:
            torch.manual_seed(0)
            losses = _losses(self._module, some)
        set_random_states(before, self._device)
        return sum(losses) / len(losses)

    def _on_threads(self, batches: Sequence[tuple[int, Any]]) -> list[float] | None:
        """None, and never again: somebody drew random numbers, which are one generator's for all threads."""
        each = [self._module, *self._copies]
        with ThreadPool(len(each)) as pool:
            torch.manual_seed(0)
            (seeded,) = random_states(self._device)
            rows = pool.map(_losses, each, [batches[first :: len(each)] for first in range(len(each))])
            (after,) = random_states(self._device)
        if not torch.equal(seeded, after):
            self._copies = []
            return None
        return [loss for row in zip_longest(*rows) for loss in row if loss is not None]

    @torch.no_grad()
    def _mean(self, rows: list[list[Any]]) -> None:
        of_one = carried(self._module)
        for (name, own), *others in zip(self._module.state_dict().items(), *rows, strict=True):
            if isinstance(own, Tensor):
                averaged = own.is_floating_point() and name not in of_one
                own.copy_(torch.stack(others).mean(0) if averaged else others[0])


@torch.no_grad()
def _losses(module: LightningModule, batches: Sequence[tuple[int, Any]]) -> list[float]:
    return [float(loss_of(module.training_step(batch, index))) for index, batch in batches]


def _same_values(module: Module) -> Module:
    """A copy for another thread, whose parameters and buffers are the module's own memory."""
    found = copy.deepcopy(module)
    for of in (nn.Module.parameters, nn.Module.buffers):
        for own, shared in zip(of(found), of(module), strict=True):
            own.data = shared.data
    return found


def held_out(
    module: LightningModule, data: LightningDataModule | DataLoader[Any] | None, given: DataLoader[Any] | None
) -> list[Any]:
    """The first batches of the validation data: those given, the datamodule's, or the module's own.

    Raises:
        ValueError: there are none.
    """
    found: Any = given
    for owner in (data, module):
        if found is None and isinstance(owner, (LightningDataModule, LightningModule)):
            found = owner.val_dataloader() if is_overridden("val_dataloader", owner) else None
    batches = list(islice(found, BATCHES)) if isinstance(found, DataLoader) else []
    if not batches:
        raise ValueError("no validation batches to compare methods by: give validation=, one torch DataLoader")
    return batches
