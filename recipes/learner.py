"""Training loop of every recipe: mean cross-entropy, groups of parameters, one schedule, one score per example."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MeanMetric

from lightning_decentral.optim import muon_groups
from lightning_decentral.shared.checkpoint import runs

Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[Iterable[dict[str, Any]]], Optimizer]
MakeScheduler = Callable[..., LRScheduler]
MEANS = [f"{stage}_{value}" for stage in ("val", "test") for value in ("loss", "score")]


class Learner(LightningModule):
    """loss = criterion(logits, targets); a batch is (inputs, targets).

    Logits are [batch, classes] for targets [batch], or [batch, length, classes] for targets [batch, length].
    `optimizer(groups)` and `scheduler(optimizer, total_steps=...)` are called when training begins.
    """

    score_name = "score"

    def __init__(
        self,
        *,
        network: nn.Module,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler,
        criterion: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy,
    ) -> None:
        super().__init__()
        self.network = network
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.criterion = criterion
        # A plain ModuleDict, typed as what it holds.
        self.means: dict[str, MeanMetric] = nn.ModuleDict({name: MeanMetric() for name in MEANS})  # type: ignore[assignment]

    @abstractmethod
    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the inputs."""

    @abstractmethod
    def scores(self, logits: Tensor, targets: Tensor) -> Tensor:
        """One number for each example, [batch]."""

    def score(self, batch: Batch) -> Tensor:
        """`scores` of a batch, [batch]: what validation and test average."""
        inputs, targets = batch
        return self.scores(self(inputs), targets)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of this worker on its own batch; logged without asking other workers."""
        inputs, targets = batch
        loss = flat_loss(self.criterion, self(inputs), targets)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Means of cross-entropy and score over the validation examples of all workers."""
        self.evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """As validation_step, over the test examples."""
        self.evaluate(batch, "test")

    def evaluate(self, batch: Batch, stage: str) -> None:
        """Accumulate both means; torchmetrics joins the workers at the end of the epoch."""
        inputs, targets = batch
        logits = self(inputs)
        loss, score = self.means[f"{stage}_loss"], self.means[f"{stage}_score"]
        loss.update(flat_loss(functional.cross_entropy, logits, targets), len(targets))
        score.update(self.scores(logits, targets))
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True)
        self.log(f"{stage}/{self.score_name}", score, on_step=False, on_epoch=True, prog_bar=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the loggers' runs, in which a training that is resumed goes on."""
        runs.keep(self.trainer, checkpoint)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer and its schedule, one value per step. Weight decay for matrices and filters (two axes or more),
        none for biases and scales; which matrices are hidden is for `Muon`, others don't ask."""
        optimizer = self.make_optimizer(muon_groups(self.network))
        total_steps = max(1, int(self.trainer.estimated_stepping_batches))
        scheduler = self.make_scheduler(optimizer, total_steps=total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def flat_loss(criterion: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor) -> Tensor:
    """criterion over all positions as one batch."""
    return criterion(logits.flatten(0, -2), targets.flatten())


class Classifier(Learner):
    """A learner of one label per image [batch, channels, height, width]; score 1 for a correct label, else 0."""

    score_name = "accuracy"

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [batch, labels]."""
        logits: Tensor = self.network(pixel_values=inputs).logits
        return logits

    def scores(self, logits: Tensor, targets: Tensor) -> Tensor:
        """1.0 where the largest logit is the target's, else 0.0."""
        return (logits.argmax(dim=-1) == targets).float()
