"""Checks that every strategy makes: its Trainer's package, its options and backend, and layers to refuse."""

import inspect
from collections.abc import Iterable
from typing import Literal

import torch
from lightning.pytorch.strategies import Strategy
from torch import nn

from lightning_decentral.shared.plan.arguments import no_option

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

OTHER = {
    "lightning.pytorch.strategies.strategy": ("pytorch_lightning", "lightning_decentral.pytorch_lightning"),
    "pytorch_lightning.strategies.strategy": ("lightning.pytorch", "lightning_decentral"),
}
"""{module of Lightning's Strategy: (the other Lightning package, module of our strategies for that package)}"""

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


def named(strategy: Strategy) -> str:
    """Return the strategy's repr with the package whose Trainer accepts it: other Trainers print it in their error."""
    package, other = Strategy.__module__.removesuffix(".strategies.strategy"), OTHER[Strategy.__module__]
    name = type(strategy).__name__
    return f"<{name} for {package}.Trainer; {other[0]}.Trainer takes {other[1]}.{name}>"


def refuse_unknown(strategy: type, options: Iterable[str]) -> None:
    """Raise ValueError for an option that no constructor below DDPStrategy names, so that nothing would read it."""
    unknown = sorted(options)
    if unknown:
        constructors = [vars(cls)["__init__"] for cls in own_bases(strategy) if "__init__" in vars(cls)]
        named = [p for made in constructors for p in inspect.signature(made).parameters.values() if p.kind in NAMED]
        valid, why = {p.name for p in named} - {"self"}, " (there is no DDP wrapper to take it)"
        raise ValueError(no_option(strategy.__name__, unknown[0], valid, why))


def own_bases(strategy: type) -> tuple[type, ...]:
    """Return the class and its bases below DDPStrategy: those of this package."""
    mro = strategy.__mro__
    return mro[: [cls.__name__ for cls in mro].index("DDPStrategy")]  # DDPStrategy of Trainers or of Fabric


def refuse_backend(name: str, device: torch.device) -> None:
    """Raise ValueError, before torch looks for the backend, for a process group backend that can't serve the device."""
    given = dict(part.rpartition(":")[::2] for part in name.split(","))  # "gloo", or "cpu:gloo,cuda:nccl"
    used = given.get(device.type, given.get("", ""))
    if used not in ("gloo", "nccl") or (used == "nccl" and device.type != "cuda"):
        served = "'nccl' or 'gloo'" if device.type == "cuda" else "'gloo'"
        raise ValueError(
            f"workers can't communicate by process_group_backend={name!r} on {device.type}: choose {served}, or leave "
            "it out"
        )


def refuse_sync_batch_norm(strategy: type, module: nn.Module, asked: bool) -> None:
    """Raise ValueError where BatchNorm would gather statistics over the workers, which would wait for each other."""
    if asked or any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        raise ValueError(
            f"SyncBatchNorm makes all workers wait for each other in every layer, which {strategy.__name__} exists to "
            "avoid: use plain BatchNorm (its statistics are averaged for the mean model), GroupNorm or LayerNorm"
        )
