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

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy, TokenPipelineStrategy
from lightning_decentral.pipeline import Uniform
from lightning_decentral.pipeline.wire.executor import Executor
from lightning_decentral.shared import replica_strategy
from lightning_decentral.shared.wire import pipeline_replicas, transport
from lightning_decentral.shared.wire.meeting import notices, rendezvous
from tests.crew import crew
from tests.pipeline.training import Language
from tests.tiny import QUIET, Net, SizedBatches

TIMEOUT = timedelta(seconds=2)
NO_WORD = {
    1: "worker 1 left no word: killed, stopped, or cut off from the network; see its own output",
    0: "worker 0, which has the store, left no word: killed, stopped, or cut off from the network; see its own output, "
    "then start all workers again from the last checkpoint",
}


def fault(kind: str) -> None:
    if kind == "raises":
        raise ValueError("out of luck\nand more that nobody needs")
    os.kill(os.getpid(), {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}[kind])
    time.sleep(60)


class Unlucky(Net):
    """One worker comes to its fault at a place of that name."""

    def __init__(self, where: str, kind: str, victim: int) -> None:
        super().__init__()
        self.where, self.kind, self.victim = where, kind, victim

    def come_to(self, where: str) -> None:
        if self.where == where and self.global_rank == self.victim:
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
    made, checked = transport.dist.new_group, replica_strategy.check_same_model
    transport.dist.new_group = lambda *a, **k: (made(*a, **k), module.come_to("groups"))[0]
    replica_strategy.check_same_model = lambda *a: (module.come_to("model check"), checked(*a))[1]


def meet_faults_in_a_stage(module: Language, where: str, kind: str, victim: int) -> None:
    """In the second step: before a chunk's forward or backward, or the gradients' average over the replicas."""
    owner, name = {
        "forward": (Executor, "_forward"),
        "backward": (Executor, "_backward"),
        "averaging": (pipeline_replicas._Averaging, "gradients"),
    }[where]
    inner = getattr(owner, name)

    def unlucky(*args: Any) -> Any:
        if module.global_rank == victim and module.global_step == 1:
            fault(kind)
        return inner(*args)

    setattr(owner, name, unlucky)


def be_quick() -> None:
    notices.BEAT_SECONDS, notices.SILENT_SECONDS, notices.LINGER_SECONDS = 0.1, 0.6, 0.4
    rendezvous.LINGER_SECONDS = 0.4


def fit(strategy: Any, where: str, kind: str, size: int, victim: int) -> None:
    be_quick()
    module = Unlucky(where, kind, victim)
    trainer = Trainer(**QUIET, max_steps=4 if where == "checkpoint" else 100_000, devices=size, strategy=strategy)
    meet_faults_in_set_up(module)
    trainer.fit(module, SizedBatches(3 if where == "validation" else 100_000), SizedBatches(1))
    trainer.save_checkpoint(f"/tmp/never-{os.getpid()}.ckpt")


def fit_stages(strategy: Any, where: str, kind: str, size: int, victim: int) -> None:
    be_quick()
    module = Language(sgd=True)
    meet_faults_in_a_stage(module, where, kind, victim)
    quiet = {**QUIET, "use_distributed_sampler": False}
    Trainer(**quiet, max_steps=100_000, devices=size, strategy=strategy).fit(module)


def gossip() -> GossipStrategy:
    return GossipStrategy(timeout=TIMEOUT)


def compressed() -> CompressedStrategy:
    return CompressedStrategy(timeout=TIMEOUT)


def partial() -> PartialBackpropStrategy:
    return PartialBackpropStrategy(cuts=["second"], timeout=TIMEOUT)


def stages() -> TokenPipelineStrategy:
    return TokenPipelineStrategy(stages=2, slicing=Uniform(2), timeout=TIMEOUT)


def check_ends(run: Any, make: Any, where: str, kind: str, phase: str, size: int, victim: int) -> None:
    outcomes = crew(size, run, make(), where, kind, size, victim)
    lost = outcomes.pop(victim)
    assert (lost.killed, lost.error.startswith("ValueError: out of luck")) == (kind != "raises", kind == "raises"), lost
    said = rf"worker {victim} ended: ValueError: out of luck \(in {phase}\)"
    why = said if kind == "raises" else re.escape(NO_WORD[victim])
    for rank, other in zip((r for r in range(size) if r != victim), outcomes, strict=True):
        who = rf"(worker {rank} lost (neighbour|worker|the others)|stage {rank % 2} lost stage {1 - rank % 2}).*"
        assert re.search(rf"{who} in {phase}: .*{why}", other.error), other
        assert len(other.error.splitlines()) == 1
        assert other.seconds < 100  # not Lightning's half hour: the timeout, and some seconds to find out why


@pytest.mark.sampled
@pytest.mark.parametrize(("make", "where", "kind", "phase", "size"), [
    (gossip, "configure_model", "raises", "set-up", 2),
    (gossip, "groups", "raises", "set-up", 3),
    (gossip, "groups", "dies", "set-up", 2),
    (gossip, "model check", "stops", "set-up", 2),
    (gossip, "configure_optimizers", "raises", "set-up", 2),
    (gossip, "step", "raises", "step [45678]", 3),
    (gossip, "step", "dies", "step [45678]", 3),
    (gossip, "step", "stops", "step [45678]", 2),
    (gossip, "validation", "raises", "validation", 2),
    (compressed, "step", "dies", "step [45]", 2),
    (partial, "step", "raises", "step [45]", 2),
    (partial, "step", "dies", "step [45]", 3),
])  # fmt: skip
def test_whoever_loses_a_worker_says_whom_where_and_why(
    make: Any, where: str, kind: str, phase: str, size: int
) -> None:
    check_ends(fit, make, where, kind, phase, size, victim=1)


@pytest.mark.sampled
@pytest.mark.parametrize(("where", "kind", "size"), [
    ("forward", "dies", 2),
    ("backward", "dies", 2),
    ("backward", "raises", 2),
    ("averaging", "dies", 4),
])  # fmt: skip
def test_whoever_loses_a_stage_says_so(where: str, kind: str, size: int) -> None:
    """Of the other pipeline, too, in the average over the replicas."""
    check_ends(fit_stages, stages, where, kind, "step [123]", size, victim=1)


@pytest.mark.parametrize(("where", "phase"), [("model check", "set-up"), ("step", "step [45678]")])
def test_who_had_the_store_is_named(where: str, phase: str) -> None:
    """Nobody can ask it any more who is silent."""
    check_ends(fit, gossip, where, "dies", phase, 3, victim=0)


def start() -> None:
    Trainer(**QUIET, max_steps=1, devices=2, strategy=GossipStrategy(timeout=TIMEOUT)).fit(Net(), SizedBatches(1))


def test_a_worker_that_can_make_no_group_is_named_in_one_line() -> None:
    """An interface that isn't there; the other waits for it."""
    for outcome in crew(2, start, own={1: {"GLOO_SOCKET_IFNAME": "nope0"}}, seconds=30):
        assert re.fullmatch(
            r"MeetingFailed: worker 1 can't make a group \([^\n]*nope0\): look at GLOO_.*", outcome.error
        )
