"""A recipe on a simulated accelerator: its passes are sleeps, its parameters, messages and loop are real."""

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


def put_to_sleep(model: Learner, seconds: float) -> None:
    """Make steps sleep for so many seconds, a third forward, the rest backward. Updates are SGD's, on the processor:
    every method of a recipe has the same. They keep `momentum_buffer`, as Muon's do, so that it can travel."""
    blocks = blocks_of(model)

    def training_step(*_: Any) -> Tensor:
        x = torch.zeros(1, requires_grad=True)
        for weights in blocks:
            x = Layer.apply(x, seconds / len(blocks) / 3, *weights)  # type: ignore[no-untyped-call]
        return x.sum()

    model.training_step = training_step  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    model.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]


def costs(blocks: Sequence[Sequence[Tensor]], seconds: float, beside: float) -> tuple[BlockCost, ...]:
    """Return the costs of the same steps, with the processor's other work counted as the updates'."""
    forward, update = seconds / 3 / len(blocks), beside / len(blocks)
    sizes = [sum(tensor.numel() * tensor.element_size() for tensor in some) for some in blocks]
    return tuple(BlockCost(f"block {i}", forward, 2 * forward, update, size) for i, size in enumerate(sizes))
