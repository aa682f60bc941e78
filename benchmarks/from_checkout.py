"""As a pytest plugin, `-p from_checkout`: finds the package's recipes and conf in a checkout that isn't installed."""

from pathlib import Path

import lightning_decentral

lightning_decentral.__path__.append(str(Path(__file__).parent.parent))
