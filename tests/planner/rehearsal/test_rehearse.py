"""Rehearsals as users ask for them: Lightning's batches, rates by halving, the clock, what is recommended."""

import json
import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral import GossipStrategy
from lightning_decentral.cli import rehearsing
from lightning_decentral.cli.rehearsing import split
from lightning_decentral.planner.candidates import BASELINE
from lightning_decentral.planner.forecasts import strategy_of
from lightning_decentral.planner.noise import NoiseScale, steps_ratio
from lightning_decentral.planner.rehearsal import Answer, Reached, rehearse
from lightning_decentral.planner.rehearsal.answer import cells
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.evaluation import PAIRED, HeldOutEvaluation
from lightning_decentral.planner.rehearsal.jobs import Ask, RehearsalJob, rehearsed
from lightning_decentral.planner.rehearsal.loop_settings import LoopSettings
from lightning_decentral.planner.rehearsal.rehearse import METHODS, Clock, RehearsalRun, _fitted
from lightning_decentral.planner.rehearsal.search import (
    OutOfTime,
    SearchCourse,
    beyond,
    reached,
    rungs,
    search,
    smoothed,
    updates,
)
from lightning_decentral.planner.rehearsal.turns import CPU
from lightning_decentral.planner.rehearsal.worker import copies_of
from lightning_decentral.recipes import command as cli
from lightning_decentral.shared.plan.profile import Profile, write
from tests.gossip.test_lightning import Inspect, seen
from tests.settings import links, model
from tests.tiny import QUIET, in_processes

GOSSIP = "strategy=gossip strategy/topology=ring"


class Line(LightningModule):
    """Least squares with noise from each worker's own numbers, and a schedule of epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return (self.layer(x + 0.01 * torch.randn_like(x)) - y).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)]


class Quiet(Line):
    """Without noise."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.layer(batch[0]) - batch[1]).square().mean()


def loader(examples: int = 48) -> DataLoader[Any]:
    x = torch.randn(examples, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)


def fit(folder: Path) -> None:
    seed_everything(3, workers=True, verbose=False)
    strategy = GossipStrategy(start_method="fork")
    trainer = Trainer(**QUIET, max_steps=20, devices=2, strategy=strategy, callbacks=[Inspect(folder)])
    trainer.fit(Line(), loader())


def test_epochs_of_lightnings_loaders_have_the_same_bits(tmp_path: Path) -> None:
    in_processes(fit, tmp_path)  # three epochs of six batches, and two more
    seed_everything(3, workers=True, verbose=False)
    with Crew(Line(), copies_of(loader()), GossipStrategy(), 2, 20) as crew:
        crew.train(20)
        crew.release()
    for real, worker in zip(seen(tmp_path, 2), crew.workers, strict=True):
        assert torch.equal(real["own"]["layer.weight"], worker.module.state_dict()["layer.weight"])


def test_the_rate_that_learns_is_found_and_ddp_is_compared() -> None:
    found = rehearse(
        Line(), loader(), workers=[2], target=0.05, methods=[GOSSIP], steps=80, rates=(0.001, 5.0, 1000.0),
        validation=loader(8), profile=Profile(model(), links(rate=1e7).costs), minutes=5,
    )  # fmt: skip
    assert {(row.overrides, row.rate) for row in found.rows} == {(BASELINE, 5.0), (GOSSIP, 5.0)}
    for row in found.rows:
        assert row.steps is not None
        assert len(row.seeds) == 2
        low, high = row.interval_seconds or (0, 0)
        assert low < row.seconds < high  # type: ignore[operator]
        assert row.seconds == row.steps * row.step_seconds  # type: ignore[operator]
        assert row.step_bytes > 0
    assert found.best is not None
    assert (found.best.seconds or 0) <= 1.1 * min(row.seconds or 0 for row in found.rows)
    assert not found.refused


def test_a_method_that_cant_be_rehearsed_and_one_without_time_are_said() -> None:
    heard: list[str] = []
    words = "strategy=token_pipeline"
    held = loader(8)
    found = rehearse(
        Line(), loader(), workers=[2], target=0.0, methods=[words], steps=10, rates=(1.0,), seeds=1,
        validation=held, say=heard.append,
    )  # fmt: skip
    assert [row.overrides for row in found.rows] == [BASELINE]
    assert list(found.refused.values()) == [
        "TokenPipelineStrategy can't be rehearsed: take gossip, compressed, partial_backprop or ddp"
    ]
    assert heard[0] == "2 trainings: a few steps of each are timed first"
    assert "minutes, at most 10" in heard[1]
    assert "minutes are left" in heard[2]
    late = rehearse(Line(), loader(), workers=[2], target=0.0, steps=10, minutes=1e-9, validation=held)
    assert not late.rows
    assert set(late.refused.values()) == {"the 1e-09 minutes were over: give more minutes"}
    assert late.best is None
    none: list[str] = []
    rehearse(Line(), loader(), workers=[2], target=0.0, steps=10, minutes=1e-9, validation=held, say=none.append)
    assert len(none) == 1  # as no step was timed


def test_halving_gives_all_rates_the_same_steps_first() -> None:
    assert rungs(3, 300) == [100, 200, 300]
    assert updates(3, 300) == 3 * 100 + 2 * 100 + 100
    assert rungs(1, 40) == [40]


def test_a_target_is_reached_where_the_line_through_neighbours_means_crosses_it() -> None:
    points = smoothed([(10.0, 4.0), (20.0, 2.0), (30.0, 0.0)])
    assert points == [(10.0, 4.0), (15.0, 3.0), (25.0, 1.0)]
    assert reached(points, 2.0) == 20
    assert reached(points, 0.5) is None
    assert reached(smoothed([(10.0, float("inf")), (20.0, 1.0), (30.0, 1.0)]), 1.0) == 25


@pytest.mark.filterwarnings("error")  # an overflow is said by numpy in a warning
def test_steps_are_foreseen_along_the_logarithm_and_not_far() -> None:
    points = [(float(step), 5 - math.log(step)) for step in range(10, 210, 10)]
    assert beyond(points, 5 - math.log(250.5)) == 251
    assert beyond(points, 5 - math.log(310)) is None  # more than half as far again
    assert beyond(points, 5.0) == 200  # a line through all would say long ago
    assert beyond([(step, -loss) for step, loss in points], -9.0) is None  # it rises
    assert beyond([(step, 3 - 1e-9 * step) for step, _ in points], 0.0) is None  # it hardly falls
    assert beyond(points[:2], 0.0) is None


def test_noise_of_gradients_is_their_spread_over_their_mean() -> None:
    """Of 4 workers with gradients G + e, 8 numbers, e of variance 9: noise = 72 / |G|^2."""
    chance = torch.Generator().manual_seed(0)
    modules = [nn.Linear(8, 1, bias=False) for _ in range(4)]
    noise = NoiseScale()
    assert noise.scale is None
    for _ in range(3000):
        for module in modules:
            module.weight.grad = 2 + 3 * torch.randn(1, 8, generator=chance)
        noise.see(modules)
    assert noise.scale == pytest.approx(72 / 32, rel=0.05)
    assert steps_ratio(2.0, 2, 4) == 1.5 / 2


def test_a_crews_noise_is_that_of_the_batches_gradients() -> None:
    rows = [torch.eye(4)[:2] * (1 + rank) for rank in range(2)]
    batches = [[rows[rank], torch.ones(2, 1)] for rank in range(2)]
    with Crew(Quiet(), lambda rank: iter([batches[rank]]), strategy_of(BASELINE), 2, 1) as crew:
        crew.train(1)
    mine = torch.tensor([[-1.0, -1, 0, 0], [-2, -2, 0, 0]])  # 2/2 sum_k x_k (0 - 1)
    spread = float((mine - mine.mean(0)).square().sum())
    assert crew.noise.scale == pytest.approx(spread / (float(mine.mean(0).square().sum()) - spread / 2))


def test_workers_that_drift_are_evaluated_one_by_one_too() -> None:
    validation = list(loader(24))
    held = HeldOutEvaluation(Quiet(), validation[:PAIRED])
    course, batches = (
        SearchCourse(10, 0.0, HeldOutEvaluation(Quiet(), validation), lambda: None),
        copies_of(loader()),
    )
    crews: list[Crew] = []

    def make(rate: float) -> Crew:
        crews.append(Crew(Quiet(), batches, GossipStrategy(), 2, 10, loop=LoopSettings(rate=rate)))
        return crews[-1]

    found = search(make, [1.0], course)
    alone = [held.loss([worker.module]) for worker in crews[0].workers]
    assert found.excess == sum(alone) / 2 - held.loss([worker.module for worker in crews[0].workers])
    assert found.excess != 0
    assert found.noise is None


def test_held_out_loss_is_that_of_the_mean_model_and_changes_nothing() -> None:
    x, y = next(iter(loader(8)))
    rows = [torch.ones(1, 4), torch.tensor([[1.0, 1.0, 1.0, 3.0]])]
    models = [Quiet(), Quiet()]
    for model_, weight in zip(models, rows, strict=True):
        model_.layer.weight.data = weight.clone()
    state = torch.get_rng_state()
    found = HeldOutEvaluation(models[0], [[x, y]]).loss(models)
    assert found == pytest.approx(float((x @ torch.tensor([1.0, 1.0, 1.0, 2.0]) - y[:, 0]).square().mean()))
    assert torch.equal(models[0].layer.weight, rows[0])
    assert models[0].training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:worker")
def test_a_method_that_diverges_is_said() -> None:
    asked: dict[str, Any] = {"target": 0.0, "methods": [GOSSIP], "steps": 40, "rates": (1e6,), "seeds": 1}
    found = rehearse(Line(), loader(), workers=[2], validation=loader(8), **asked)
    assert not found.rows
    assert all("its losses end at" in why for why in found.refused.values())
    assert len(found.refused) == 2


def test_without_validation_data_it_is_refused() -> None:
    with pytest.raises(ValueError, match="no validation batches"):
        rehearse(Line(), loader(), workers=[2], target=0.0)


def row(words: str, workers: int, steps: int | None, seconds: float = 1.0) -> Reached:
    return Reached(words, words, workers, 1.0, (steps, steps), 1.0, seconds, 100.0)


def test_the_best_by_workers_and_rate_and_what_is_extrapolated() -> None:
    slow, fast = 1.25e6, 1.25e9
    ddp = replace(row(BASELINE, 4, 100), title="ddp", step_seconds_at={slow: 3.0, fast: 0.1}, noise=4.0)
    other = replace(row(GOSSIP, 4, 120), step_seconds_at={slow: 0.5, fast: 0.1}, extrapolated=True)
    found = Answer(1.0, 200, (ddp, other), {})
    assert [(cell.workers, cell.bytes_per_second, cell.best) for cell in found.cells] == [
        (4, slow, GOSSIP),
        (4, fast, "ddp"),
    ]
    assert found.cells[0].speedup(GOSSIP) == 5
    text = "\n".join(found.sentences())
    assert f"on 4 workers, by the rate of a network card: {GOSSIP} at 10 Mbit/s; ddp from 10 Gbit/s on" in text
    assert "8 workers need 0.75 of the steps of 4" in text
    assert "~ extrapolated, to 1.5 times" in text
    assert other.interval_seconds == pytest.approx((0.83 * 120, 1.46 * 120))
    alone = Answer(1.0, 200, (replace(ddp, seeds=(None,)), other), {})
    assert [cell.speedup(GOSSIP) for cell in alone.cells] == [0, 0]  # nothing to compare with
    assert "learning rates times 1, by extrapolation" in alone.sentences()[-2]


def test_more_workers_that_gain_too_little_dont_pay() -> None:
    rows = row(BASELINE, 4, 100), row(GOSSIP, 4, 95), row(BASELINE, 8, 99), row(GOSSIP, 8, 93)
    found = Answer(1.0, 200, rows, {})
    assert found.best == rows[0]
    assert "stay with ddp" in " ".join(found.sentences())
    assert "more workers than 4 don't pay" in " ".join(found.sentences())
    better = Answer(1.0, 200, (*rows[:3], row(GOSSIP, 8, 50)), {})
    assert better.best == row(GOSSIP, 8, 50)
    assert better.speedup(better.rows[3]) == 99 / 50
    one = Reached(GOSSIP, GOSSIP, 4, 1.0, (50, 60), 1.0, 2.0, 100.0)
    assert (one.steps, one.seconds) == (55, 110)
    assert one.interval_seconds == pytest.approx((0.94 * 100, 1.35 * 120))
    assert Reached(GOSSIP, GOSSIP, 4, 1.0, (50, None), 1.0, 2.0, 100.0).seconds is None
    nobody = Answer(1.0, 200, (row(BASELINE, 4, None),), {})
    assert nobody.best is None
    assert "no method reached 1" in nobody.sentences()[-1]
    unknown = Answer(1.0, 200, (*rows[:2], replace(row(GOSSIP, 8, None), trained=150)), {}).sentences()
    assert "on 8 workers no method reached 1 in 150 steps" in unknown
    assert "don't pay" not in " ".join(unknown)


def test_without_a_network_or_with_nothing_rehearsed_there_is_one_error(tmp_path: Path) -> None:
    write(Profile(model(), ()), tmp_path / "profile.json")
    asked = ["rehearse", "recipe=none", "workers=2", "--profile", str(tmp_path / "profile.json"), "--target", "9"]
    with pytest.raises(SystemExit) as before:  # before the recipe is read, which isn't there
        cli.main(asked)
    assert "nothing was measured between nodes" in str(before.value)
    with pytest.raises(ValueError, match="nothing was measured between nodes"):
        rehearse(Line(), loader(), workers=[2], target=0.0, validation=loader(8), profile=Profile(model(), ()))
    with pytest.raises(SystemExit, match=r"--bandwidth needs --profile, .* `lightning-decentral profile recipe=vit`"):
        cli.main(["rehearse", "recipe=vit", "workers=2", "--target", "9", "--bandwidth", "1gbit"])


def test_a_rehearsal_of_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = {"ddp on 2 workers": "no", "gossip on 2 workers": "no"}
    monkeypatch.setattr(rehearsing.rehearsal, "rehearse", lambda *given, **options: Answer(9.0, 10, (), refused))
    with pytest.raises(SystemExit) as nothing:
        cli.main(["rehearse", "recipe=vit", "workers=2", "--target", "9"])
    assert "none of 2 methods was rehearsed: no" in str(nothing.value)
    assert Answer(9.0, 10, (), refused).sentences()[-1].endswith("no method was rehearsed")


def test_where_no_method_reaches_the_target_the_table_is_shown_and_it_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Answer(9.0, 10, (row(BASELINE, 2, None), row(GOSSIP, 2, None)), {})
    monkeypatch.setattr(rehearsing.rehearsal, "rehearse", lambda *given, **options: found)
    with pytest.raises(SystemExit) as nothing:
        cli.main(["rehearse", "recipe=vit", "workers=2", "--target", "9"])
    assert str(nothing.value) == (
        "error: no seconds to the target are known: no method reached 9 in 10 steps: give a higher --target, or more "
        "--steps and --minutes"
    )
    assert capsys.readouterr().out.count("not reached in 10") == 2


def test_the_minutes_of_the_command_begin_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports, data and the plan that names the methods take of them, too."""
    assert Clock(10, begun=monotonic() - 9 * 60).rest == pytest.approx(60, abs=5)
    given: dict[str, Any] = {}

    def first(overrides: list[str]) -> Any:
        given["reads"] = monotonic()
        return split(overrides)

    def rehearsal(*_: object, **options: Any) -> None:
        given.update(options)
        raise ValueError("seen")

    monkeypatch.setattr(rehearsing, "split", first)
    monkeypatch.setattr(rehearsing.rehearsal, "rehearse", rehearsal)
    start = monotonic()
    with pytest.raises(SystemExit, match="seen"):
        cli.main(["rehearse", "recipe=vit", "workers=2", "--target", "9"])
    assert start <= given["begun"] <= given["reads"]


def test_a_turn_ends_with_its_share_and_what_was_trained_is_kept() -> None:
    clock = Clock(60)
    clock.turn(0.5)
    clock.tick()
    clock.turn(-1.0)
    with pytest.raises(OutOfTime):
        clock.tick()
    marks = count()

    def tick() -> None:
        if next(marks) >= 5:
            raise OutOfTime

    course = SearchCourse(20, 0.0, HeldOutEvaluation(Line(), list(loader(8))), tick)
    ask = Ask(Line(), loader(), course, (1.0,), 2, 20, None, None, 1, None, CPU)
    row, _ = rehearsed(ask, RehearsalJob(2, METHODS[0]), None)
    assert (row.trained, len(row.seeds), row.steps) == (5, 1, None)
    found = Answer(0.0, 20, (row,), {})
    assert cells(found, row)[3] == "not reached in 5"
    assert "ddp on 2 workers: 5 of 20 steps, as time was over" in found.sentences()
    assert not replace(row, trained=20).cut(20, 0.0)
    assert not replace(row, curve=((5.0, 0.0),)).cut(20, 0.0)  # at the target


def test_rates_of_unequal_length_are_compared_where_all_have_a_mark() -> None:
    """Time is over early in the second rate, which learns faster."""
    marks = count()

    def tick() -> None:
        if next(marks) >= 9:
            raise OutOfTime

    def make(rate: float) -> Crew:
        return Crew(Quiet(), batches, strategy_of(BASELINE), 2, 40, loop=LoopSettings(rate=rate))

    batches = copies_of(loader())
    found = search(make, (0.5, 1.0, 2.0), SearchCourse(40, 0.0, HeldOutEvaluation(Quiet(), list(loader(8))), tick))
    assert (found.rate, found.trained, found.rates) == (1.0, 4, 2)


def test_steps_that_are_planned_anew_are_reported_so() -> None:
    heard: list[str] = []
    course = SearchCourse(20, 0.0, HeldOutEvaluation(Line(), list(loader(8))), lambda: None)
    ask = Ask(Line(), loader(), course, (1.0,), 1, 20, None, None, 1, None, CPU)
    job = RehearsalJob(2, METHODS[0])
    RehearsalRun(ask, Clock(1.0), heard.append)._one(job, {job: 1e3}, 1)
    assert heard[-1] == "  10 of 20 steps were planned in the minutes left"


def test_minutes_that_are_too_few_are_said_with_what_would_fit() -> None:
    heard: list[str] = []
    course = SearchCourse(100, 0.0, HeldOutEvaluation(Line(), []), lambda: None)
    ask = Ask(Line(), None, course, (1.0,), 1, 100, None, None, 1, None, CPU)
    jobs = [RehearsalJob(count, method) for count in (2, 8) for method in METHODS[:2]]
    half = dict.fromkeys(jobs[:2], 0.5)
    fitted = _fitted(ask, half, Clock(1.0), heard.append)
    assert fitted.course.steps == 53
    few = "can't be reached in 1 minutes; would fit: "
    assert heard[-1] == f"a target that needs more than 53 steps {few}minutes=2"
    _fitted(ask, half | dict.fromkeys(jobs[2:], 2.0), Clock(2.0), heard.append)
    many = "can't be reached in 2 minutes; would fit: minutes=10, or 2 of the 4 trainings, workers=2"
    assert heard[-1] == f"a target that needs more than 21 steps {many}"
    _fitted(ask, dict.fromkeys(jobs[2:], 1.0), Clock(1.0), heard.append)
    assert heard[-1] == f"a target that needs more than 26 steps {few}minutes=4, or about 2 workers"
    assert _fitted(ask, dict.fromkeys(jobs[2:], 9.0), Clock(1.0), heard.append).course.steps == 10
    assert heard[-1] == "not even 10 steps of each fit: each method ends with its share of the minutes"


def test_timing_ends_with_its_share_of_the_minutes_and_the_others_are_estimated() -> None:
    heard: list[str] = []
    course = SearchCourse(20, 0.0, HeldOutEvaluation(Line(), list(loader(8))), lambda: None)
    run = RehearsalRun(Ask(Line(), loader(), course, (1.0,), 1, 20, None, None, 1, None, CPU), Clock(1.0), heard.append)
    run._clock._begun -= 30
    one = run._step_seconds(RehearsalJob(2, METHODS[0]))
    assert one > 0, "one is timed at least"
    assert run._step_seconds(RehearsalJob(8, METHODS[1])) == 4 * one


def test_the_command_answers_with_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(Profile(model(), links(rate=1e8).costs), tmp_path / "profile.json")
    small = ["model.config.hidden_size=16", "model.config.intermediate_size=16", "model.config.num_hidden_layers=1"]
    small += ["model.config.num_attention_heads=2", "data.batch_size=4"]
    words = ["rehearse", "recipe=vit", "strategy=partial_backprop", "workers=2", *small]
    asked = [
        "--profile",
        str(tmp_path / "profile.json"),
        "--target",
        "9",
        "--steps",
        "10",
        "--seeds",
        "1",
        "--method",
        GOSSIP,
        "--json",
    ]
    cli.main([*words, *asked, "--report", str(tmp_path / "page.html")])
    written = (tmp_path / "page.html").read_text()
    assert written.count("<svg") == 4  # the map; over steps, seconds and bytes
    assert 'src="' not in written
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert {tuple(row["seeds"]) for row in found["methods"]} == {(1,)}
    assert found["best"] == "gossip, ring"  # as many steps, and of ddp's messages less is hidden
    assert "strategy=gossip strategy/topology=ring" in found["command"]
    assert found["command"].endswith("trainer.num_nodes=2 trainer.devices=1")
    assert found["command"].count("strategy=") == 1  # the one beside the best would mean nothing
    assert "strategy=partial_backprop is left out: --method" in printed.err
    assert "2 of 2: gossip, ring on 2 workers" in printed.err


def test_workers_are_split_from_the_words() -> None:
    assert split(["recipe=gpt", "workers=4,8"]) == (["recipe=gpt"], [4, 8])
    with pytest.raises(ValueError, match="whole numbers"):
        split(["workers=x"])
