"""Values that decide for all members, in no state that Lightning saves: of callbacks that save, and of logged metrics.

A run that ends takes it along; a newcomer of one that goes on would save at other steps than the members do, in which
all compute a mean. Short, as it is one rule.
"""

from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_decentral.shared.evaluation import callbacks_of
from lightning_decentral.shared.plan.described import constructed
from lightning_decentral.shared.settings import PLACES

PLAIN = (type(None), bool, int, float, str)


def remembered(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """The value for a newcomer: metrics by name, attributes of callbacks that save by their place among these."""
    metrics = apply_to_collection(dict(trainer.callback_metrics), Tensor, lambda one: one.detach().to("cpu", copy=True))
    return {"metrics": metrics, "savers": {str(place): of for place, of in enumerate(map(_of, _savers(trainer)))}}


def remember(trainer: Trainer, given: dict[str, dict[str, Any]]) -> None:
    """Take from a member's value metrics that aren't logged here yet, and the attributes of callbacks that save."""
    known = trainer._logger_connector._callback_metrics
    for name, metric in given["metrics"].items():
        known.setdefault(name, metric.to(trainer.strategy.root_device) if isinstance(metric, Tensor) else metric)
    for place, saver in enumerate(_savers(trainer)):
        of = given["savers"].get(str(place), {})
        vars(saver).update({name: value for name, value in of.items() if name in _of(saver)})


def _savers(trainer: Trainer) -> list[Callback]:
    return [callback for callback in callbacks_of(trainer) if isinstance(callback, Checkpoint)]


def _of(callback: Callback) -> dict[str, Any]:
    """Plain attributes, but for what it was constructed with, and places, which are each worker's own."""
    given = constructed(callback, type(callback).__mro__[:-1])
    own = {*given, *(f"_{name}" for name in given), *PLACES}
    return {name: of for name, of in vars(callback).items() if name not in own and isinstance(of, PLAIN)}
