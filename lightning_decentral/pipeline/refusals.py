"""Refusals of what a pipeline can't train, in one line before it begins. Short: no step needs it."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning, StochasticWeightAveraging, WeightAveraging

from lightning_decentral.shared.evaluation import callbacks_of

COPIES = "keeps a copy of the whole model, and a stage has a part of it: average checkpoints after the fit"
CALLBACKS: dict[type[Callback], str] = {
    ModelPruning: "chooses from the whole model, and a stage has a part of it: prune before or after the fit",
    WeightAveraging: COPIES,
    StochasticWeightAveraging: COPIES,
    BaseFinetuning: "adds groups to the optimizer of the stage that has the layers, and to no other, so no file can "
    "hold them: freeze before the fit, and give the optimizer all parameters. Unfreeze before a second fit from its "
    "checkpoint",
}
"""Callbacks of Lightning that a pipeline refuses, with what is wrong and what to do."""


def refuse_unserved(module: LightningModule) -> None:
    """ValueError for what needs the backward, or the whole model, in one place."""
    if not module.automatic_optimization:
        raise ValueError("a token pipeline runs the backward itself: set automatic_optimization = True")
    for callback in callbacks_of(module.trainer):
        for kind, why in CALLBACKS.items():
            if isinstance(callback, kind):
                raise ValueError(f"{type(callback).__name__} {why}, or use strategy='compressed'")


def refuse_replaced(gossiping: bool) -> None:
    """ValueError for other optimizers in the middle of a fit whose pipelines gossip, from round to round of one."""
    if gossiping:
        raise ValueError(
            "setup_optimizers in the middle of a fit: pipelines that gossip know the former optimizers. Save, and "
            "start another fit from the checkpoint, or use AverageGradients()"
        )


@contextmanager
def nothing_to_train(stage: int, stages: int) -> Iterator[None]:
    """Context manager around `configure_optimizers`: torch's ValueError would name neither stage nor remedy.

    Raises:
        ValueError: the optimizer was given no parameter of this stage.
    """
    try:
        yield
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise ValueError(
            f"configure_optimizers finds nothing to train on stage {stage} of {stages}, counted from 0: give the "
            "optimizer self.parameters(), of which those with requires_grad=False stay as they are. Or cut the model "
            "so that each stage has something to train: fewer stages, or partition=Counted(...)"
        ) from error
