"""Workers that come to different collective calls, or whose models have come apart, all say so: none dies of it."""

import re
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy
from lightning_decentral.shared.wire.meeting import waits
from lightning_decentral.shared.wire.objects import check_same_call
from lightning_decentral.shared.wire.transport import Transport
from tests.backends import Backend
from tests.crew import crew
from tests.tiny import QUIET, Net, SizedBatches

TIMEOUT = timedelta(seconds=2)
STRATEGIES: dict[str, Callable[[], Any]] = {
    "gossip": lambda: GossipStrategy(timeout=TIMEOUT),
    "blocking": lambda: GossipStrategy(timeout=TIMEOUT, delay=0),
    "compressed": lambda: CompressedStrategy(timeout=TIMEOUT),
    "partial": lambda: PartialBackpropStrategy(cuts=["second"], timeout=TIMEOUT),
}


class LogsAlone(Net):
    """The others come to their validation's reduction, of another type, meanwhile."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank == 1 and batch_idx == 1:
            self.log("alone", loss, sync_dist=True, on_step=True)
        return loss


class Grows(Callback):
    """Worker 1 alone has one more buffer."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 1:
            pl_module.register_buffer("late", torch.zeros(3))


def fit(strategy: str, module: type[Net], *callbacks: Callback) -> None:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    settings = {**QUIET, "enable_checkpointing": saves, "max_steps": 4, "val_check_interval": 2, "devices": 2}
    trainer = Trainer(**settings, strategy=STRATEGIES[strategy](), callbacks=list(callbacks))
    trainer.fit(module(), SizedBatches(6), SizedBatches(1))


def fit_and_save(strategy: str, module: type[Net], *callbacks: Callback) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fit(strategy, module, *callbacks, ModelCheckpoint(folder))


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["gossip", "compressed", "partial"])
def test_a_worker_that_alone_logs_with_sync_dist_ends_all_in_one_line(strategy: str) -> None:
    for outcome in crew(2, fit, strategy, LogsAlone, seconds=40):
        said = outcome.error.partition(": ")
        assert said[0] in ("RuntimeError", "PeerLost"), outcome
        assert "another worker to something else" in said[2] or "sync_dist=True or all_gather, on some of" in said[2]
        assert "\n" not in said[2]


class Loaders(Net):
    """Worker 1 validates over one more."""

    def val_dataloader(self) -> Any:
        return [SizedBatches(1) for _ in range(1 + self.global_rank)]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Logs nothing."""


class LogsInValidation(Net):
    """Worker 1 alone logs for all, in the last step before training goes on."""

    def val_dataloader(self) -> Any:
        return SizedBatches(1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1:
            self.log("alone", self.loss(batch), sync_dist=True)


def fit_patiently(strategy: str, module: type[Net]) -> None:
    options = {**QUIET, "devices": 2, "max_epochs": 2}
    Trainer(**options, strategy=PATIENT[strategy]()).fit(module(dropout=0.0), SizedBatches(2))


PATIENT: dict[str, Callable[[], Any]] = {
    "gossip": lambda: GossipStrategy(timeout=timedelta(seconds=30)),
    "compressed": lambda: CompressedStrategy(timeout=timedelta(seconds=30)),
}


@pytest.mark.parametrize(("strategy", "module", "where"), [
    ("gossip", Loaders, "the end of the set-up of validation loaders"),
    ("compressed", Loaders, "the end of the set-up of validation loaders"),
    ("gossip", LogsInValidation, "the end of the validation"),
])  # fmt: skip
def test_a_validation_with_more_on_one_worker_ends_all_before_the_timeout(
    strategy: str, module: type[Net], where: str
) -> None:
    one, two = crew(2, fit_patiently, strategy, module, seconds=40)
    words = "another worker to something else: let all workers make the same collective calls"
    assert one.error.startswith(f"RuntimeError: worker 0 came to {where}, {words}"), one.error
    assert two.error.startswith("RuntimeError: worker 1 came to a reduction (")
    assert words in two.error
    assert max(one.seconds, two.seconds) < 15


class Leaves(Callback):
    """Worker 1 alone waits for all; they go on, and wait for its message, or in another call."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 1:
            trainer.strategy.barrier()


def fit_soon_worried(strategy: str) -> None:
    waits.LONG_SECONDS = 0.5
    fit(strategy, Net, Leaves())


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("strategy", "place"), [("gossip", "a collective call (in validation)"), ("blocking", "a round (in step 2)")]
)
def test_a_worker_that_waits_for_all_alone_is_named_before_the_timeout(strategy: str, place: str) -> None:
    said = f"all workers wait: worker 0 in {place}, worker 1 in a collective call (in step 2); if only some make"
    for outcome in crew(2, fit_soon_worried, strategy, seconds=40):
        assert said in outcome.output
        assert outcome.error.startswith("PeerLost: ")


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", ["gossip", "compressed"])
def test_models_that_have_come_apart_are_neither_averaged_nor_taken_for_equal(strategy: str) -> None:
    """Also where replicas take the same updates, and only what is saved, by worker 0, is compared."""
    for outcome in crew(2, fit_and_save, strategy, Net, Grows(), seconds=40):
        assert re.match(
            r"RuntimeError: the workers' models have diverged: worker 1 has \S+ .* where worker 0 has no ",
            outcome.error,
        )


@pytest.mark.threads
@pytest.mark.parametrize("size", [2, 3])
def test_only_the_same_call_is_the_same(size: int) -> None:
    def same(over: Transport) -> None:
        check_same_call(over, "a mean")

    def another(over: Transport) -> str:
        with pytest.raises(RuntimeError) as error:
            check_same_call(over, "a sum" if over.rank == 1 else "a mean")
        return str(error.value)

    cpu = Backend("cpu", "cpu")
    assert cpu.world(size, same) == [None] * size
    for rank, said in enumerate(cpu.world(size, another)):
        assert said.startswith(f"worker {rank} came to a {'sum' if rank == 1 else 'mean'}, another worker to something")
