"""Vision transformer for images of any size, from `transformers.ViTConfig` (Dosovitskiy et al., 2010.11929)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_decentral.recipes.extras import configured, extra
from lightning_decentral.recipes.learner import Classifier, MakeOptimizer, MakeScheduler


class ViT(Classifier):
    """`transformers.ViTForImageClassification`, untrained, of the given configuration."""

    def __init__(
        self,
        *,
        config: Mapping[str, Any],
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler,
        criterion: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        network = extra("transformers").ViTForImageClassification(configured("ViTConfig", config))
        super().__init__(network=network, optimizer=optimizer, scheduler=scheduler, criterion=criterion)
