"""How gradients of the workers are computed: one after the other; some at a time (`abreast`); at once (`stacked`).

Short: this is the first way, and what the others must have.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Way:
    """One worker after the other. Workers call from their threads, in the order in which Lightning's loop comes to it.

    Attributes:
        together: whether one forward served all in the last step.
    """

    together = False

    def shared(self) -> AbstractContextManager[None]:
        """Around the steps, of who waits for all workers."""
        return nullcontext()

    def forward(self, worker: int, step: Callable[..., Any], batch: Sequence[Any]) -> Any:
        """What a `training_step` with these arguments returns."""
        return step(*batch)

    def backward(self, worker: int, call: Callable[[], None]) -> None:
        """.grad <- of the loss that `forward` returned."""
        call()

    def end(self, worker: int) -> None:
        """The gradients are there, or where workers drift the update is made; called again it does nothing."""

    def close(self) -> None:
        """Who waits, or will, ends."""
