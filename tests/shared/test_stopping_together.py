"""A signal at one worker, with no launcher to hand it on: all stop after the same step, soon, and can still meet."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import Every, Ring
from tests.crew import crew
from tests.tiny import QUIET, Batches, Net, SizedBatches, TwoOptimizers


class Signalled(Callback):
    """Worker 1 gets a signal after its third step; all write where they ended."""

    def __init__(self, folder: Path, signum: int, who: tuple[int, ...], step_seconds: float) -> None:
        self.folder, self.signum, self.who, self.step_seconds = folder, signum, who, step_seconds

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        time.sleep(self.step_seconds * (1 + trainer.global_rank))
        if trainer.global_rank in self.who and trainer.global_step == 3:
            own = self.folder / f"signalled {trainer.global_rank}"
            own.write_text(str(time.time()))
            own.rename(self.folder / "signalled")  # whole: another worker may be reading it
            os.kill(os.getpid(), self.signum)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        seconds = time.time() - float((self.folder / "signalled").read_text())
        ended = {"steps": trainer.global_step, "error": type(exception).__name__, "seconds": seconds}
        own = {key: value.clone() for key, value in pl_module.state_dict().items()}
        torch.save({**ended, "own": own}, self.folder / f"{trainer.global_rank}.pt")


def fit(
    folder: Path,
    signum: int,
    who: tuple[int, ...] = (1,),
    step_seconds: float = 0.0,
    lengths: tuple[int, ...] = (),
    every: int = 1,
    module: type[Net] = Net,
) -> None:
    # The second comes before the first in Lightning's order: checkpoints are last.
    callbacks = [OnExceptionCheckpoint(folder, "stopped"), Signalled(folder, signum, who, step_seconds)]
    strategy = GossipStrategy(topology=Every(every, Ring()))
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True}, max_steps=100_000, devices=3, strategy=strategy, callbacks=callbacks
    )
    trainer.fit(module(), Batches(lengths=lengths) if lengths else SizedBatches(100_000))


class Second(TwoOptimizers):
    """The first is never stepped."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.update(batch, 1)


def ended(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt") for rank in range(3)]


@pytest.mark.sampled
@pytest.mark.parametrize(("signum", "who", "error"), [
    (signal.SIGTERM, (1,), "SIGTERMException"),
    (signal.SIGINT, (1,), "KeyboardInterrupt"),
    (signal.SIGINT, (0, 1, 2), "KeyboardInterrupt"),
])  # fmt: skip
def test_all_stop_after_the_same_step_and_save_their_mean(tmp_path: Path, signum: int, who: Any, error: str) -> None:
    crew(3, fit, tmp_path, signum, who, 0.01)
    ends = ended(tmp_path)
    assert [end["error"] for end in ends] == [error] * 3
    assert len({end["steps"] for end in ends}) == 1
    saved = torch.load(tmp_path / "stopped.ckpt", weights_only=False)
    for key in ("head.weight", "norm.running_mean"):
        mean = torch.stack([end["own"][key] for end in ends]).mean(0)
        torch.testing.assert_close(saved["state_dict"][key], mean)
    assert not torch.equal(ends[0]["own"]["head.weight"], ends[1]["own"]["head.weight"])
    assert saved["global_step"] == ends[0]["steps"]


def test_all_stop_where_the_first_of_two_optimizers_rests(tmp_path: Path) -> None:
    crew(3, fit, tmp_path, signal.SIGTERM, (1,), 0.01, (), 1, Second, seconds=30)
    ends = ended(tmp_path)
    assert [end["error"] for end in ends] == ["SIGTERMException"] * 3
    assert len({end["steps"] for end in ends}) == 1


def test_slow_steps_end_within_a_few(tmp_path: Path) -> None:
    """Steps of 0.1 s to 0.3 s, with nothing exchanged between that would slow the others down to the slowest."""
    crew(3, fit, tmp_path, signal.SIGTERM, (1,), 0.1, (), 100)
    ends = ended(tmp_path)
    assert len({end["steps"] for end in ends}) == 1
    # the slowest stands behind by the steps that it is slower, and comes up to the fastest's next
    assert ends[0]["steps"] <= 3 * 3 + 6


def test_whoever_waits_at_the_end_of_its_epoch_stops_with_the_others(tmp_path: Path) -> None:
    """Worker 0 has no batch left after 2 steps, and the others stop long before the end of theirs."""
    crew(3, fit, tmp_path, signal.SIGTERM, (1,), 0.01, (2, 10_000, 10_000))
    ends = ended(tmp_path)
    assert [end["error"] for end in ends] == ["SIGTERMException"] * 3
    assert ends[1]["steps"] == ends[2]["steps"]
    assert ends[0]["steps"] == 2
    assert (tmp_path / "stopped.ckpt").exists()
