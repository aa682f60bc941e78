"""Blocks run twice, with and without a backward: to the same bits, and whatever they draw and count moves once."""

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_decentral import SpilledStrategy
from lightning_decentral.spilled import OnDevice
from tests.spilled.spilling import WIDTH, Chain, fit, rows, same_states

SHORT: dict[str, Any] = {"max_steps": 4, "limit_val_batches": 0}


class Impure(nn.Linear):
    """Draws from every generator, counts, and writes down what it saw."""

    calls = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.own, self.seen = torch.Generator().manual_seed(3), deque([1.0], maxlen=3)
        self.known: dict[str, list[float]] = {"draws": []}
        self.mean = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        draw = random.random() + float(np.random.rand()) + float(torch.rand((), generator=self.own)) + self.calls
        self.known["draws"].append(draw)
        self.latest = draw + self.seen[0]
        self.seen.append(self.latest)
        self.mean = 0.9 * self.mean + 0.1 * self.latest
        y = super().forward(x) * self.latest + self.mean
        y.register_hook(lambda gradient: gradient * 2)
        return y


class Draws(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1], self.layers[3] = Impure(WIDTH, WIDTH), Impure(WIDTH, WIDTH)


class Recurrent(Chain):
    kind: type[nn.RNNBase] = nn.LSTM

    def __init__(self) -> None:
        super().__init__()
        self.rnn = self.kind(8, 8, num_layers=2, batch_first=True, dropout=0.3)
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.layers(batch[0]).view(len(batch[0]), -1, 8)
        loss: Tensor = self.head(self.rnn(x)[0]).relu_().square().mean()
        return loss


class Gated(Recurrent):
    kind = nn.GRU


class Attention(Chain):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True) for _ in range(2)]
        self.blocks = nn.ModuleList(layers).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.layers(batch[0]).view(len(batch[0]), -1, 8).double()
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("module", [Draws, Recurrent, Gated, Attention])
def test_the_second_run_is_the_first(module: type[LightningModule]) -> None:
    torch.manual_seed(2)
    loader = rows()
    runs = [fit(module(), loader, strategy, **SHORT) for strategy in (SpilledStrategy(), "auto")]
    assert same_states(*runs)


def test_what_blocks_remember_is_that_of_one_run() -> None:
    torch.manual_seed(2)
    loader, found = rows(), []
    for strategy in (SpilledStrategy(), "auto"):
        layer: Any = fit(Draws(), loader, strategy, **SHORT).lightning_module.layers[3]  # type: ignore[union-attr]
        found.append((layer.calls, list(layer.seen), layer.known, float(layer.mean), layer.latest, random.random()))
    assert found[0][0] == 4
    assert found[0] == found[1]


# ---- what a second run can't serve ---------------------------------------------------------------------------------


class Penalty(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
        return gradient.square().mean()


class Functional(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.func.grad(lambda x: self.layers(x).square().sum())(batch[0]).mean() + self.layers(batch[0]).sum()


class Tangents(Chain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(batch[0], torch.ones_like(batch[0]))
            return self.layers(dual).square().mean()


class Keeping(nn.Linear):
    """Leaves a loss of its own in an attribute, as layers of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.weight.sum()
        return super().forward(x)


class Kept(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = Keeping(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.layers[2].loss  # type: ignore[operator]


class Squared(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.weight.square().sum()
        return nn.Linear.forward(self, x)


class KeptSquared(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = Squared(WIDTH, WIDTH)


@pytest.mark.parametrize(("module", "words"), [
    (Penalty, r"differentiable gradients \(create_graph=True"),
    (Functional, r"block layers\.0 is differentiated by torch\.func or in forward mode"),
    (Tangents, r"block layers\.0 is differentiated by torch\.func or in forward mode"),
    (Kept, r"a tensor that block layers\.2 made but didn't return.* Return the tensor from the block"),
    (KeptSquared, r"a tensor that block layers\.2 made but didn't return.* Return the tensor from the block"),
])  # fmt: skip
def test_other_derivatives_are_refused_by_name(module: type[LightningModule], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit(module(), rows(), SpilledStrategy(), **SHORT)


class Replacing(Callback):
    """Other optimizers in the middle of a run."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        kind = torch.optim.SGD if trainer.global_step == 2 else torch.optim.LBFGS
        pl_module.configure_optimizers = lambda: kind(pl_module.parameters(), lr=0.1)  # type: ignore[assignment]
        if trainer.global_step >= 2:
            trainer.strategy.setup_optimizers(trainer)


def test_optimizers_may_be_replaced_and_are_looked_at_again() -> None:
    torch.manual_seed(2)
    loader = rows()
    runs = [fit(Chain(), loader, how, callbacks=[Replacing()], **{**SHORT, "max_steps": 2})
            for how in (SpilledStrategy(update=OnDevice()), "auto")]  # fmt: skip
    assert same_states(*runs)
    with pytest.raises(ValueError, match="LBFGS"):
        fit(Chain(), loader, SpilledStrategy(update=OnDevice()), callbacks=[Replacing()], **SHORT)
