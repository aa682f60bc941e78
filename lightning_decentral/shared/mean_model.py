"""The mean of workers that drift apart, in the model's place while that is evaluated, and for good in the end."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_decentral.shared.wire.mean import Swap, floating


class MeanModel(DDPStrategy):
    """The part of a strategy that shows the mean. Each worker's own trajectory is never touched by it."""

    _apart = False
    """Whether the workers differ."""
    _swap: Swap | None = None

    @abstractmethod
    def mean_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The exact mean over the workers; all must call it."""

    @abstractmethod
    def settle(self) -> None:
        """Land what is in flight."""

    @property
    def _shows_mean(self) -> bool:
        """Whether the mean is evaluated, not what this worker has."""
        return self._apart

    @property
    def _ends_at_mean(self) -> bool:
        """Whether training ends with all workers at the mean."""
        return True

    def _floats(self) -> list[Tensor]:
        assert self.lightning_module is not None
        return floating([self.lightning_module])

    def _averaged(self) -> list[Tensor]:
        """What the mean model is made of."""
        return self._floats()

    def _average_in_place(self) -> None:
        tensors = self._floats()
        Swap(tensors, self.mean_of(tensors))
        self._apart = False

    def _swap_in(self) -> None:
        if self._shows_mean:
            tensors = self._averaged()
            self._swap = Swap(tensors, self.mean_of(tensors))

    def _swap_out(self) -> None:
        if self._swap is not None:
            self._swap.undo()
            self._swap = None

    on_validation_start = on_test_start = on_predict_start = _swap_in
    on_validation_end = on_test_end = on_predict_end = _swap_out

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This worker's own model, also while the mean stands in its place."""
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state if self._swap is None else self._swap.paused(state)

    def on_train_end(self) -> None:
        """Land what is in flight, and take the mean."""
        super().on_train_end()
        if self._apart:
            self.settle()
            if self._ends_at_mean:
                self._average_in_place()
