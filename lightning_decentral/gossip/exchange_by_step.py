"""An exchange that goes another way in some steps, as an all-reduce in every tenth."""

from collections.abc import Sequence

from torch import Tensor

from lightning_decentral.buckets import Matrix
from lightning_decentral.gossip.combine.rule import Combine
from lightning_decentral.gossip.wire import Exchange, Land, Traffic


class ExchangeByStep(Exchange):
    """Step t is exchange t mod period's.

    Args:
        steps: the exchange of each step of a period; one may stand for several.
    """

    def __init__(self, steps: Sequence[Exchange]) -> None:
        self._steps = tuple(steps)
        self._parts = tuple({id(exchange): exchange for exchange in steps}.values())
        self.pool = steps[0].pool
        for part in self._parts:
            part.pool = self.pool  # what one has landed serves the other

    def admit(self, buckets: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        """To each."""
        for part in self._parts:
            part.admit(buckets, matrices, combine)

    def _of(self, step: int) -> Exchange:
        return self._steps[step % len(self._steps)]

    def silent(self, step: int) -> bool:
        """As the step's."""
        return self._of(step).silent(step)

    @property
    def encodes(self) -> bool:
        """Whether any step's does."""
        return any(part.encodes for part in self._parts)

    def copies_sent(self, step: int) -> float:
        """As the step's."""
        return self._of(step).copies_sent(step)

    def own(self, step: int) -> Tensor:
        """As the step's."""
        return self._of(step).own(step)

    def degree(self, step: int) -> Tensor:
        """As the step's."""
        return self._of(step).degree(step)

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> Land:
        """As the step's."""
        return self._of(step).start(message, step, first)

    def depart(self) -> None:
        """Whatever is ready."""
        for part in self._parts:
            part.depart()

    def settle(self) -> None:
        """Each."""
        for part in self._parts:
            part.settle()

    def traffic(self) -> Traffic:
        """The sum."""
        return sum((part.traffic() for part in self._parts), Traffic())
