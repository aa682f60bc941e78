"""The console command `lightning-decentral` for these recipes: what it measures, cuts and schedules is `train.py`.

A module of its own, however short: no other place may know both the commands and the recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_decentral.cli import main as command
from lightning_decentral.shared.application import Application

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from omegaconf import DictConfig


def train(cfg: DictConfig) -> Any:
    # Read here: most commands train nothing, and their help needs no torch.
    from lightning_decentral.recipes import train as application

    return application.train(cfg)


def build_model(cfg: DictConfig, sizes: dict[str, int]) -> LightningModule:
    from lightning_decentral.recipes import train as application

    return application.build_model(cfg, sizes)


RECIPES = Application("lightning_decentral.conf", "train", train, build_model, unlogged=("logger=none",))


def main(arguments: Sequence[str] | None = None) -> None:
    command.main(RECIPES, arguments)


if __name__ == "__main__":
    main()
