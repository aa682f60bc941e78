"""Training without the global all-reduce, as PyTorch Lightning strategies.

Importing this package registers the strategies' names (`Trainer(strategy="gossip")`), with `lightning` and with
`pytorch_lightning`. What a strategy is made of is read when it is asked for: who gossips doesn't load the pipeline."""

import functools
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_decentral.shared import registry

if TYPE_CHECKING:
    from lightning_decentral.compressed import CompressedStrategy
    from lightning_decentral.gossip import GossipStrategy
    from lightning_decentral.partial import PartialBackpropStrategy
    from lightning_decentral.pipeline import TokenPipelineStrategy
    from lightning_decentral.spilled import SpilledStrategy

__version__ = "0.2.0"
__all__ = [
    "CompressedStrategy",
    "GossipStrategy",
    "PartialBackpropStrategy",
    "SpilledStrategy",
    "TokenPipelineStrategy",
    "__version__",
]

STRATEGIES = {
    "CompressedStrategy": "compressed",
    "GossipStrategy": "gossip",
    "PartialBackpropStrategy": "partial",
    "SpilledStrategy": "spilled",
    "TokenPipelineStrategy": "pipeline",
}
"""{class: its folder}"""
NAMES = {
    "compressed": ("CompressedStrategy", "ddp with a quantized all-reduce"),
    "gossip": ("GossipStrategy", "decentralized gossip averaging"),
    "partial_backprop": ("PartialBackpropStrategy", "structured partial backpropagation"),
    "token_pipeline": ("TokenPipelineStrategy", "token-level pipeline of stages"),
}
REGISTRIES = {
    "lightning.pytorch.strategies": __name__,
    "pytorch_lightning.strategies": f"{__name__}.pytorch_lightning",
}
"""{module with a registry: the package whose classes its Trainer takes}"""
FABRIC_REGISTRIES = {
    "lightning.fabric.strategies": __name__,
    "lightning_fabric.strategies": f"{__name__}.pytorch_lightning",
}
CONNECTORS = (
    "lightning.pytorch.trainer.connectors.accelerator_connector",
    "pytorch_lightning.trainer.connectors.accelerator_connector",
)
FABRIC_CONNECTORS = ("lightning.fabric.connector", "lightning_fabric.connector")
"""Modules that look a strategy's name up in a registry."""
TRAINERS_ALONE = {
    "spilled": "it frees what a step has used when a Trainer reports that the step is over",
    "token_pipeline": "it runs a training step slice by slice, for which a Trainer hands it over whole",
}
"""What Fabric, whose steps are the user's own code, can't run."""
FABRICS = [name for name in NAMES if name not in TRAINERS_ALONE]


def __getattr__(name: str) -> Any:
    if name not in STRATEGIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{STRATEGIES[name]}"), name)


def _register() -> None:
    trainers = {module: functools.partial(_enter, package) for module, package in REGISTRIES.items()}
    loops = {module: functools.partial(_enter_loops, package) for module, package in FABRIC_REGISTRIES.items()}
    paths = {name: functools.partial(_path, strategy) for name, (strategy, _) in NAMES.items()}
    spell = functools.partial(registry.spell, {**paths, "spilled": functools.partial(_path, "SpilledStrategy")})
    checks = {
        module: functools.partial(registry.hint, [*paths, "spilled"], served)
        for served, modules in (([*paths, "spilled"], CONNECTORS), (FABRICS, FABRIC_CONNECTORS))
        for module in modules
    }
    later: dict[str, registry.Then] = {"jsonargparse._typehints": spell, "ray.train.lightning": _prepare}
    registry.when_imported({**trainers, **loops, **checks, **later})


def _prepare(integration: ModuleType) -> None:
    """Register the strategies as Ray's DDP strategies for `isinstance`, which Ray's `prepare_trainer` asks. They are
    DDPStrategies already: registered, a strategy that isn't would become one for Lightning, too."""
    workers = import_module(f"{__name__}.shared.setup_and_step").WorkersStrategy
    integration.RayDDPStrategy.register(workers)


def _path(strategy: str, base: str) -> str:
    """Return the path of the strategy's class for the Lightning package that has the base class."""
    return f"{REGISTRIES[base.removesuffix('.strategy')]}.{strategy}"


def _enter(package: str, strategies: ModuleType) -> None:
    names = strategies.StrategyRegistry
    for name, (strategy, what) in NAMES.items():
        registry.register(names, name, functools.partial(_made, package, strategy), what)
    what = "CPU offload: parameters on the host, in shards to the device"
    names.register("spilled", functools.partial(_made, package, "SpilledStrategy"), description=what, override=True)
    for strategy in STRATEGIES:
        path, made = f"{package}.{strategy}", functools.partial(_made, package, strategy)
        # The class by its path, which LightningCLI hands on as a name where no options follow it.
        names.register(path.lower(), made, description=f"{path} with its own defaults", override=True)


def _enter_loops(package: str, strategies: ModuleType) -> None:
    names = strategies.STRATEGY_REGISTRY
    for name in FABRICS:
        strategy, what = NAMES[name]
        made = functools.partial(_made, f"{package}.{STRATEGIES[strategy]}", f"Fabric{strategy}")
        registry.register(names, name, made, what)
    for name, why in TRAINERS_ALONE.items():
        registry.register(names, name, functools.partial(_refused, name, why), "for Trainers alone")


def _refused(name: str, why: str, **_: Any) -> Any:
    raise ValueError(f"{name} doesn't work with Fabric: {why}; use a Trainer, or {' or '.join(FABRICS)} with Fabric")


def _made(package: str, strategy: str, **options: Any) -> Any:
    return getattr(import_module(package), strategy)(**options)


_register()
