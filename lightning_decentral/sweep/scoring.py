"""Scoring: a callback that sends a sweep's scheduler each validation's score, and ends the fit when it is asked to.

Short, unlike the gate, which every member has: this one exists where a policy compares.
"""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_decentral.sweep.plan.scores import Score
from lightning_decentral.sweep.time_slicing import Gate


class Scoring(Callback):
    """Callback behind a gate, whose seat it uses; ends fits like `EarlyStopping`, on all workers of a member alike.

    Args:
        metric: None: what the first checkpoint callback that monitors one monitors, with its mode.
        mode: None: "min".

    Raises:
        ValueError: in the fit, where there is no such metric.
    """

    def __init__(self, gate: Gate, metric: str | None, mode: str | None) -> None:
        self._gate, self._metric, self._mode = gate, metric, mode

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        score = self._score(trainer)  # everywhere: a metric that isn't there is an error of all workers
        ends = trainer.global_rank == 0 and self._gate.ends(score)
        if trainer.strategy.reduce_boolean_decision(ends, all=False):
            trainer.should_stop = True

    def _score(self, trainer: Trainer) -> Score:
        metric, mode = self._watched(trainer)
        if metric not in trainer.callback_metrics:
            known = ", ".join(map(str, trainer.callback_metrics)) or "nothing"
            raise ValueError(
                f"hydra.launcher.policy.metric={metric} was not logged when a validation ended ({known}): "
                "log it in validation_step, or name another one"
            )
        return Score(metric, mode, trainer.global_step, float(trainer.callback_metrics[metric]))

    def _watched(self, trainer: Trainer) -> tuple[str, str]:
        if self._metric is not None:
            return self._metric, self._mode or "min"
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.monitor is not None:
                return callback.monitor, self._mode or callback.mode
        raise ValueError(
            "this sweep's policy compares a logged metric, and no ModelCheckpoint monitors one: name it with "
            "hydra.launcher.policy.metric=val_loss"
        )
