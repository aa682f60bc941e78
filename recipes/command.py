"""The console command `lightning-decentral` for these recipes: what it measures, cuts and schedules is `train.py`.

A module of its own, however short: no other place may know both the commands and the recipes.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_decentral.cli import main as command
from lightning_decentral.recipes.train import build_model, train
from lightning_decentral.shared.application import Application

RECIPES = Application("lightning_decentral.conf", "train", train, build_model, unlogged=("logger=none",))


def main(arguments: Sequence[str] | None = None) -> None:
    command.main(RECIPES, arguments)


if __name__ == "__main__":
    main()
