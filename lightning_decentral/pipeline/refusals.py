"""What a pipeline can't train, said before it begins."""

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelPruning

from lightning_decentral.shared.evaluation import callbacks_of


def refuse_unserved(module: LightningModule) -> None:
    """ValueError for what needs the backward, or the whole model, in one place."""
    if not module.automatic_optimization:
        raise ValueError("a token pipeline runs the backward itself: set automatic_optimization = True")
    if any(isinstance(callback, ModelPruning) for callback in callbacks_of(module.trainer)):
        raise ValueError(
            "ModelPruning chooses from the whole model, and a stage has a part of it: prune before or after the fit, "
            "or use strategy='compressed'"
        )
