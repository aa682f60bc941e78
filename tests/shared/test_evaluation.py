"""ModelPruning: one mask for all workers, which survives mixing, what is in flight, and the mean."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy
from tests.gossip.test_lightning import SIZE, Inspect, seen
from tests.pipeline import training
from tests.tiny import QUIET, Net, SizedBatches, in_processes

PRUNED = ("first.weight", "head.weight")
EPOCHS = 3
STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "gossip": GossipStrategy,
    "compressed": CompressedStrategy,
    "partial_backprop": partial(PartialBackpropStrategy, cuts=["second"]),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "global": {"use_global_unstructured": True},
    "random": {"pruning_fn": "random_unstructured"},
    "while validating": {"prune_on_train_epoch_end": False},
    "lottery ticket": {"use_lottery_ticket_hypothesis": True},
    "kept as masks": {"make_pruning_permanent": False},
}


class Masks(Inspect):
    """Each worker's masks, and the parameters under them, at the end of each epoch."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.manual_seed(trainer.global_rank)  # forked workers would draw alike

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.seen.setdefault("epochs", []).append(state)


def fit(folder: Path, strategy: str, options: dict[str, Any]) -> dict[str, Tensor]:
    module = Net(dropout=0.0)
    begun = {f"{name}_orig": module.state_dict()[name].clone() for name in PRUNED}
    parameters = [(module.first, "weight"), (module.head, "weight")]
    settings = {"pruning_fn": "l1_unstructured", "amount": 0.5, "parameters_to_prune": parameters, **options}
    saved = ModelCheckpoint(folder, "saved", save_weights_only=False)
    callbacks = [ModelPruning(**settings), Masks(folder), saved]
    quiet = {**QUIET, "enable_checkpointing": True, "use_distributed_sampler": False}
    trainer = Trainer(
        **quiet,
        devices=SIZE,
        max_epochs=EPOCHS,
        strategy=STRATEGIES[strategy](start_method="fork"),
        callbacks=callbacks,
    )
    trainer.fit(module, SizedBatches(4), SizedBatches(1))
    return begun


def zeros(state: dict[str, Tensor], names: tuple[str, ...] = PRUNED) -> list[list[bool]]:
    return [(state[name] == 0).flatten().tolist() for name in names]


def sparsity(state: dict[str, Tensor]) -> float:
    pruned = [zero for row in zeros(state) for zero in row]
    return sum(pruned) / len(pruned)


@pytest.mark.sampled
@pytest.mark.parametrize(("strategy", "variant"), [
    *(("gossip", variant) for variant in VARIANTS),
    ("compressed", "random"),
    ("partial_backprop", "random"),
])  # fmt: skip
def test_all_workers_prune_alike_and_as_much_as_one(tmp_path: Path, strategy: str, variant: str) -> None:
    begun = in_processes(fit, tmp_path, strategy, VARIANTS[variant])
    workers = seen(tmp_path)
    masks = tuple(f"{name}_mask" for name in PRUNED)
    for epoch in range(EPOCHS):
        states = [worker["epochs"][epoch] for worker in workers]
        assert all(zeros(state, masks) == zeros(states[0], masks) for state in states)
        if variant == "lottery ticket" and epoch == 0:  # later ones: Lightning trains the copy that it rewinds to
            assert all(torch.equal(state[name], begun[name]) for state in states for name in begun)
    if variant == "kept as masks":
        assert all(zeros(worker["own"], masks) == zeros(workers[0]["epochs"][-1], masks) for worker in workers)
        return
    assert {sparsity(worker["own"]) for worker in workers} == {1 - 0.5**EPOCHS}
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=False)["state_dict"]
    assert sparsity(saved) == 1 - 0.5**EPOCHS


def test_a_stage_has_too_little_to_choose_from(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ModelPruning ranks the whole model.*: prune before or after"):
        in_processes(staged, tmp_path)


def staged(folder: Path) -> None:
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    training.fit(training.Language(), training.pipeline(2), folder, callbacks=[pruning])
