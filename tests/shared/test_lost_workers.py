"""Workers that die, fall silent or raise, at every moment, with no launcher above them: each of the others ends within
the one timeout and says in one line whom it lost, where, and why."""

import os
import re
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_decentral import GossipStrategy, PartialBackpropStrategy
from lightning_decentral.shared import replica
from lightning_decentral.shared.wire import transport
from lightning_decentral.shared.wire.meeting import notices
from tests.crew import crew
from tests.tiny import QUIET, Net, SizedBatches

TIMEOUT = timedelta(seconds=2)
NO_WORD = "worker 1 left no word: killed, stopped, or cut off from the network; see its own output"


def fault(kind: str) -> None:
    if kind == "raises":
        raise ValueError("out of luck\nand more that nobody needs")
    os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[kind])
    time.sleep(60)


class Unlucky(Net):
    """Worker 1 comes to its fault at a place of that name."""

    def __init__(self, where: str, kind: str) -> None:
        super().__init__()
        self.where, self.kind = where, kind

    def come_to(self, where: str) -> None:
        if self.where == where and self.global_rank == 1:
            fault(self.kind)

    def configure_model(self) -> None:
        self.come_to("configure_model")

    def configure_optimizers(self) -> Any:
        self.come_to("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 3:
            self.come_to("step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.come_to("validation")
        super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.come_to("checkpoint")


def meet_faults_in_set_up(module: Unlucky) -> None:
    """Between two groups that all make, and in the check that the models are equal."""
    made, checked = transport.dist.new_group, replica.check_same_model
    transport.dist.new_group = lambda *a, **k: (made(*a, **k), module.come_to("groups"))[0]
    replica.check_same_model = lambda *a: (module.come_to("model check"), checked(*a))[1]


def fit(strategy: Any, where: str, kind: str) -> None:
    notices.BEAT_SECONDS, notices.SILENT_SECONDS, notices.LINGER_SECONDS = 0.1, 0.8, 0.4
    module = Unlucky(where, kind)
    trainer = Trainer(**QUIET, max_steps=4 if where == "checkpoint" else 100_000, devices=3, strategy=strategy)
    meet_faults_in_set_up(module)
    trainer.fit(module, SizedBatches(3 if where == "validation" else 100_000), SizedBatches(1))
    trainer.save_checkpoint(f"/tmp/never-{os.getpid()}.ckpt")


def gossip() -> GossipStrategy:
    return GossipStrategy(timeout=TIMEOUT)


def partial() -> PartialBackpropStrategy:
    return PartialBackpropStrategy(cuts=["second"], timeout=TIMEOUT)


@pytest.mark.parametrize(("make", "where", "kind", "phase"), [
    (gossip, "configure_model", "raises", "set-up"),
    (gossip, "groups", "raises", "set-up"),
    (gossip, "groups", "dies", "set-up"),
    (gossip, "model check", "stops", "set-up"),
    (gossip, "configure_optimizers", "raises", "set-up"),
    (gossip, "step", "raises", "step [45678]"),
    (gossip, "step", "dies", "step [45678]"),
    (gossip, "step", "stops", "step [45678]"),
    (gossip, "validation", "raises", "validation"),
    (partial, "step", "raises", "step [45]"),
    (partial, "step", "dies", "step [45]"),
])  # fmt: skip
def test_whoever_loses_a_worker_says_whom_where_and_why(make: Any, where: str, kind: str, phase: str) -> None:
    first, lost, third = crew(3, fit, make(), where, kind)
    assert (lost.killed, lost.error.startswith("ValueError: out of luck")) == (kind != "raises", kind == "raises")
    why = rf"worker 1 ended: ValueError: out of luck \(in {phase}\)" if kind == "raises" else re.escape(NO_WORD)
    for rank, other in ((0, first), (2, third)):
        assert re.search(rf"worker {rank} lost (neighbour|worker|the others).* in {phase}: .*{why}", other.error), other
        assert len(other.error.splitlines()) == 1
        assert other.seconds < 20  # not Lightning's half hour: the timeout, and some seconds to find out why
