"""Checkpoints of elastic runs: one plain file, the members' mean, by the oldest; resumed by any number of workers."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from torch.optim import Optimizer

from lightning_decentral.shared.checkpoint.checkpoints import OF_MODELS, Checkpoints
from lightning_decentral.shared.checkpoint.reading import report_mean
from lightning_decentral.shared.checkpoint.saving import CheckpointedStrategy
from lightning_decentral.shared.wire.mean import MeanModel


class HeldModel(Protocol):
    """Model of a member as a device holds it."""

    @property
    def spread(self) -> bool: ...

    def whole(self, tree: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint as one process would have it, on the member's first device; collective."""


class ElasticCheckpoints(Checkpoints):
    """No worker has a file of its own: who comes back takes everything from a member. The optimizers' states in it are
    the oldest's."""

    def __init__(self, worker: CheckpointedStrategy, mean_model: MeanModel, held: HeldModel) -> None:
        super().__init__(worker, mean_model)
        self.held = held  # how this device holds its member's model

    resuming = False  # True where a device restored what no other has.

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
        """Lightning refuses those that don't."""
        return True

    def remove(self, filepath: str | Path) -> None:
        with suppress(FileNotFoundError):  # who wrote it may have been another
            super().remove(filepath)

    def resume(self) -> None:
        return

    def start(self) -> None:
        return
