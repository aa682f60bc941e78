"""Loss of the mean of the workers' models on held-out batches, the same at every mark."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, zip_longest
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_decentral.planner.rehearsal.loop_settings import loss_of, seed_host
from lightning_decentral.planner.rehearsal.turns import CPU, map_on_threads, same
from lightning_decentral.planner.rehearsal.worker import quiet
from lightning_decentral.shared.compute.carried import carried
from lightning_decentral.shared.compute.worker_state import random_state, set_random_state

BATCHES = 16  # Number of batches, the first ones of the validation data.
PAIRED = 4  # Batches for differences of losses: fewer are enough, as both losses are on the same ones.


class HeldOutEvaluation:
    """mean_b loss(mean_i x_i, batch b): `training_step` in evaluation mode, without dropout, of a copy of the module on
    the workers' device. `threads`: number of threads over which batches are distributed, unless the step draws random
    numbers."""

    def __init__(
        self, module: LightningModule, batches: Sequence[Any], device: torch.device = CPU, threads: int = 1
    ) -> None:
        self._module, self._device = quiet(copy.deepcopy(module)).eval().to(device), device
        self._given, self._batches = batches, list[Any]()
        self._threads = min(threads, len(batches))
        self._copies = self._copied()

    def loss(self, modules: Sequence[LightningModule], batches: int = BATCHES) -> float:
        """Loss of these workers' mean on so many batches. Random numbers are drawn from the same seed each time."""
        before = random_state()
        with self._validating(modules[0]), torch.no_grad():
            rows, of_one = [module.state_dict().values() for module in modules], carried(self._module)
            for (name, own), *others in zip(self._module.state_dict().items(), *rows, strict=True):
                if isinstance(own, Tensor):
                    averaged = own.is_floating_point() and name not in of_one
                    own.copy_(torch.stack(others).mean(0) if averaged else others[0])
            some = list(enumerate(self._batches[:batches]))
            losses = self._on_threads(some) if self._copies else None
            if losses is None:
                seed_host(0)
                losses = _losses(self._module, some)
        set_random_state(before)
        return sum(losses) / len(losses)

    @contextmanager
    def _validating(self, worker: LightningModule) -> Iterator[None]:
        """Use the worker's submodules, if its hooks have made some, and its Trainer meanwhile.

        A step may read the epoch from the Trainer, and hooks recognize training batches by the Trainer."""
        if self._module.state_dict().keys() != worker.state_dict().keys():
            self._module = quiet(copy.deepcopy(worker)).eval()
            self._copies = self._copied()
        trainer = worker._trainer
        for own in (self._module, *self._copies) if trainer is not None else ():
            own.trainer = trainer
        if trainer is not None:
            trainer.validating = True
        try:
            if not self._batches:
                seed_host(0)
                self._batches = [self._module._apply_batch_transfer_handler(one, self._device) for one in self._given]
            yield
        finally:
            if trainer is not None:
                trainer.training = True

    def _copied(self) -> list[LightningModule]:
        """Copies for the other threads, whose parameters and buffers are the module's own memory."""
        copies = [copy.deepcopy(self._module) for _ in range(self._threads - 1)]
        for found in copies:
            for tensors in (nn.Module.parameters, nn.Module.buffers):
                for own, shared in zip(tensors(found), tensors(self._module), strict=True):
                    own.data = shared.data
        return copies

    def _on_threads(self, batches: Sequence[tuple[int, Any]]) -> list[float] | None:
        """Losses computed on threads; None, now and later, if a step drew random numbers: threads share a generator."""
        each = [self._module, *self._copies]
        seed_host(0)
        seeded = random_state()
        rows = map_on_threads(_losses, each, [batches[first :: len(each)] for first in range(len(each))])
        if not same(seeded, random_state()):
            self._copies, self._threads = [], 1
            return None
        return [loss for row in zip_longest(*rows) for loss in row if loss is not None]


@torch.no_grad()
def _losses(module: LightningModule, batches: Sequence[tuple[int, Any]]) -> list[float]:
    return [float(loss_of(module.training_step(batch, index))) for index, batch in batches]


def held_out(
    module: LightningModule, data: LightningDataModule | DataLoader[Any] | None, given: DataLoader[Any] | None
) -> list[Any]:
    """The first batches of the validation data: those given, the datamodule's, or the module's own. ValueError: there
    are none."""
    found: Any = given
    if found is None and isinstance(data, LightningDataModule) and is_overridden("val_dataloader", data):
        found = data.val_dataloader()
    if found is None and is_overridden("val_dataloader", module):
        owner = copy.deepcopy(module)
        try:
            owner.prepare_data()
            owner.setup("fit")
            found = owner.val_dataloader()
        except RuntimeError as error:  # the module or datamodule uses its Trainer
            name = type(module).__name__
            raise ValueError(f"{name} gives no validation batches by itself ({error}): give validation=") from None
    batches = list(islice(found, BATCHES)) if isinstance(found, DataLoader) else []
    if not batches:
        raise ValueError("no validation batches to compare methods by: give validation=, one torch DataLoader")
    return batches
