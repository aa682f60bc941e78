"""Modules that change while they are trained, and code that writes to parameters from within: right, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from lightning_decentral import SpilledStrategy
from lightning_decentral.spilled import OnDevice
from tests.spilled.spilling import WIDTH, Chain, fit, rows, same_states

Change = Callable[[Any], object]


def pruned(module: Any) -> None:
    prune.l1_unstructured(module.layers[1], "weight", 0.5)


def untied(module: Any) -> None:
    module.layers[3].weight = nn.Parameter(module.layers[3].weight.detach().clone())


def transposed(module: Any) -> None:
    module.layers[2].weight.data = module.layers[2].weight.data[: WIDTH // 2].repeat(2, 1).t()


def lengthened(module: Any) -> None:
    module.extra.data = torch.ones(7)
    module.extra.grad = None


def replaced_layer(module: Any) -> None:
    module.layers[4] = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH))


CHANGES: dict[str, tuple[Change, ...]] = {
    "pruned": (pruned,),
    "pruned for good": (pruned, lambda module: prune.remove(module.layers[1], "weight")),
    "weight norm": (lambda module: parametrizations.weight_norm(module.layers[1]),),
    "spectral norm": (lambda module: parametrizations.spectral_norm(module.layers[1]),),
    "orthogonal": (lambda module: parametrizations.orthogonal(module.layers[1]),),
    "reparametrized, and back": (
        lambda module: parametrizations.weight_norm(module.layers[1]),
        lambda module: parametrize.remove_parametrizations(module.layers[1], "weight"),
    ),
    "untied": (untied,),
    "another order in memory": (transposed,),
    "another shape": (lengthened,),
    "another module": (replaced_layer,),
}


class Changing(Chain):
    """Two layers are tied at first; something is used outside of all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].weight = self.layers[2].weight  # type: ignore[assignment]
        self.extra = nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.extra.square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class Changes(Callback):
    """Changes the module in the second step and in later ones, and forgets the optimizer's state where shapes do."""

    def __init__(self, changes: tuple[Change, ...]) -> None:
        self.changes = changes

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        place = trainer.global_step - 2
        if 0 <= place < len(self.changes):
            torch.manual_seed(place)
            self.changes[place](pl_module)
            trainer.strategy.setup_optimizers(trainer)
            pl_module.layers(torch.ones(1, WIDTH))  # type: ignore[operator]


@pytest.mark.parametrize("name", CHANGES)
def test_modules_may_change_between_steps(name: str) -> None:
    """Once more where measured ways exist: the third step is planned."""
    torch.manual_seed(2)
    loader = rows()
    runs = [
        fit(Changing(), loader, how, callbacks=[Changes(CHANGES[name])], limit_val_batches=0)
        for how in (SpilledStrategy(), SpilledStrategy(update=OnDevice()), "auto")
    ]
    assert same_states(runs[0], runs[2])
    assert same_states(runs[1], runs[2])


# ---- frozen and thawed within a step -------------------------------------------------------------------------------


class Switches(Chain):
    """The third layer and what is outside of all blocks begin frozen; step 2 thaws them, or freezes another layer."""

    def __init__(self, thaws: bool) -> None:
        super().__init__()
        self.thaws, self.extra = thaws, nn.Parameter(torch.ones(3))
        for part in (self.layers[2].weight, self.extra):
            part.requires_grad_(not thaws)  # type: ignore[operator]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 2:
            self.layers[2].requires_grad_(self.thaws)
            if self.thaws:
                self.extra.requires_grad_()
        return super().training_step(batch, batch_idx) + (self.extra * batch[0][0, :3]).sum()


@pytest.mark.parametrize("thaws", [True, False])
def test_parts_are_frozen_and_thawed_within_the_step(thaws: bool) -> None:
    torch.manual_seed(2)
    loader = rows()
    runs = [fit(Switches(thaws), loader, how, limit_val_batches=0) for how in (SpilledStrategy(), "auto")]
    assert same_states(*runs)
    assert runs[0].lightning_module.layers[2].weight.requires_grad == thaws  # type: ignore[union-attr,index]


class FreezesBeforeTheBackward(Callback):
    """What the forward has used gets its gradient all the same, in that step."""

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        pl_module.layers[2].requires_grad_(trainer.global_step != 2)  # type: ignore[operator,index]


def test_a_part_that_is_frozen_before_the_backward_gets_this_gradient() -> None:
    torch.manual_seed(2)
    loader = rows()
    given: dict[str, Any] = {"callbacks": [FreezesBeforeTheBackward()], "limit_val_batches": 0}
    runs = [fit(Chain(), loader, how, **given) for how in (SpilledStrategy(), "auto")]
    assert same_states(*runs)


# ---- refused by name -----------------------------------------------------------------------------------------------


class Codebook(nn.Linear):
    """Moves its parameter by itself, as codebooks that follow averages do."""

    def forward(self, x: Tensor) -> Tensor:
        self.move()
        return super().forward(x)

    @torch.no_grad()
    def move(self) -> None:
        self.weight.mul_(0.99)


class ByData(Codebook):
    def move(self) -> None:
        self.weight.data.mul_(0.99)


class Moves(Chain):
    layer: type[nn.Linear] = Codebook

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = self.layer(WIDTH, WIDTH)


class MovesByData(Moves):
    layer = ByData


class Clamps(Switches):
    """Writes to a parameter within its step."""

    def __init__(self) -> None:
        super().__init__(thaws=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.extra.clamp_(-0.5, 0.5)
        return super().training_step(batch, batch_idx)


class Prunes(Chain):
    """Within its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 1:
            parametrize.register_parametrization(self.layers[1], "weight", nn.Identity())
        return super().training_step(batch, batch_idx)


class PrunesLate(Callback):
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        pruned(pl_module)


@pytest.mark.parametrize(("module", "callback", "words"), [
    (Moves, None, "block layers.2 writes to parameter layers.2.weight"),
    (MovesByData, None, "block layers.2 writes to parameter layers.2.weight"),
    (Clamps, None, "a step writes to parameter extra"),
    (Prunes, None, "parameter layers.1.weight was registered, removed or reparametrized during"),
    (Chain, PrunesLate, "parameter layers.1.weight was registered, removed or reparametrized during"),
])  # fmt: skip
def test_changes_within_a_step_are_refused(module: Any, callback: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit(module(), rows(), SpilledStrategy(), callbacks=[callback()] if callback else [], limit_val_batches=0)
