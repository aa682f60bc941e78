"""What a fit leaves behind in a process that lives on, also one that an exception ended: no threads, no descriptors."""

import gc
import os
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

import lightning_decentral
from lightning_decentral import (
    CompressedStrategy,
    GossipStrategy,
    PartialBackpropStrategy,
    SpilledStrategy,
    TokenPipelineStrategy,
)
from lightning_decentral.gossip import AllReduce, PushSum
from lightning_decentral.pipeline import Given
from lightning_decentral.shared import meeting
from lightning_decentral.shared.meeting import WorkerGroup
from lightning_decentral.shared.wire.meeting import notices
from lightning_decentral.shared.wire.pending import PeerLost
from tests.crew import crew
from tests.pipeline.training import Language
from tests.tiny import QUIET, Net, SizedBatches, in_processes


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


STILL_SECONDS = 0.5


@dataclass
class Settled:
    """What is held after each fit.

    Args:
        folder: where the workers meet. Worker 0 has the store: what another opens for its next fit, and what it hasn't
            closed yet of the last one, are descriptors of worker 0's, too.
    """

    folder: Path
    size: int
    rows: list[tuple[int, int]] = field(default_factory=list)

    def add(self) -> None:
        """Once all have closed what they held, and before any of them goes on."""
        gc.collect()
        self._meet("closed")
        self.rows.append(self._still() if not self.rows else self._no_more())
        self._meet("counted")

    def _meet(self, what: str) -> None:
        name, end = f"{what}-{len(self.rows)}", time.monotonic() + 60
        (self.folder / f"{name}.{os.environ.get('LOCAL_RANK', '0')}").touch()
        while len([*self.folder.glob(f"{name}.*")]) < self.size:
            assert time.monotonic() < end, f"only some of {self.size} workers have {what}"
            time.sleep(0.005)

    def _still(self) -> tuple[int, int]:
        """Once nothing has changed for a while: the store's thread closes in its own time what clients have closed."""
        found, since, end = held(), time.monotonic(), time.monotonic() + 30
        while threading.active_count() > 1 or time.monotonic() < since + STILL_SECONDS:
            assert time.monotonic() < end, threading.enumerate()
            time.sleep(0.01)
            now = held()
            if now != found:
                found, since = now, time.monotonic()
        return found

    def _no_more(self) -> tuple[int, int]:
        """As soon as it is what it was first; mostly some milliseconds, a busy machine takes its time."""
        end = time.monotonic() + 30
        while time.monotonic() < end and (threading.active_count() > 1 or not no_more(held(), self.rows[0])):
            time.sleep(0.01)
            gc.collect()  # a thread that ended late held what is garbage now
        return held()


def no_more(now: tuple[int, int], before: tuple[int, int]) -> bool:
    return now[0] <= before[0] and now[1] <= before[1]


@dataclass(frozen=True)
class Kind:
    """A strategy and what it trains here."""

    strategy: type
    options: dict[str, Any] = field(default_factory=dict)
    module: type[LightningModule] = Net
    loaders: tuple[Any, ...] = (SizedBatches(3), SizedBatches(1))
    devices: int = 2


def fits(count: int, kind: Kind, folder: Path) -> list[tuple[int, int]]:
    """(threads, descriptors) after each of so many trainers; the first has used what stays, and nobody else's goes."""
    settled = Settled(folder, kind.devices)
    for _ in range(count):
        strategy, module = kind.strategy(**kind.options), kind.module()
        trainer = Trainer(**QUIET, max_steps=3, devices=kind.devices, strategy=strategy)
        trainer.fit(module, *kind.loaders)
        trainer.validate(module, *kind.loaders[1:], verbose=False)
        trainer.save_checkpoint(folder / "between.ckpt")
        del trainer, module, strategy
        settled.add()
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    return settled.rows


KINDS = {
    "gossip": Kind(GossipStrategy),
    "push-sum": Kind(GossipStrategy, {"combine": PushSum(), "evaluate": "own"}),
    "island": Kind(GossipStrategy, {"island": AllReduce(devices=2)}),
    "partial": Kind(PartialBackpropStrategy, {"cuts": ["second"]}),
    "compressed": Kind(CompressedStrategy),
    "pipeline": Kind(TokenPipelineStrategy, {"slicing": Given((5, 8))}, Language, ()),
}
SPILLED = Kind(SpilledStrategy, {"memory_bytes": 2500}, devices=1)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_gives_its_threads_and_descriptors_back(kind: str, tmp_path: Path) -> None:
    for outcome in crew(2, fits, 4, KINDS[kind], tmp_path):
        assert not outcome.error, outcome.output
        check_no_more(*outcome.value)


def test_a_spilled_fit_gives_its_threads_and_descriptors_back(tmp_path: Path) -> None:
    check_no_more(*in_processes(fits, 4, SPILLED, tmp_path))


def test_every_strategy_is_asked_for_what_it_leaves_behind() -> None:
    asked = {kind.strategy for kind in (*KINDS.values(), SPILLED)}
    names = [name for name in lightning_decentral.__all__ if name.endswith("Strategy")]
    assert asked == {getattr(lightning_decentral, name) for name in names}


def test_workers_on_a_device_without_float64_are_refused_before_they_meet() -> None:
    place: Any = SimpleNamespace(global_rank=lambda: 0, world_size=lambda: 2)
    of: Any = SimpleNamespace(cluster_environment=place, root_device=torch.device("mps"), process_group_backend="gloo")
    with pytest.raises(ValueError, match="float64, which mps devices don't have: train with accelerator='cpu'"):
        WorkerGroup(of, timedelta(minutes=5)).come()


@pytest.mark.parametrize(("given", "found"), [(None, "8"), ("16", "16")])
def test_nccl_has_few_blocks_for_messages_unless_the_user_says_how_many(
    monkeypatch: pytest.MonkeyPatch, given: str | None, found: str
) -> None:
    """Each would keep a multiprocessor of the device while a neighbour is late."""
    monkeypatch.setenv("NCCL_MAX_P2P_NCHANNELS", given or "")
    if given is None:
        monkeypatch.delenv("NCCL_MAX_P2P_NCHANNELS")
    place: Any = SimpleNamespace(global_rank=lambda: 0, world_size=lambda: 1)
    own = {"root_device": torch.device("cuda"), "process_group_backend": "nccl", "on_host": None}
    of: Any = SimpleNamespace(cluster_environment=place, **own)
    with mock.patch.object(meeting, "_init_dist_connection"):
        WorkerGroup(of, timedelta(minutes=5)).come()
    assert os.environ["NCCL_MAX_P2P_NCHANNELS"] == found


def check_no_more(first: tuple[int, int], *later: tuple[int, int]) -> None:
    """A group that stays is two threads and five descriptors, in every fit."""
    assert all(no_more(row, first) for row in later), (first, *later)


class Sick(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and self.global_step == 2:
            raise ValueError("out of luck")
        return super().training_step(batch, batch_idx)


def survive(strategy: type, options: dict[str, Any], folder: Path) -> tuple[str, list[tuple[int, int]]]:
    """(what ended the second fit, held after each of five); both workers' processes live on."""
    notices.LINGER_SECONDS = 0.3
    settled = Settled(folder, 2)
    said = ""
    for kind in (Net, Sick, Net, Net, Net):
        module = kind()
        trainer = Trainer(**QUIET, max_steps=4, devices=2, strategy=strategy(**options, timeout=timedelta(seconds=20)))
        try:
            trainer.fit(module, SizedBatches(4))
        except (ValueError, PeerLost) as error:
            said = str(error)
        assert (trainer.global_step == 4) is (kind is Net)
        del trainer, module
        settled.add()
    return said, settled.rows


@pytest.mark.sampled
@pytest.mark.parametrize(("strategy", "options"), [
    (GossipStrategy, {}),
    (PartialBackpropStrategy, {"cuts": ["second"]}),
], ids=["gossip", "partial"])  # fmt: skip
def test_a_fit_that_one_worker_ends_leaves_nothing_and_others_can_follow(
    strategy: type, options: dict[str, Any], tmp_path: Path
) -> None:
    """The other notices although no process has ended: the connections are closed, and nobody waits for 20 s."""
    first, second = crew(2, survive, strategy, options, tmp_path)
    assert not first.error + second.error, first.output + second.output
    assert second.value[0] == "out of luck"
    assert "worker 1 ended: ValueError: out of luck (in step 3)" in first.value[0]
    for _, rows in (first.value, second.value):
        check_no_more(*rows)
