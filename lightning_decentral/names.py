"""The strategies' names for `Trainer(strategy=...)`, one for every way to start processes, as DDP has them."""

from typing import Any

from lightning.pytorch.strategies import Strategy

START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}


def register(registry: Any, name: str, strategy: type[Strategy], what: str) -> None:
    """`name`, `name_spawn`, `name_fork` and `name_notebook`; a second call changes nothing."""
    for ending, start_method in START_METHODS.items():
        description = f"{what}, processes by {start_method}"
        registry.register(
            f"{name}{ending}", strategy, description=description, override=True, start_method=start_method
        )


def refuse(registry: Any, name: str, remedy: str) -> None:
    """The same names in the registry of a package that the strategies don't work with: ValueError with the remedy."""

    def refused(**_: object) -> None:
        raise ValueError(remedy)

    for ending in START_METHODS:
        registry.register(f"{name}{ending}", refused, description="needs the lightning package", override=True)
