"""A worker without any batch: all end with one line that names it, where Lightning would name its loader's class, or
where one would stand in a validation that the other never comes to."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from tests.apart import lines, started_apart
from tests.shared.test_early_ends import STRATEGIES
from tests.tiny import QUIET, Batches, Net


class Counted(Batches):
    """With a length that Lightning knows."""

    def __len__(self) -> int:
        return self._lengths[self._rank]


def fit(rank: int, name: str, batches: type[Batches], allowed: bool, validates: bool) -> str:
    options = {**QUIET, "use_distributed_sampler": False, "devices": 2, "max_epochs": 2}
    trainer = Trainer(**options, strategy=STRATEGIES[name](timeout=timedelta(seconds=10)))
    module: Any = Net(dropout=0.0)
    module.allow_zero_length_dataloader_with_multiple_devices = allowed
    trainer.fit(module, batches(lengths=(3, 0)), batches(lengths=(1, 1)) if validates else None)
    return f"trained {trainer.global_step} steps"


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "batches", "allowed", "validates"), [
    ("gossip", Counted, True, False),
    ("gossip", Batches, False, True),
    ("compressed", Batches, False, True),
    ("partial", Counted, False, True),
])  # fmt: skip
def test_a_worker_without_a_batch_is_named_on_all(
    tmp_path: Path, name: str, batches: type[Batches], allowed: bool, validates: bool
) -> None:
    found = started_apart(fit, 2, tmp_path, name, batches, allowed, validates)
    line = "ValueError: worker 1 has no training batch: give every worker data, or take fewer workers"
    first, second = lines(found)
    assert second.startswith(line), found
    assert re.match(rf"PeerLost: worker 0 lost .*: worker 1 ended: {line}", first), found
    assert len(first.splitlines()) == len(second.splitlines()) == 1
    assert all(float(text.rpartition("\n")[2]) < 10 for text in found)


class RunsOut(Batches):
    """Worker 1 has none from the second epoch on."""

    def __iter__(self) -> Any:
        self._lengths = (3, 3 if self._epoch < 0 else 0)
        return super().__iter__()


def test_a_worker_without_a_batch_in_a_later_epoch_is_named(tmp_path: Path) -> None:
    first, second = lines(started_apart(fit, 2, tmp_path, "gossip", RunsOut, False, True))
    assert second.startswith("ValueError: worker 1 has no training batch: give every worker data")
    assert re.match("PeerLost: worker 0 lost .*: worker 1 ended: ValueError: worker 1 has no training batch", first)


def fit_validating(rank: int, given: tuple[Any, Any]) -> str:
    options = {**QUIET, "use_distributed_sampler": False, "devices": 2, "max_epochs": 2}
    trainer = Trainer(**options, strategy=STRATEGIES["gossip"](timeout=timedelta(seconds=20)))
    trainer.fit(Net(dropout=0.0), Batches(3), given[rank])
    return f"trained {trainer.global_step} steps"


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_worker_without_a_validation_loader_is_named_at_set_up(tmp_path: Path, lacks: int) -> None:
    given = (None, Batches(1)) if lacks == 0 else (Batches(1), [])
    found = started_apart(fit_validating, 2, tmp_path, given)
    has = ["given", "None"] if lacks else ["None", "given"]
    line = f"ValueError: worker 1 has val_dataloaders={has[1]}, worker 0 has val_dataloaders={has[0]}: give every"
    assert all(text.startswith(line) for text in lines(found)), found
    assert all(float(text.rpartition("\n")[2]) < 20 for text in found)
