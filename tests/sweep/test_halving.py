"""Sweeps whose worst members are ended early, against trainings of their own and the rule written again."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from hydra_plugins.shard_parallel.launcher import ARGUMENTS, POLICIES
from lightning_decentral.sweep.member import SCORES, read_scores, write_scores
from lightning_decentral.sweep.plan import policy as policies
from lightning_decentral.sweep.plan.policy import Score, Scoreboard
from lightning_decentral.sweep.time_slicing import Scoring
from tests.sweep import application
from tests.sweep.application import Tuned
from tests.sweep.plan.test_halving import survivors
from tests.sweep.test_launcher import member
from tests.tiny import QUIET, SizedBatches, in_processes

LRS = ["0.3", "0.0001", "0.01", "1e-7"]
WORDS = ["-m", "hydra/launcher=shard_parallel", "hydra/launcher/policy=asha", f"lr={','.join(LRS)}", "dropout=0.0"]
# One after the other, so that it is known who comes to a rung first.
ALONE = ["hydra.launcher.alive_per_device=1", "trainer.max_epochs=5"]
RULE = ["hydra.launcher.policy.metric=val_loss", "hydra.launcher.policy.reduction_factor=2"]


class Curve(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.values.append(float(trainer.callback_metrics["val_loss"]))


def curves() -> list[list[float]]:
    """Validation losses of each member, trained to its end and without any sweep."""
    found = []
    for lr in LRS:
        seed_everything(0)
        curve = Curve()
        trainer = Trainer(**{**QUIET, "num_sanity_val_steps": 1}, max_epochs=5, callbacks=[curve])
        trainer.fit(Tuned(float(lr), 0.0), SizedBatches(6), SizedBatches(2))
        found.append(curve.values)
    return found


def scores(folder: Path) -> list[list[float]]:
    files = [json.loads((folder / "sweep" / str(i) / SCORES).read_text()) for i in range(len(LRS))]
    return [[score["value"] for score in file["scores"]] for file in files]


@pytest.mark.thorough
@pytest.mark.usefixtures("entry_points")
def test_the_worst_members_end_early_and_a_resumed_sweep_knows_it(tmp_path: Path) -> None:
    said = in_processes(printed, tmp_path, *WORDS, *ALONE, *RULE, "hydra.sweep.dir=sweep")
    whole = in_processes(curves)
    expected = survivors(whole, [i for i in range(len(LRS)) for _ in range(5)], 1.0, eta=2, least=1)
    assert 1 in expected
    assert 5 in expected
    before = [curve[:length] for curve, length in zip(whole, expected, strict=True)]
    assert scores(tmp_path) == before
    rows = list(csv.DictReader((tmp_path / "sweep" / "ranking.csv").open()))
    assert {row["member"]: row["status"] for row in rows} == {
        str(i): "completed" if length == 5 else "ended early" for i, length in enumerate(expected)
    }
    best = min(range(len(LRS)), key=lambda i: min(before[i]))
    assert said.splitlines()[-1] == f"best: lr={LRS[best]} (val_loss {min(before[best]):.6g})"
    # One that was ended has lost its record: it goes on from its checkpoint, to its next validation and no further.
    early = expected.index(1)
    (tmp_path / "sweep" / str(early) / "member.json").unlink()
    resumed = [*WORDS, *ALONE, *RULE, "hydra.sweep.dir=sweep", "hydra.launcher.resume=true"]
    assert in_processes(printed, tmp_path, *resumed).splitlines()[-1] == said.splitlines()[-1]
    after = scores(tmp_path)
    assert len(after[early]) == 2
    assert [*after[:early], *after[early + 1 :]] == [*before[:early], *before[early + 1 :]]


def printed(folder: Path, *words: str) -> str:
    from contextlib import redirect_stdout
    from io import StringIO

    with redirect_stdout(StringIO()) as text:
        application.run(folder, *words)
    return text.getvalue().strip()


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no ModelCheckpoint monitors one: name a metric with hydra.launcher.policy.metric=val_loss"),
        (
            ["hydra.launcher.policy.metric=accuracy"],
            r"metric=accuracy was not logged when a validation ended \(train_loss, val_loss\)",
        ),
    ],
)
@pytest.mark.usefixtures("entry_points")
def test_a_metric_that_isnt_there_is_said(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=message):
        in_processes(application.run, tmp_path, *WORDS[:3], "lr=0.1", "trainer.max_epochs=1", *words)


class Gate:
    """Writes down what it is told, ends nothing."""

    def __init__(self) -> None:
        self.told: list[Score] = []

    def ends(self, score: Score) -> bool:
        self.told.append(score)
        return False


@pytest.mark.parametrize(
    ("metric", "mode", "told"),
    [(None, None, ("val_loss", "max")), (None, "min", ("val_loss", "min")), ("val_loss", None, ("val_loss", "min"))],
)
def test_what_is_watched_by_default_is_what_the_checkpoint_monitors(
    metric: str | None, mode: str | None, told: tuple[str, str], tmp_path: Path
) -> None:
    gate: Any = Gate()
    callbacks = [Scoring(gate, metric, mode), ModelCheckpoint(tmp_path, monitor="val_loss", mode="max")]
    options = {**QUIET, "enable_checkpointing": True, "num_sanity_val_steps": 1}
    trainer = Trainer(**options, max_epochs=2, callbacks=callbacks)
    trainer.fit(Tuned(0.1, 0.0), SizedBatches(6), SizedBatches(2))
    trainer.validate(Tuned(0.1, 0.0), SizedBatches(2), verbose=False)
    assert [(score.metric, score.mode, score.step) for score in gate.told] == [(*told, 6), (*told, 12)]


class Ending(Gate):
    """Worker 0 is told to end at once; another has no seat to ask."""

    def ends(self, score: Score) -> bool:
        assert os.environ["LOCAL_RANK"] == "0"
        return True


class Steps(Callback):
    """How many each worker has made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (self._folder / str(trainer.global_rank)).write_text(str(trainer.global_step))


def both_end(folder: Path, strategy: str) -> None:
    gate: Any = Ending()
    callbacks = [Scoring(gate, "val_loss", None), Steps(folder)]
    trainer = Trainer(**QUIET, devices=2, strategy=strategy, max_epochs=4, callbacks=callbacks)
    trainer.fit(Tuned(0.1, 0.0), SizedBatches(6), SizedBatches(2))


@pytest.mark.parametrize("strategy", ["ddp_fork", "gossip_fork"])
def test_all_workers_of_a_member_end(strategy: str, tmp_path: Path) -> None:
    in_processes(both_end, tmp_path, strategy)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["6", "6"]


def test_scores_of_a_folder_come_back_and_what_isnt_a_file_of_scores_is_refused(tmp_path: Path) -> None:
    one, board, again = member(tmp_path), Scoreboard(), Scoreboard()
    read_scores(one, again)
    for step, value in ((1, 0.5), (2, float("nan")), (3, float("inf"))):
        board.add("0", Score("loss", "max", step, value))
    board.verdicts["0"] = "too bad"
    write_scores(one, board)
    read_scores(one, again)
    assert repr(again.histories) == repr(board.histories)  # one is no number, which equals nothing
    assert again.verdicts == board.verdicts
    for text in ("", "[]", "{}", '{"scores": [{"metric": 1}], "verdict": null}', '{"scores": [1], "verdict": null}'):
        (tmp_path / SCORES).write_text(text)
        with pytest.raises(ValueError, match=r"scores\.json isn.t a file of a member.s scores .*: remove it"):
            read_scores(one, Scoreboard())


def test_hydras_keys_are_the_policies_arguments() -> None:
    for name, class_name in POLICIES.items():
        node = ConfigStore.instance().load(f"hydra/launcher/policy/{name}.yaml").node
        given = {key: value for key, value in node.items() if key != "_target_"}
        assert given == vars(getattr(policies, class_name)()) == ARGUMENTS.get(name, {})
