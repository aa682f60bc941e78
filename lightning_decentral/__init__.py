"""Training without the global all-reduce, as PyTorch Lightning strategies.

Importing this package registers the strategies' names (`Trainer(strategy="gossip")`). What a strategy is made of is
read when it is asked for: who gossips doesn't load the pipeline.
"""

import functools
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import Strategy, StrategyRegistry

from lightning_decentral.shared import registration

if TYPE_CHECKING:
    from lightning_decentral.compressed import CompressedStrategy
    from lightning_decentral.gossip import GossipStrategy
    from lightning_decentral.partial import PartialBackpropStrategy
    from lightning_decentral.pipeline import TokenPipelineStrategy
    from lightning_decentral.spilled import SpilledStrategy

__version__ = "0.1.0"
__all__ = [
    "CompressedStrategy",
    "GossipStrategy",
    "PartialBackpropStrategy",
    "SpilledStrategy",
    "TokenPipelineStrategy",
    "__version__",
]

_FOLDERS = {
    "CompressedStrategy": "compressed",
    "GossipStrategy": "gossip",
    "PartialBackpropStrategy": "partial",
    "SpilledStrategy": "spilled",
    "TokenPipelineStrategy": "pipeline",
}
_NAMES = {
    "compressed": ("CompressedStrategy", "ddp with a quantized all-reduce"),
    "gossip": ("GossipStrategy", "decentralized gossip averaging"),
    "partial_backprop": ("PartialBackpropStrategy", "structured partial backpropagation"),
    "token_pipeline": ("TokenPipelineStrategy", "token-level pipeline of stages"),
}


def __getattr__(name: str) -> Any:
    if name not in _FOLDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FOLDERS[name]}"), name)


def _register() -> None:
    for name, (strategy, what) in _NAMES.items():
        registration.register(StrategyRegistry, name, functools.partial(_made, strategy), what)
    what = "CPU offload: parameters on the host, in shards to the device"
    StrategyRegistry.register("spilled", functools.partial(_made, "SpilledStrategy"), description=what, override=True)
    for strategy in _FOLDERS:
        registration.register_path(StrategyRegistry, f"{__name__}.{strategy}", functools.partial(_made, strategy))
    other = sys.modules.get("pytorch_lightning.strategies")
    if other is not None:
        for name in (*_NAMES, "spilled"):
            registration.refuse(other.StrategyRegistry, name)


def _made(strategy: str, **options: Any) -> Strategy:
    made: Strategy = __getattr__(strategy)(**options)
    return made


_register()
