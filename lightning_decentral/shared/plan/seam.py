"""The seam between a method and what is built on top of it: an option may choose the class that a strategy is made of.

    GossipStrategy(elastic=Elastic())    ->    Elastic().strategy(GossipStrategy)(elastic=Elastic())

So gossip and pipelines serve options of layers above them, which they don't import. Short: it is this one call.
"""

import inspect
from abc import ABC, ABCMeta, abstractmethod
from typing import Any


class ChoosesStrategy(ABC):
    """An option that chooses the class of the strategy that it is given to."""

    @abstractmethod
    def strategy(self, cls: type) -> type:
        """The class to make: this one, or another with the same constructor. ValueError for one that it can't serve."""


class Elasticity(ChoosesStrategy):
    """An option under which workers come and go."""


class StrategyType(ABCMeta):
    """The type of strategies whose options may choose their class."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        made: type = cls
        for option in options.values():
            if isinstance(option, ChoosesStrategy):
                made = option.strategy(made)
        return type.__call__(made, *args, **options)

    @property
    def __signature__(cls) -> inspect.Signature:
        """Signature of the constructor, which `__call__` would hide from `inspect` and from command lines."""
        parameters = list(inspect.signature(cls.__init__).parameters.values())  # type: ignore[misc]
        return inspect.Signature(parameters[1:])
