"""One fit's stopping and ending together, by itself: a single worker's world whose other worker is told what to say."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy
from lightning_decentral.gossip import AllReduce, Complete
from lightning_decentral.shared import coordination as module
from lightning_decentral.shared.coordination import FitCoordinator, Uncoordinated
from lightning_decentral.shared.updates import Unfollowed
from lightning_decentral.shared.wire.agreement import ALERT_SECONDS, PATIENCE_SECONDS
from lightning_decentral.shared.wire.pending import PeerLost
from tests.tiny import QUIET, Batches, Net, in_processes


class Party:
    """Takes rounds when it is asked to."""

    drifts, followed, lightning_module = True, Unfollowed(), nn.Module()

    def __init__(self, optimizers: Any = ()) -> None:
        self.taken = [3]
        self.optimizers = optimizers

    def rounds(self) -> list[int]:
        return self.taken

    def wanted(self) -> list[int]:
        return self.taken

    def take_part(self, index: int) -> None:
        self.taken[index] += 1


class Stop:
    """Where all stop, known beforehand."""

    signum, raised, patience_seconds = 15, 0, 60.0

    def __init__(self, after: int = 99) -> None:
        self.after, self.rounds = after, 0

    @property
    def agreed(self) -> bool:
        return self.rounds >= self.after

    def tick(self) -> None:
        self.rounds += 1

    def look(self) -> bool:
        return False

    def left_after(self) -> None:
        return None


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to Lightning's loops."""
    done = ["patched"]
    monkeypatch.setattr(module, "LoopPatches", lambda *_: SimpleNamespace(restore=lambda: done.append("restored")))
    return done


def fit(party: Party, stop: Any) -> FitCoordinator:
    store = SimpleNamespace(check=lambda keys: False, set=lambda key, value: None)
    wire: Any = SimpleNamespace(roll=SimpleNamespace(rank=0), store=store, world=SimpleNamespace(queued=False))
    trainer: Any = SimpleNamespace()
    quiet = dict.fromkeys(("listen", "forget", "when_orphaned"), lambda _: None)
    presence: Any = SimpleNamespace(notices=None, **quiet)
    settings: Any = {"stop": stop, "presence": presence, "name": "fit-0"}
    return FitCoordinator(wire, trainer, party, **settings)


def test_all_have_agreed_where_they_stop_and_not_before(loops: list[str]) -> None:
    together = fit(Party(), Stop(after=2))
    seen = []
    for _ in range(3):
        together.tick()
        seen.append(together.agreed)
    together.close()
    assert seen == [False, True, True]


def test_rounds_taken_for_others_count_for_the_stop_too(loops: list[str]) -> None:
    party, stop = Party(), Stop()
    together = fit(party, stop)
    together._take_part(0)
    together.close()
    assert (party.taken, stop.rounds) == ([4], 1)


def test_collective_calls_are_counted_while_the_fit_lasts(loops: list[str]) -> None:
    together = fit(Party(), Stop())
    assert [together.meet(lambda: 7), together._met] == [7, 1]
    together.close()
    assert [together.meet(lambda: 8), together._met] == [8, 1]


def test_closing_twice_is_closing_once_and_who_agreed_has_agreed(loops: list[str]) -> None:
    together = fit(Party(), Stop(after=2))
    for _ in range(3):
        together.tick()
    together.close()
    together.close()
    assert loops == ["patched", "restored"]
    assert together.agreed


def test_an_optimizer_that_steps_past_the_strategy_is_refused(loops: list[str]) -> None:
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    together = fit(Party([optimizer]), Stop())
    with together.updating:
        optimizer.step()
    with pytest.raises(RuntimeError, match="stepped past the strategy"):
        optimizer.step()
    together.close()
    optimizer.step()


def test_a_single_worker_waits_for_nobody() -> None:
    alone = Uncoordinated()
    with alone.waiting, alone.updating:
        alone.tick()
    assert alone.meet(lambda: 3) == 3
    assert not alone.agreed


def test_lost_connections_in_collective_calls_are_named(loops: list[str]) -> None:
    together = fit(Party(), Stop())

    def call() -> None:
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:58553")

    with pytest.raises(PeerLost, match="worker 0 lost the others"):
        together.meet(call)
    together.close()


class Slow(Callback):
    """Worker 0 is busy for long after its last batch, while worker 1 has ended its epoch."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            time.sleep(PATIENCE_SECONDS + 5 * ALERT_SECONDS)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        of: Any = trainer.strategy
        assert [trainer.global_step, *of.rounds()] == [6, 6]


STRATEGIES: dict[str, Callable[[], Any]] = {
    "compressed": lambda: CompressedStrategy(start_method="fork"),
    "partial": lambda: PartialBackpropStrategy(start_method="fork", cuts=["second"]),
    "gossip": lambda: GossipStrategy(start_method="fork"),
    "blocking": lambda: GossipStrategy(start_method="fork", topology=Complete(), delay=0),
    "island": lambda: GossipStrategy(start_method="fork", island=AllReduce(2)),
}


def slow_end(folder: Path, strategy: Any) -> None:
    trainer = Trainer(**QUIET, devices=2, strategy=strategy, default_root_dir=folder, callbacks=[Slow()], max_epochs=2)
    trainer.fit(Net(), Batches(3))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_worker_that_is_busy_after_its_last_update_asks_for_no_further_one(tmp_path: Path, strategy: str) -> None:
    in_processes(slow_end, tmp_path, STRATEGIES[strategy]())
