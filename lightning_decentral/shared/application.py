"""The Hydra application that commands and sweeps train, passed as one value: where its configuration and functions are.

This short module stands alone because sweeps and commands both take the value, and neither may import the recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hydra.types import TaskFunction
    from lightning.pytorch import LightningModule
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Application:
    """A Hydra application that trains."""

    module: str  # dotted name of the package with the configuration files
    name: str  # name of the configuration
    train: TaskFunction  # trains a configuration
    # Makes the LightningModule from a configuration and from sizes that the data decide.
    build_model: Callable[[DictConfig, dict[str, int]], LightningModule]
    unlogged: tuple[str, ...] = ()  # overrides of a run that are left out of logs

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Compose the configuration from these overrides of the command line."""
        # Read here: a command's help needs neither Hydra nor what Lightning reads.
        from lightning_decentral.shared.errors import refuse_mistyped

        cfg = self._composed(overrides)
        refuse_mistyped(cfg)
        return cfg

    def choice(self, overrides: Sequence[str], group: str) -> str:
        """Return the name of the group's file that these overrides choose; empty where there is no such group."""
        return str(self._composed(overrides, return_hydra_config=True).hydra.runtime.choices.get(group) or "")

    def _composed(self, overrides: Sequence[str], **options: bool) -> DictConfig:
        from hydra import compose, initialize_config_module

        with initialize_config_module(self.module, version_base="1.3"):
            return compose(self.name, list(overrides), **options)
