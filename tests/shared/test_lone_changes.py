"""What one worker alone trains otherwise from a step on: all end in seconds, by name; on all workers it goes on."""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy
from lightning_decentral.gossip import AllReduce, Complete, FullyShard
from tests.crew import crew
from tests.tiny import QUIET, Net, SizedBatches

TIMEOUT = timedelta(seconds=60)
STRATEGIES: dict[str, Callable[[], Any]] = {
    "compressed": lambda: CompressedStrategy(timeout=TIMEOUT),
    "partial": lambda: PartialBackpropStrategy(cuts=["second"], timeout=TIMEOUT),
    "gossip": lambda: GossipStrategy(timeout=TIMEOUT),
    "blocking": lambda: GossipStrategy(topology=Complete(), delay=0, timeout=TIMEOUT),
    "all-reduce": lambda: GossipStrategy(island=AllReduce(2), timeout=TIMEOUT),
    "shards": lambda: GossipStrategy(island=FullyShard(2), timeout=TIMEOUT),
}
DEVICES = {"all-reduce": 4, "shards": 4}


class Changing(Net):
    """On the workers of these ranks, at the third step."""

    def __init__(self, change: str, ranks: tuple[int, ...]) -> None:
        super().__init__(dropout=0.0)
        self.change, self.ranks = change, ranks
        self.extra = nn.ModuleList()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank in self.ranks:
            CHANGES[self.change](self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + sum(part(batch[0]).mean() for part in self.extra)


def set_up(module: Changing) -> None:
    module.trainer.strategy.setup_optimizers(module.trainer)


def add(module: Changing) -> None:
    module.extra.append(nn.Linear(8, 8))
    set_up(module)


def swap(module: Changing) -> None:
    module.head = nn.Linear(8, 3)
    set_up(module)


def group(module: Changing) -> None:
    module.extra.append(nn.Linear(8, 8))
    module.trainer.optimizers[0].add_param_group({"params": list(module.extra.parameters())})


CHANGES: dict[str, Callable[[Changing], Any]] = {
    "group": group,
    "thaw": lambda module: module.frozen.requires_grad_(True),
    "freeze": lambda module: module.head.requires_grad_(False),
    "replace": set_up,
    "add": add,
    "swap": swap,
}


def fit(strategy: str, change: str, ranks: tuple[int, ...]) -> list[float]:
    module = Changing(change, ranks)
    trainer = Trainer(**QUIET, max_steps=4, devices=DEVICES.get(strategy, 2), strategy=STRATEGIES[strategy]())
    trainer.fit(module, SizedBatches(6))
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


CASES = [
    ("compressed", "thaw", 1, r"has frozen.weight \(8, 8\) torch.float32, trained where worker 0 has .*, frozen"),
    ("compressed", "replace", 0, r"has optimizer 0 SGD .*, new at change 1 where worker 1 has optimizer 0 SGD"),
    ("compressed", "add", 1, r"has optimizer 0 SGD with groups of \[11\].* where worker 0 .* of \[9\]"),
    ("compressed", "swap", 1, r"has head.weight .* new at change 1 where worker 0"),
    ("partial", "thaw", 1, r"has frozen.weight .* trained where worker 0 has .*, frozen"),
    ("partial", "freeze", 0, r"has head.weight .* frozen where worker 1 has .*, trained"),
    ("partial", "replace", 1, r"has optimizer 0 SGD .*, new at change 1 where worker 0 has optimizer 0 SGD"),
    ("gossip", "thaw", 1, r"has frozen.weight .*, mixed after updates of optimizer 0 where worker 0 .*, not mixed"),
    pytest.param(
        "gossip",
        "swap",
        0,
        r"has head.weight .*, new at change 1 where worker 1 has head.weight",
        marks=pytest.mark.sampled,
    ),
    pytest.param(
        "blocking",
        "group",
        1,
        r"has extra.0.weight .*, mixed .* where worker 0 has no extra.0.weight",
        marks=pytest.mark.sampled,
    ),
    pytest.param(
        "all-reduce",
        "thaw",
        3,
        r"has frozen.weight .* trained where worker 2 has .*, frozen",
        marks=pytest.mark.sampled,
    ),
    ("all-reduce", "replace", 1, r"has optimizer 0 SGD .*, new at change 1 where worker 0 has optimizer 0 SGD"),
    ("shards", "freeze", 1, r"has head.weight .* frozen where worker 0 has .*, trained"),
    pytest.param(
        "shards", "thaw", 2, r"has frozen.weight .* trained where worker 3 has .*, frozen", marks=pytest.mark.sampled
    ),
    ("shards", "replace", 3, r"has optimizer 0 SGD .*, new at change 1 where worker 2 has optimizer 0 SGD"),
]


@pytest.mark.parametrize(("strategy", "change", "rank", "words"), CASES, ids=lambda value: str(value)[:12])
def test_a_lone_change_ends_all_within_seconds_by_name(strategy: str, change: str, rank: int, words: str) -> None:
    outcomes = crew(DEVICES.get(strategy, 2), fit, strategy, change, (rank,), seconds=70)
    lone = outcomes[rank]
    assert lone.error.startswith(f"RuntimeError: worker {rank} has ")
    assert re.search(words, lone.error), lone.error
    for other in (outcome for place, outcome in enumerate(outcomes) if place != rank):
        assert re.search(rf"worker {rank} ended: RuntimeError: worker {rank} {words}", other.error), other.error
    assert max(outcome.seconds for outcome in outcomes) < TIMEOUT.total_seconds() / 2


@pytest.mark.parametrize(
    ("strategy", "change"),
    [
        ("compressed", "thaw"),
        ("compressed", "add"),
        ("compressed", "swap"),
        ("partial", "thaw"),
        ("partial", "replace"),
        ("gossip", "thaw"),
        pytest.param("gossip", "group", marks=pytest.mark.sampled),
        pytest.param("blocking", "swap", marks=pytest.mark.sampled),
        ("all-reduce", "thaw"),
        pytest.param("shards", "freeze", marks=pytest.mark.sampled),
    ],
)
def test_on_all_workers_the_same_change_goes_on(strategy: str, change: str) -> None:
    one, *others = crew(DEVICES.get(strategy, 2), fit, strategy, change, (0, 1, 2, 3), seconds=70)
    assert not one.error, one.error
    assert [other.value for other in others] == [one.value] * len(others)


@pytest.mark.parametrize("change", ["freeze", "replace"])
def test_under_gossip_a_worker_alone_freezes_what_is_mixed_and_replaces_its_optimizer(change: str) -> None:
    """What it doesn't train goes on being mixed: experts, parts by turns."""
    one, two = crew(2, fit, "gossip", change, (1,), seconds=70)
    assert not one.error + two.error
    assert one.value == two.value


def fit_unevenly(change: str) -> None:
    module = Changing(change, (0, 1))
    trainer = Trainer(**QUIET, max_epochs=1, devices=2, strategy=STRATEGIES["gossip"]())
    batches = 2 if trainer.global_rank == 0 else 6  # the first one's epoch is over before the change
    trainer.fit(module, SizedBatches(batches))


def test_who_has_ended_its_epoch_comes_to_no_change_of_others() -> None:
    short, long = crew(2, fit_unevenly, "thaw", seconds=70)
    assert re.search(r"RuntimeError: worker 1 has frozen.weight .* where worker 0 .*, not mixed", long.error), (
        long.error
    )
    assert "worker 1 ended: RuntimeError: worker 1 has frozen.weight" in short.error, short.error
    assert max(short.seconds, long.seconds) < TIMEOUT.total_seconds() / 2
