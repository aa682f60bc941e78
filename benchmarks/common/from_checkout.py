"""Finds recipes and conf where a checkout isn't installed; as a pytest plugin, `-p common.from_checkout`."""

from pathlib import Path

import lightning_decentral

lightning_decentral.__path__.append(str(Path(__file__).parents[2]))
