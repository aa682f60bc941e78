"""A recipe on a simulated accelerator: its passes are sleeps, its parameters, messages and loop are real."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.recipes.learner import Learner
from lightning_decentral.shared.plan.profile import BlockCost
from network.speed_worker import Layer

BLOCKS = 8
Blocks = list[list[nn.Parameter]]


def blocks_of(model: nn.Module) -> Blocks:
    """The parameters in their order, in pieces of about as many tensors."""
    found = list(model.parameters())
    count = min(BLOCKS, len(found))
    ends = [len(found) * (k + 1) // count for k in range(count)]
    return [found[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class Drawn(torch.autograd.Function):
    """`Layer` with gradients that were drawn beforehand: what is sent and updated has the shape of real ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, gradients: list[Tensor], *weights: Tensor) -> Tensor:
        time.sleep(seconds)
        ctx.seconds, ctx.gradients = seconds, gradients
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None, None, *(drawn.clone() for drawn in ctx.gradients)


def put_to_sleep(model: Learner, seconds: float, own_update: bool = False) -> None:
    """Make steps sleep for so many seconds, a third forward, the rest backward.

    Updates are SGD's, on the processor: every method of a recipe has the same. They keep `momentum_buffer`, as Muon's
    do, so that it can travel. With `own_update` they are those of the recipe's own optimizer, from drawn gradients.
    """
    blocks = blocks_of(model)
    drawn = [[1e-2 * torch.randn_like(weight) for weight in weights] if own_update else [] for weights in blocks]

    def training_step(*_: Any) -> Tensor:
        x = torch.zeros(1, requires_grad=True)
        for weights, gradients in zip(blocks, drawn, strict=True):
            each = seconds / len(blocks) / 3
            given = (Drawn, x, each, gradients) if own_update else (Layer, x, each)
            x = given[0].apply(*given[1:], *weights)
        return x.sum()

    model.training_step = training_step  # type: ignore[method-assign]
    if own_update:
        return
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    model.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]


def costs(blocks: Sequence[Sequence[Tensor]], seconds: float, beside: float) -> tuple[BlockCost, ...]:
    """Return the costs of the same steps, with the processor's other work counted as the updates'."""
    forward, update = seconds / 3 / len(blocks), beside / len(blocks)
    sizes = [sum(tensor.numel() * tensor.element_size() for tensor in some) for some in blocks]
    return tuple(BlockCost(f"block {i}", forward, 2 * forward, update, size) for i, size in enumerate(sizes))
