"""A newcomer that comes when the run's model has changed trains as the members do, or ends alone by its own refusal."""

import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral.gossip import Complete, Elastic, GossipStrategy
from tests.crew import by_itself, crew
from tests.elastic.wire.lobbies import DEAD, LobbyProcess
from tests.tiny import QUIET

CHANGED, COMES, NEWCOMER = 5, 8, 2


class Two(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 1)
        self.late = nn.Parameter(torch.ones(3), requires_grad=False)
        self.double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        found = self.last(torch.tanh(self.first(batch[0])) * self.late)
        return (found - batch[0].sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        return

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "thaw": lambda trainer, module: module.late.requires_grad_(True),
    "prune": lambda trainer, module: prune.custom_from_mask(
        module.first, "weight", (torch.arange(module.first.weight.numel()) % 3 > 0).view_as(module.first.weight)
    ),
    "reparametrize": lambda trainer, module: parametrizations.weight_norm(module.first),
    "group": lambda trainer, module: trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
}


class Happens(Callback):
    """By the founders alone, as an event that depends on the step; they go slowly until the newcomer is there."""

    def __init__(self, folder: Path, rank: int, change: str) -> None:
        self._folder, self._founder, self._change = folder, rank != NEWCOMER, CHANGES[change]
        self.rows: dict[int, tuple[int, list[float]]] = {}

    def on_train_batch_start(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if self._founder and trainer.global_step == CHANGED:
            self._change(trainer, module)

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        strategy: Any = trainer.strategy
        weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()
        self.rows[trainer.global_step] = len(strategy.members), weights
        if trainer.global_step == COMES:
            (self._folder / "comes").touch()
        if self._founder and trainer.global_step >= COMES and not (self._folder / "there").exists():
            time.sleep(0.15)


def member(folder: Path, lobby: str, change: str) -> dict[int, tuple[int, list[float]]]:
    rank, end = by_itself(), time.monotonic() + 60
    while rank == NEWCOMER and not (folder / "comes").exists() and time.monotonic() < end:
        time.sleep(0.02)
    elastic = Elastic(lobby=lobby, workers=(2, 3), dead_after=DEAD, host="127.0.0.1")
    strategy: Any = GossipStrategy(elastic=elastic, topology=Complete(), delay=0, timeout=timedelta(seconds=60))
    happens = Happens(folder, rank, change)
    trainer = Trainer(
        **QUIET,
        strategy=strategy,
        devices=1,
        max_epochs=12,
        val_check_interval=3,
        callbacks=[happens, There(folder, rank)],
    )
    data = TensorDataset(torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    try:
        trainer.fit(Two(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=32))
    finally:
        (folder / "there").touch() if rank == NEWCOMER else None
    return happens.rows


class There(Callback):
    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self._rank == NEWCOMER:
            (self._folder / "there").touch()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("change", "named"),
    [("thaw", ""), ("prune", "weight_orig"), ("reparametrize", "original0"), ("group", "group 1 of")],
)
def test_a_newcomer_trains_as_the_members_or_ends_alone(tmp_path: Path, change: str, named: str) -> None:
    """All average in each step: whoever takes part has what all have."""
    with LobbyProcess(least=2, most=3) as lobby:
        outcomes = crew(3, member, tmp_path, lobby.place, change)
    errors = [outcome.error for outcome in outcomes]
    assert errors[:NEWCOMER] == ["", ""]
    refused = re.match(
        r"ValueError: this worker has no (.+) where the run has .* by now, which a newc", errors[NEWCOMER]
    )
    assert (named in refused[1] if refused else "") if named else not errors[NEWCOMER]
    every = [outcome.value for outcome in outcomes if outcome.value]
    together = [step for step in every[-1] if all(step in rows and rows[step][0] == len(every) for rows in every)]
    assert len(together) > 3
    for step in together:
        for rows in every:
            assert rows[step][1] == pytest.approx(every[0][step][1], abs=1e-12)


SAVES, SECOND = 20, 19
"""Steps until the first checkpoint, and between it and the last step."""
SAVERS: dict[str, dict[str, Any]] = {
    # A newcomer that hasn't saved would save once more at the end.
    "the last one": {"every_n_train_steps": SAVES, "save_last": True},
    # One that hasn't validated would wait for that, while the members agree whether this is the best.
    "the best one": {"every_n_train_steps": 1, "monitor": "score", "save_top_k": 2},
}


class Scored(Two):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("score", float(self.trainer.global_step))


class Saved(Callback):
    """Members go more and more slowly until the newcomer is there, which comes after the first checkpoint."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._founder = folder, rank != NEWCOMER

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == SAVES:
            (self._folder / "comes").touch()
        # A view is planned by the pace of the last rounds: none is quick.
        if self._founder and not (self._folder / "there").exists():
            seconds = {0: 0.05, 1: 0.15, 2: 1.0}
            time.sleep(seconds[(trainer.global_step >= SAVES) + (trainer.global_step >= SAVES + SECOND // 2)])


def saving(folder: Path, lobby: str, what: str) -> tuple[int, list[str]]:
    rank, end = by_itself(), time.monotonic() + 60
    while rank == NEWCOMER and not (folder / "comes").exists() and time.monotonic() < end:
        time.sleep(0.02)
    elastic = Elastic(lobby=lobby, workers=(2, 3), dead_after=DEAD, host="127.0.0.1")
    saver = ModelCheckpoint(folder / "saved", **SAVERS[what])
    asked = {**QUIET, "enable_checkpointing": True, "max_steps": SAVES + SECOND, "max_epochs": -1}
    trainer = Trainer(
        **asked,
        strategy=GossipStrategy(elastic=elastic, timeout=timedelta(seconds=60)),
        devices=1,
        val_check_interval=SAVES - 2,
        check_val_every_n_epoch=None,
        callbacks=[Saved(folder, rank), There(folder, rank), saver],
    )
    data = TensorDataset(torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    trainer.fit(Scored(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=32))
    return trainer.global_step, sorted(path.name for path in (folder / "saved").iterdir())


@pytest.mark.parametrize("what", SAVERS)
def test_a_newcomer_saves_when_the_members_do(tmp_path: Path, what: str) -> None:
    with LobbyProcess(least=2, most=3) as lobby:
        outcomes = crew(3, saving, tmp_path, lobby.place, what)
    assert [outcome.error for outcome in outcomes] == [""] * 3
    assert (tmp_path / "there").exists()
    assert {outcome.value[0] for outcome in outcomes} == {SAVES + SECOND}


class Once(Callback):
    """Decides by what isn't in its state."""

    done = False

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def on_validation_start(self, *_: Any) -> None:
        if not self.done:
            self.done = True
            self._strategy.reduce_boolean_decision(True)


def deciding(folder: Path, lobby: str) -> int:
    rank, end = by_itself(), time.monotonic() + 60
    while rank == NEWCOMER and not (folder / "comes").exists() and time.monotonic() < end:
        time.sleep(0.02)
    elastic = Elastic(lobby=lobby, workers=(2, 3), dead_after=DEAD, host="127.0.0.1")
    strategy: Any = GossipStrategy(elastic=elastic, timeout=timedelta(seconds=60))
    asked = {**QUIET, "max_steps": SAVES + 2 * SECOND, "max_epochs": -1, "val_check_interval": SAVES - 2}
    callbacks = [Saved(folder, rank), There(folder, rank), Once(strategy)]
    trainer = Trainer(**asked, strategy=strategy, devices=1, check_val_every_n_epoch=None, callbacks=callbacks)
    data = TensorDataset(torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    trainer.fit(Scored(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=32))
    return trainer.global_step


def test_who_decides_by_what_a_newcomer_is_not_given_ends_alone(tmp_path: Path) -> None:
    """In the second validation it asks for a decision, and the members for what they evaluate."""
    with LobbyProcess(least=2, most=3) as lobby:
        outcomes = crew(3, deciding, tmp_path, lobby.place)
    assert [outcome.value for outcome in outcomes] == [SAVES + 2 * SECOND, SAVES + 2 * SECOND, None]
    assert outcomes[NEWCOMER].error.startswith("Unlike: this worker asks the members for a decision, but most ask")
