"""The mean model: the average of workers that drift apart, in the model's place while it is evaluated, or for good."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_decentral.shared.wire.mean import Swap


class MeanModel:
    """mean = sum_i share_i x_i, shown for a while or taken for good; showing doesn't touch a worker's own trajectory.

    Args:
        mean_of: the exact mean over the workers; collective.

    Attributes:
        apart: whether the workers differ.
    """

    def __init__(self, mean_of: Callable[[Sequence[Tensor]], list[Tensor]]) -> None:
        self.mean_of = mean_of
        self.apart = False
        self._swap: Swap | None = None

    def show(self, tensors: Sequence[Tensor]) -> None:
        """Put the mean in the place of these tensors until `hide`. Collective."""
        self._swap = Swap(tensors, self.mean_of(tensors))

    def hide(self) -> None:
        """Put back, bit for bit, what `show` found."""
        if self._swap is not None:
            self._swap.undo()
            self._swap = None

    def forget(self) -> None:
        """The tensors are given back to their owners: what they hold now stays."""
        self._swap = None

    def take(self, tensors: Sequence[Tensor]) -> None:
        """x_i <- mean, on all workers. Collective."""
        Swap(tensors, self.mean_of(tensors))
        self.apart = False

    def own(self, state: dict[str, Any]) -> dict[str, Any]:
        """This worker's own part of a state_dict, also while the mean is shown."""
        return state if self._swap is None else self._swap.paused(state)
