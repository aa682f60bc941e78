"""Progress of a user's own loop, as its calls show it: whose turn it is, and that gradients are only accumulated.

Short, as a loop of one's own calls little.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn
from torch.optim import Optimizer

LOOK_STEPS = 100
"""Steps between comparisons of all buffers, to find those that change: a user's own loop doesn't report epochs."""


class Turn:
    """Updates of one optimizer each, in the order in which they come: those that are set up and step no more have none.

    Attributes:
        begun: whether the last step was the first of a turn.
    """

    def __init__(self) -> None:
        self.begun = False
        self._stepped: set[Optimizer] = set()

    def step(self, optimizer: Optimizer) -> None:
        self.begun = not self._stepped or optimizer in self._stepped
        self._stepped = {optimizer} if self.begun else {*self._stepped, optimizer}


class Accumulates(Protocol):
    """Interface asked of a strategy: gradients that are only accumulated."""

    def accumulating(self, module: nn.Module) -> AbstractContextManager[None]: ...


class Accumulating(_BackwardSyncControl):
    """`fabric.no_backward_sync`, where the module has no wrapper that could be asked."""

    def __init__(self, strategy: Accumulates) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._strategy.accumulating(module) if enabled else nullcontext()
