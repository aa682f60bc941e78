"""Checks at set-up that a token pipeline can train the module and its callbacks. Short: no step needs this module."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_decentral.pipeline.compute.adapters import depth
from lightning_decentral.pipeline.compute.model import Staged
from lightning_decentral.pipeline.plan.partition import NOTHING, Partition
from lightning_decentral.shared.evaluation import callbacks_of

COPIES = "copies the whole model, but a stage has only a part of the model: average checkpoints after the fit"
CALLBACKS: dict[type[Callback], str] = {
    ModelPruning: "ranks the whole model's weights, but a stage has only a part: prune before or after the fit",
    WeightAveraging: COPIES,
    StochasticWeightAveraging: COPIES,
    BaseFinetuning: "adds parameter groups to one stage's optimizer, and no checkpoint can hold groups that differ "
    "between stages: freeze before the fit, and give the optimizer all parameters. Unfreeze before a second fit from "
    "the first fit's checkpoint",
}
"""Callbacks of Lightning that a pipeline refuses, with what is wrong and what to do."""


def check_depth(stages: int, partition: Partition, module: LightningModule) -> None:
    """Raise ValueError if the model has fewer blocks than stages, or the partition doesn't fit; unknown depths pass."""
    # Hooks may build or change the model after the processes have started: `prepare` then counts the blocks.
    if any(is_overridden(hook, module) for hook in ("configure_model", "setup", "prepare_data")):
        return
    blocks = len(module.pipeline_stages().loads()[0]) if isinstance(module, Staged) else depth(module)
    if blocks is not None:
        partition.counts([NOTHING] * blocks, NOTHING, NOTHING, stages)


def refuse_unserved(module: LightningModule) -> None:
    """Raise ValueError for manual optimization and for callbacks that need the whole model on one device."""
    if not module.automatic_optimization:
        raise ValueError("a token pipeline runs the backward itself: set automatic_optimization = True")
    for callback in callbacks_of(module.trainer):
        for kind, why in CALLBACKS.items():
            if isinstance(callback, kind):
                raise ValueError(f"{type(callback).__name__} {why}, or use strategy='compressed'")


def refuse_replaced(gossiping: bool) -> None:
    """Raise ValueError for optimizers replaced within a fit whose pipelines gossip: the mixer keeps the former ones."""
    if gossiping:
        raise ValueError(
            "setup_optimizers ran in the middle of a fit, but pipelines that gossip keep the former optimizers. Save a "
            "checkpoint and start another fit from the checkpoint, or use AverageGradients()"
        )


@contextmanager
def nothing_to_train(stage: int, stages: int) -> Iterator[None]:
    """Run `configure_optimizers` in this context: an optimizer without parameters raises a ValueError with a remedy."""
    try:
        yield
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise ValueError(
            f"configure_optimizers finds nothing to train on stage {stage} of {stages} (counted from 0): give the "
            "optimizer self.parameters(); those with requires_grad=False don't change. Or cut the model so that each "
            "stage has parameters to train: fewer stages, or partition=Counted(...)"
        ) from error
