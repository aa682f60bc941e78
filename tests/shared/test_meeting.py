"""What a fit leaves behind in a process that lives on: no threads, no descriptors."""

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lightning_decentral import GossipStrategy, PartialBackpropStrategy
from lightning_decentral.gossip import PushSum
from tests.crew import crew
from tests.tiny import QUIET, Net, SizedBatches


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def fits(count: int, strategy: type, options: dict[str, Any], folder: Path) -> list[tuple[int, int]]:
    """(threads, descriptors) after each of so many trainers; the first has used what stays, and nobody else's goes."""
    rows: list[tuple[int, int]] = []
    for _ in range(count):
        trainer, module = Trainer(**QUIET, max_steps=3, devices=2, strategy=strategy(**options)), Net()
        trainer.fit(module, SizedBatches(3), SizedBatches(1))
        trainer.validate(module, SizedBatches(1), verbose=False)
        trainer.save_checkpoint(folder / "between.ckpt")
        del trainer, module
        gc.collect()
        end = time.monotonic() + 5
        while rows and held() > rows[0] and time.monotonic() < end:
            time.sleep(0.01)  # the store's thread closes what its clients have closed when it gets to it
        rows.append(held())
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    return rows


@pytest.mark.parametrize(("strategy", "options"), [
    (GossipStrategy, {}),
    (GossipStrategy, {"combine": PushSum(), "evaluate": "own"}),
    (PartialBackpropStrategy, {"cuts": ["second"]}),
], ids=["gossip", "push-sum", "partial"])  # fmt: skip
def test_a_fit_gives_its_threads_and_descriptors_back(strategy: type, options: dict[str, Any], tmp_path: Path) -> None:
    for outcome in crew(2, fits, 4, strategy, options, tmp_path):
        assert not outcome.error, outcome.output
        _, second, _, fourth = outcome.value
        assert fourth[0] == second[0]
        assert fourth[1] <= second[1] + 1  # one that the store's thread has yet to close
