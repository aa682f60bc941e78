"""Evaluations that read more than parameters: weights made of an optimizer's state, or of a callback's own average.

Each worker makes them of what it alone has. What is evaluated is the mean of what the workers made, and nothing of it
stays: neither in the parameters nor where they were swapped with.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_decentral import CompressedStrategy, GossipStrategy
from lightning_decentral.gossip import Elastic, FullyShard
from lightning_decentral.shared.wire.fsdp import local
from tests.crew import by_itself, crew
from tests.elastic.wire.lobbies import DEAD, LobbyProcess
from tests.tiny import QUIET, Net, SizedBatches, in_processes

SIZE, BETA = 2, 0.9


class ScheduleFree(torch.optim.SGD):
    """y is trained, z the plain iterate, x = (y - (1 - beta) z) / beta the average that is evaluated (2405.15682)."""

    evaluates = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert not self.evaluates
        loss = closure()
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            z = state.setdefault("z", p.clone())
            x = p.lerp(z, 1 - 1 / BETA)
            z.sub_(p.grad, alpha=0.1)
            state["k"] = state.get("k", 0) + 1
            x.lerp_(z, 1 / state["k"])
            p.copy_(x.lerp(z, 1 - BETA))
        return loss

    @torch.no_grad()
    def eval(self) -> None:
        for p, state in self.state.items():
            p.lerp_(state["z"], 1 - 1 / BETA)
        self.evaluates = True

    @torch.no_grad()
    def train(self) -> None:
        for p, state in self.state.items():
            p.lerp_(state["z"], 1 - BETA)
        self.evaluates = False

    def own(self) -> list[Tensor]:
        """What this worker would evaluate, without a look at the parameters that stand there."""
        return [p.lerp(self.state[p]["z"], 1 - 1 / BETA).clone() for p in self.param_groups[0]["params"]]


class Free(Net):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def configure_optimizers(self) -> Any:
        return ScheduleFree([p for p in self.parameters() if p.requires_grad], lr=0.1)

    def on_validation_epoch_start(self) -> None:
        self.optimizers().optimizer.eval()

    def on_validation_epoch_end(self) -> None:
        self.optimizers().optimizer.train()


class Average(Callback):
    """An average of the parameters, which an evaluation exchanges with them."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.kept: list[Tensor] = []

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        parameters = trained(pl_module)
        self.kept = self.kept or [p.clone() for p in parameters]
        for average, p in zip(self.kept, parameters, strict=True):
            average.lerp_(p, 0.3)

    def _exchange(self, module: LightningModule) -> None:
        for place, p in enumerate(trained(module)):
            p.data, self.kept[place] = self.kept[place], p.data

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.kept:
            self._exchange(pl_module)

    on_validation_end = on_validation_start


def trained(module: LightningModule) -> list[Any]:
    return [p for p in module.parameters() if p.requires_grad]


class Note(Callback):
    """By worker: what it would evaluate by itself, what it evaluated, and its own before and after."""

    def __init__(self, folder: Path, average: Average | None) -> None:
        self._folder, self._average, self._rows = folder, average, {}

    def _note(self, when: str, tensors: list[Tensor]) -> None:
        self._rows[when] = [t.detach().clone() for t in tensors]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        made = self._average.kept if self._average else trainer.optimizers[0].own()
        self._note("made", made)
        self._note("before", trained(pl_module))

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._note("evaluated", trained(pl_module))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note("after", trained(pl_module))
        if self._average:
            self._note("kept", self._average.kept)
        torch.save(self._rows, self._folder / f"{trainer.global_rank}.pt")


def fit(folder: Path, strategy: Callable[..., Any], average: bool, validates: int, devices: int = SIZE) -> None:
    swapping = Average() if average else None
    callbacks = [*([swapping] if swapping else []), Note(folder, swapping)]
    module = Net(dropout=0.0) if average else Free()
    made = strategy() if devices == 1 else strategy(start_method="fork")
    trainer = Trainer(**QUIET, max_epochs=1, devices=devices, strategy=made, callbacks=callbacks)
    trainer.fit(module, SizedBatches(4), SizedBatches(validates))


@pytest.mark.parametrize("average", [False, True], ids=["optimizer's state", "callback's average"])
@pytest.mark.parametrize("strategy", [GossipStrategy, partial(GossipStrategy, evaluate="own"), CompressedStrategy])
def test_the_mean_of_what_the_workers_made_is_evaluated(
    tmp_path: Path, strategy: Callable[..., Any], average: bool
) -> None:
    in_processes(fit, tmp_path, strategy, average, 2)
    rows = [torch.load(tmp_path / f"{rank}.pt") for rank in range(SIZE)]
    differ = strategy is not CompressedStrategy
    assert differ != all(map(torch.equal, rows[0]["made"], rows[1]["made"]))
    for row in rows:
        wanted = row["made"]
        if strategy is GossipStrategy:
            wanted = [torch.stack(pair).mean(0) for pair in zip(*(r["made"] for r in rows), strict=True)]
        for found, mean in zip(row["evaluated"], wanted, strict=True):
            torch.testing.assert_close(found, mean, rtol=1e-5, atol=1e-6)
        if strategy is GossipStrategy:  # else train() takes back what eval() did up to rounding, as in one process
            assert all(map(torch.equal, row["after"], row["before"]))
        if average:
            assert all(map(torch.equal, row["kept"], row["made"]))
    if strategy is GossipStrategy:
        assert all(map(torch.equal, rows[0]["evaluated"], rows[1]["evaluated"]))


def assert_mean_of(rows: list[dict[str, list[Tensor]]]) -> None:
    assert not all(map(torch.equal, rows[0]["made"], rows[1]["made"]))
    for row in rows:
        for found, *made in zip(row["evaluated"], *(r["made"] for r in rows), strict=True):
            torch.testing.assert_close(found, torch.stack(made).mean(0), rtol=1e-5, atol=1e-6)
        assert all(map(torch.equal, row["after"], row["before"]))
    assert all(map(torch.equal, rows[0]["evaluated"], rows[1]["evaluated"]))


@pytest.mark.parametrize("average", [False, True], ids=["optimizer's state", "callback's average"])
def test_workers_that_come_and_go_evaluate_the_mean_of_what_they_made(tmp_path: Path, average: bool) -> None:
    with LobbyProcess(least=SIZE, most=SIZE) as lobby:
        outcomes = crew(SIZE, member, tmp_path, lobby.place, average)
    assert [outcome.error for outcome in outcomes] == [""] * SIZE
    assert_mean_of([torch.load(next((tmp_path / str(rank)).iterdir())) for rank in range(SIZE)])


def member(folder: Path, lobby: str, average: bool) -> bool:
    SizedBatches._rank = by_itself()  # type: ignore[assignment, method-assign]
    own = folder / str(SizedBatches._rank)
    own.mkdir()
    elastic = Elastic(lobby=lobby, workers=(SIZE, SIZE), dead_after=DEAD, host="127.0.0.1")
    fit(own, partial(GossipStrategy, elastic=elastic), average, 2, devices=1)
    return True


def test_shards_evaluate_the_mean_of_what_the_workers_made(tmp_path: Path) -> None:
    """Each device its part of it."""
    island = FullyShard(2)
    in_processes(fit, tmp_path, partial(GossipStrategy, island=island), False, 2, 2 * SIZE)
    rows = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2 * SIZE)]
    for place in range(2):
        assert_mean_of([{when: list(map(local, found)) for when, found in row.items()} for row in rows[place::2]])
