"""Residual network, from `transformers.ResNetConfig` (He et al., 1512.03385)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_decentral.recipes.extras import configured, extra
from lightning_decentral.recipes.learner import Classifier, MakeOptimizer, MakeScheduler

SMALL_IMAGE = 64


class ResNet(Classifier):
    """`transformers.ResNetForImageClassification`, untrained, of the given configuration.

    `image_size` (pixels) is no option of ResNetConfig: up to 64 the stem keeps the resolution, see `small_stem`.
    """

    def __init__(
        self,
        *,
        config: Mapping[str, Any],
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler,
        criterion: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        options = {name: value for name, value in config.items() if name != "image_size"}
        network = extra("transformers").ResNetForImageClassification(configured("ResNetConfig", options))
        if config.get("image_size", 224) <= SMALL_IMAGE:
            small_stem(network)
        super().__init__(network=network, optimizer=optimizer, scheduler=scheduler, criterion=criterion)


def small_stem(network: nn.Module) -> None:
    """A 3x3 convolution of stride 1 (section 4.2), where 7x7 of stride 2 and pooling would leave 2x2 pixels of 8x8."""
    embedder: Any = network.get_submodule("resnet.embedder")
    stem = embedder.embedder.convolution
    convolution = nn.Conv2d(stem.in_channels, stem.out_channels, kernel_size=3, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    embedder.embedder.convolution = convolution
    embedder.pooler = nn.Identity()
