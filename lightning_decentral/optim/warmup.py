"""Momentum warm-up: a scheduler that raises an optimizer's momentum while another schedule lowers its learning rate."""

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_decentral.shared.plan.arguments import checked

LAST = "last_momentum"
"""Key of a parameter group for its final momentum, as torch's `initial_lr`; saved with the optimizer."""


@checked
class MomentumWarmup(LRScheduler):
    """momentum(t) = start + (momentum - start) min(1, t / steps), t steps done; learning rates stay as they are.

    A larger momentum averages over more gradients. While steps are long the average lags behind; later, when the
    learning rate is small, it removes noise. Under gossip, where each worker has its own noise, that is worth more
    (docs/optimizers.md#momentum-that-rises). Use with a schedule of the learning rate, stepped as often.

    Args:
        optimizer: optimizer whose groups have `momentum`, the final value. Groups without momentum, or with a momentum
            of at most `start`, don't change.
        steps: number of steps until the momentum is final.
        start: momentum at the beginning.

    Raises:
        ValueError: no group has a momentum of the start or above, start is not in [0, 1), or steps is below 1.

    Source: the momentum of Muon's published runs rises from 0.85 to 0.95 over the first steps (Jordan et al.,
    github.com/KellerJordan/modded-nanogpt, 2024); here over all.
    """

    def __init__(self, optimizer: Optimizer, steps: int, start: float = 0.8) -> None:
        if not 0 <= start < 1:
            raise ValueError(f"start must be in [0, 1), got {start}: 0.8 is usual under gossip")
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}: give those of the training")
        if not any("momentum" in group for group in optimizer.param_groups):
            raise ValueError(f"{type(optimizer).__name__} has no momentum that could rise: take Muon or SGD")
        largest = max(g.get(LAST, g["momentum"]) for g in optimizer.param_groups if "momentum" in g)
        if largest < start:
            raise ValueError(
                f"the momentum of {type(optimizer).__name__} is {largest} and can't rise from start={start}: "
                "give a lower start or a larger momentum"
            )
        self.steps, self.start = steps, start
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Learning rates of the groups, unchanged."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        done = min(1.0, self.last_epoch / self.steps)
        for group in self.optimizer.param_groups:
            if "momentum" in group:
                last = group.setdefault(LAST, group["momentum"])
                if last > self.start:
                    group["momentum"] = self.start + (last - self.start) * done
