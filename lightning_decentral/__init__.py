"""Training without the global all-reduce, as PyTorch Lightning strategies.

Importing this package registers the strategies' names: `Trainer(strategy="gossip")`.
"""

import sys

from lightning_decentral.gossip.strategy import GossipStrategy

__version__ = "0.1.0"
__all__ = ["GossipStrategy", "__version__"]


def _refuse(**_: object) -> None:
    raise ValueError(
        "lightning_decentral works with the `lightning` package, this Trainer is of `pytorch_lightning`: "
        "write `from lightning.pytorch import Trainer` instead of `from pytorch_lightning import Trainer`"
    )


def _register() -> None:
    GossipStrategy.register_strategies()
    other = sys.modules.get("pytorch_lightning.strategies")
    if other is not None:
        for name in ("gossip", "gossip_spawn", "gossip_fork", "gossip_notebook"):
            other.StrategyRegistry.register(name, _refuse, description="needs the lightning package", override=True)


_register()
