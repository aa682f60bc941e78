"""Masks that each elastic worker would choose by itself: refused where torch makes them, whoever asks for them.

Short, as it is one rule.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.nn.utils import prune

from lightning_decentral.shared.compute.around.redirect import Redirected
from lightning_decentral.shared.evaluation import callbacks_of


def refuse_pruning(trainer: Trainer) -> None:
    """ValueError for Lightning's callback, before it comes to prune."""
    if any(isinstance(callback, ModelPruning) for callback in callbacks_of(trainer)):
        raise ValueError(
            "ModelPruning doesn't go with elastic: each worker would prune its own, and a newcomer has no masks; prune "
            "before or after the fit"
        )


def _chosen_globally(frame: FrameType | None) -> bool:
    """True where `global_unstructured` passes on a mask that it has just chosen over several tensors."""
    while frame is not None:
        if frame.f_globals is vars(prune) and frame.f_code.co_name == prune.global_unstructured.__name__:
            return True
        frame = frame.f_back
    return False


class Unpruned:
    """Refuse, until `close`, masks that `torch.nn.utils.prune` would choose for a part of the module: RuntimeError."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = set(module.modules())
        # Every method of torch's and of a user's own ends there.
        self._redirected = Redirected(prune.BasePruningMethod.apply.__func__, self._apply)  # type: ignore[attr-defined]

    def _apply(self, original: Callable[..., Any], cls: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A mask that is given is the same on all; any other is made of this worker's own numbers, or drawn.
        given = issubclass(cls, prune.CustomFromMask) and not _chosen_globally(sys._getframe(1))
        if module in self._parts and not given:
            raise RuntimeError(
                f"pruning {type(module).__name__} while training doesn't go with elastic: each worker would prune its "
                "own, and a newcomer has no masks; prune before or after the fit"
            )
        return original(cls, module, *args, **kwargs)

    def close(self) -> None:
        self._redirected.close()
