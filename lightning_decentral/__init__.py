"""Training without the global all-reduce, as PyTorch Lightning strategies.

Importing this package registers the strategies' names: `Trainer(strategy="gossip")`.
"""

import sys

from lightning_decentral.gossip.strategy import GossipStrategy
from lightning_decentral.partial.strategy import PartialBackpropStrategy
from lightning_decentral.pipeline.strategy import TokenPipelineStrategy
from lightning_decentral.shared import registration as names
from lightning_decentral.spilled.strategy import SpilledStrategy

__version__ = "0.1.0"
__all__ = ["GossipStrategy", "PartialBackpropStrategy", "SpilledStrategy", "TokenPipelineStrategy", "__version__"]


_REMEDY = (
    "lightning_decentral works with the `lightning` package, this Trainer is of `pytorch_lightning`: "
    "write `from lightning.pytorch import Trainer` instead of `from pytorch_lightning import Trainer`"
)


def _register() -> None:
    for strategy in (GossipStrategy, PartialBackpropStrategy, SpilledStrategy, TokenPipelineStrategy):
        strategy.register_strategies()
    other = sys.modules.get("pytorch_lightning.strategies")
    if other is not None:
        for name in ("gossip", "partial_backprop", "spilled", "token_pipeline"):
            names.refuse(other.StrategyRegistry, name, _REMEDY)


_register()
