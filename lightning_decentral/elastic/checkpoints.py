"""Checkpoints of elastic runs: the oldest member writes the mean model; any number of workers resumes from the file."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lightning_decentral.shared.checkpoint.checkpoints import OF_MODELS, Checkpoints
from lightning_decentral.shared.checkpoint.reading import report_mean
from lightning_decentral.shared.checkpoint.saving import CheckpointedStrategy
from lightning_decentral.shared.wire.mean import MeanModel


class ElasticCheckpoints(Checkpoints):
    """Writes one file for all workers: a worker that starts again copies its state from a member, not from a file of
    its own. Optimizer states in the file are the oldest member's."""

    def __init__(self, worker: CheckpointedStrategy, mean_model: MeanModel, held: Any) -> None:
        super().__init__(worker, mean_model)
        self.held = held  # the member's model as this device keeps it: `spread` and `whole`, as of a `WholeModel`

    resuming = False  # True if a device restored a state that no other device has.

    def save(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any) -> None:
        if self._worker.cut_off and self.held.spread:
            self._saving.leave_out(filepath, "the devices of a worker")
            return
        states = {key: self._mean_model.own(checkpoint[key]) for key in OF_MODELS if key in checkpoint}
        diverged = self._given(states) if self._mean_model.diverged else {}
        means = {**states, **self._means(diverged)}
        self._saving.write_alone(self.held.whole({**checkpoint, **means}), filepath, storage_options)

    def load(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        checkpoint = self._reading.read(path, weights_only)
        if self.fitting:
            report_mean(path, checkpoint)
        return checkpoint

    def fits(self, optimizers: Sequence[Optimizer]) -> bool:
        """Return True: Lightning itself refuses optimizer states that don't fit."""
        return True

    def remove(self, filepath: str | Path) -> None:
        with suppress(FileNotFoundError):  # another worker may have written the file
            super().remove(filepath)

    def resume(self) -> None:
        return

    def start(self) -> None:
        return
