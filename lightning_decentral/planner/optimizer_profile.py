"""Profiling what optimizers keep and would compute: states by name, hidden matrices, the rate of their products.

products_per_second = operations of Newton-Schulz on the hidden matrices / its seconds, median over repeats
"""

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.optim.newton_schulz import orthogonalize
from lightning_decentral.optim.roles import muon_groups
from lightning_decentral.planner.plan.optimizer_cost import operations
from lightning_decentral.shared.compute.hardware import duration
from lightning_decentral.shared.plan.profile import Sides

WARM_UP, REPEATS = 1, 3


def hidden_of(root: nn.Module) -> list[nn.Parameter]:
    """Parameters that `Muon` would take for hidden matrices, in order."""
    hidden: list[nn.Parameter] = muon_groups(root)[0]["params"]
    return hidden


def sides(matrices: Iterable[Tensor], among: Collection[nn.Parameter]) -> tuple[Sides, ...]:
    """Sides of the matrices that are among these parameters; a filter [out, in, ...] is a matrix [out, rest]."""
    taken = set(among)
    pairs = ((len(m), m.numel() // len(m)) for m in matrices if m in taken)
    return tuple((min(pair), max(pair)) for pair in pairs)


@torch.no_grad()
def products_per_second(matrices: Sequence[nn.Parameter], device: torch.device) -> float:
    """Operations per second of `Muon`'s Newton-Schulz on copies; 0 where there are none, or no clock sees it."""
    copies = [matrix.detach().clone() for matrix in matrices]
    if not copies:
        return 0.0
    turns = [duration(partial(orthogonalize, copies), device) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
    seconds = median(turns)
    return operations(sides(matrices, matrices)) / seconds if seconds > 0 else 0.0


def states_of(optimizers: Iterable[Optimizer]) -> tuple[tuple[str, int], ...]:
    """(name, bytes) of the states that have their parameters' shapes, over all optimizers."""
    found: dict[str, int] = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    found[name] = found.get(name, 0) + value.nbytes
    return tuple(found.items())
