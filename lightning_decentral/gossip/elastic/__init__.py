"""Gossip whose workers come and go while the others train: the binding of `wire/elastic` to Lightning.

`elastic` is what `GossipStrategy(elastic=...)` takes; it makes a `strategy`, whose parts are a `member` of the run, the
counters and examples of its `loops`, its `checkpoints`, how its devices are `holding` the model, and `checks` of what
can be elastic. Below it are the `process` that Lightning sees, with the `launcher` of a machine's workers, and what
callbacks see (`watched`). Public: `Elastic` and `ElasticGossipStrategy`, from `lightning_decentral.gossip`.
"""

from functools import wraps
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def elastic_if_asked(cls: Class) -> Class:
    """The same strategy; with `elastic` it makes the elastic one of the other options."""

    @wraps(cls.__init__)  # type: ignore[misc]
    def new(cls: Any, *args: Any, elastic: Any = None, **options: Any) -> Any:
        if elastic is None:
            return object.__new__(cls)
        # Read here: runs without have no use for it.
        from lightning_decentral.gossip.elastic.checks import served
        from lightning_decentral.gossip.elastic.strategy import ElasticGossipStrategy

        return ElasticGossipStrategy(elastic=elastic, **served(options))

    cls.__new__ = new  # type: ignore[method-assign, assignment]
    return cls
