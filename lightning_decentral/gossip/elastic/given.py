"""What an elastic worker was given, compared with what the run's workers were, before it takes part.

    donor     its settings and model, as text, beside everything else that a newcomer takes
    newcomer  the first difference: it takes nothing, and its `fit` ends with that line

All but the first take from a member, so each has what the first one has.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_decentral.shared.plan.compared import model_difference, settings_difference
from lightning_decentral.shared.plan.described import described
from lightning_decentral.shared.settings import of_callbacks, of_method, of_optimizers, of_trainer, versions

OF_ONE_MEMBER = ("elastic", "replicas.elastic", "island", "precision_plugin.device")
"""Places, weights, numbers and kinds of devices are each worker's own. `dead_after` is the lobby's."""


def settings_of(strategy: Any, trainer: Trainer) -> dict[str, str]:
    """What all members must have alike."""
    found = {**of_method(strategy, strategy.precision_plugin), **of_trainer(trainer), **of_callbacks(trainer)}
    found |= of_optimizers(strategy.optimizers, strategy.own)
    alike = {name: text for name, text in found.items() if not _is_own(name)}
    plan = described(strategy.elastic.workers, "elastic.workers")
    return {**versions(), **alike, **plan, **described(strategy.elastic.asynchronous, "elastic.asynchronous")}


def _is_own(name: str) -> bool:
    return any(f"{name}.".startswith(f"{own}.") for own in OF_ONE_MEMBER)


class Given:
    """To one worker.

    Args:
        settings: as `settings_of`.
        model: as `layout.described`, of the whole model before anything was made of it.
    """

    def __init__(self, settings: Mapping[str, str], model: Mapping[str, str]) -> None:
        self._settings, self._model = dict(settings), dict(model)

    def sent(self) -> Tensor:
        """For a newcomer: bytes, since the text of a large model is longer than a frame may be."""
        text = json.dumps([self._settings, self._model])
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def refuses(self, value: Mapping[str, Any]) -> str:
        """Why this worker can't take what a member gives; empty: it can."""
        settings, model = json.loads(bytes(value["given"].tolist())) if "given" in value else ({}, {})
        return settings_difference(self._settings, settings, "this worker", "the run") or model_difference(
            self._model, model, "this worker", "the run"
        )
