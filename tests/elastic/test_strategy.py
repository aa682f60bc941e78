"""Trainers in processes of their own: one is killed, the others go on; one is started and joins."""

import csv
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral.gossip import (
    AllReduce,
    Asynchronous,
    Complete,
    DifferenceCompression,
    Elastic,
    ElasticGossipStrategy,
    Every,
    Gossip,
    GossipStrategy,
    Hypercube,
    Int8,
    Plain,
    PushSum,
    Ring,
    Solo,
    Stream,
    Travel,
)
from tests.elastic import training as elastic_training
from tests.elastic.training import APART, APART_EVERY, EVERY, STEPS, Net
from tests.elastic.wire.lobbies import DEAD, LobbyProcess
from tests.fresh import Script
from tests.standing_in import Launching
from tests.tiny import QUIET

SECONDS = 90.0
PATH = {"PYTHONPATH": os.getcwd()}
FIRST = ("w0", "w1", "w2")


def told(folder: Path, name: str, kind: str) -> list[dict[str, Any]]:
    file = folder / f"{name}.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [line for line in map(json.loads, lines) if line["kind"] == kind]


def until(holds: Callable[[], bool], what: str, running: "Future[tuple[int, str]]") -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert not running.done(), (what, running.result()[1][-4000:])
        assert time.monotonic() < end, what
        time.sleep(0.05)


TORCHRUN_OF_TWO = {
    "TORCHELASTIC_RUN_ID": "1",
    "RANK": "1",
    "GROUP_RANK": "1",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}
TORCHRUN = (str(torch.distributed.run.__file__), "--nnodes=1", "--nproc-per-node=1", "--master-port=0")


def rows(folder: Path, names: Iterable[str]) -> dict[int, dict[str, dict[str, Any]]]:
    found: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for name in names:
        for line in told(folder, name, "step"):
            found[line["step"]][line["name"]] = line
    return found


@pytest.mark.slow
def test_one_is_killed_one_sleeps_the_others_go_on_and_new_ones_join(tmp_path: Path) -> None:
    """Workers of a starter, which starts a lost one again."""
    script = Launching(Path(elastic_training.__file__), (str(tmp_path), "", "", "0"), PATH)
    with ThreadPoolExecutor(1) as waiting:
        running = waiting.submit(script.finish, SECONDS)
        until(lambda: all(len(told(tmp_path, n, "step")) > 12 for n in FIRST), "three train", running)
        last = {name: told(tmp_path, name, "step")[-1] for name in FIRST}
        oldest, sleeper, survivor = sorted(FIRST, key=lambda name: (last[name]["rank"], name))
        os.kill(last[oldest]["pid"], signal.SIGKILL)
        until(lambda: bool(told(tmp_path, "w3", "step")), "a newcomer takes part", running)
        os.kill(last[sleeper]["pid"], signal.SIGSTOP)
        slept = told(tmp_path, sleeper, "step")[-1]
        until(lambda: slept["name"] not in told(tmp_path, survivor, "step")[-1]["members"], "they go on", running)
        os.kill(last[sleeper]["pid"], signal.SIGCONT)
        until(lambda: bool(told(tmp_path, "w4", "step")), "it comes back", running)
        (tmp_path / "joined").touch()
        code, output = running.result()
    assert code == 0, output[-4000:]
    names = [*FIRST, "w3", "w4"]
    assert {f"w{n}" for n in range(9) if told(tmp_path, f"w{n}", "begins")} == set(names)
    ended = {name for name in names if told(tmp_path, name, "end")}
    assert ended == {survivor, "w3", "w4"}
    assert all(told(tmp_path, name, "end")[0]["step"] == STEPS for name in ended)
    found = rows(tmp_path, names)
    for step in found:  # what it did after it woke up nobody heard
        if step > slept["step"]:
            found[step].pop(slept["name"], None)
    assert_mean_kept(found)
    for newcomer in ("w3", "w4"):
        assert_newcomer(tmp_path, newcomer, survivor)
    assert_evaluated_alike(tmp_path, ended, found)
    assert_views_are_known(tmp_path, ended, found)
    assert_watched(found, {line["name"] for name in ended for line in told(tmp_path, name, "step")})
    assert "2 to 3, which may come and go" in output
    final = [torch.load(tmp_path / f"{name}.pt")["x"] for name in ended]
    assert all(torch.equal(x, final[0]) for x in final)
    assert f"lost: localhost:{oldest[1:]} (connection ended)" in output
    assert f"lost: localhost:{sleeper[1:]} (silent for {DEAD:g} s)" in output
    assert "ended by SIGKILL: another one is started" in output or "code 9: another one is started" in output
    assert_one_log(tmp_path / "logs" / "lightning_logs", killed_at=max(last[oldest]["step"], 5))
    assert_resumed(tmp_path, next(tmp_path.glob(f"saved/step={STEPS - 2 * EVERY}.ckpt")))


def assert_one_log(folder: Path, killed_at: int) -> None:
    """The oldest that was killed and the next one wrote into one file."""
    assert [version.name for version in folder.iterdir()] == ["version_0"]
    steps = [int(row["step"]) for row in csv.DictReader((folder / "version_0" / "metrics.csv").open())]
    assert min(steps) < killed_at < max(steps)


def assert_resumed(folder: Path, saved: Path) -> None:
    """By two workers, one of them started by torchrun, from the mean of three."""
    with LobbyProcess(least=2, most=3) as lobby:
        words = [
            (elastic_training.__file__, str(folder), lobby.place, *who, str(saved)) for who in (("e", "5"), ("f", "6"))
        ]
        by_hand = Script(Path(words[0][0]), words[0][1:], PATH, folder)
        torchrun = Launching(Path(TORCHRUN[0]), (*TORCHRUN[1:], *words[1]), PATH, folder)
        for code, output in [
            torchrun.finish(SECONDS),
            by_hand.finish(SECONDS),
        ]:  # the first starts its worker meanwhile
            assert code == 0, output[-4000:]
    found, checkpoint = rows(folder, ["e", "f"]), torch.load(saved, weights_only=False)
    assert sorted(found) == list(range(checkpoint["global_step"] + 1, STEPS + 1))
    for lines in found.values():  # nothing is learnt after so many steps: all stay where the mean was
        assert len(lines) == 2
        for line in lines.values():
            assert line["x"] == checkpoint["state_dict"]["x"].tolist()


MOMENTUM = {"momentum_buffer": Travel()}
WAITS_FOR_NOBODY = Elastic(lobby="127.0.0.1:29400", asynchronous=Asynchronous())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"combine": PushSum()}, r"PushSum isn't compatible with elastic: its state \(last, weight\)"),
        ({"codec": DifferenceCompression(Int8())}, r"Compression\(.*\) isn't compatible with elastic: it sends"),
        ({"states": MOMENTUM, "island": AllReduce(2)}, r"of AllReduce\(.*: leave out states={'momentum_buffer'"),
        (
            {"states": MOMENTUM, "topology": Stream(steps=4, parts=2, inner=Ring())},
            r"with Stream\(.*: leave 'momentum_",
        ),
        ({"states": MOMENTUM, "combine": Gossip(rate=0.2), "delay": 3}, "state 'momentum_buffer' can't be mixed so"),
        ({"topology": Every(9, Complete()), "delay": 9}, "delay=9 isn't compatible with elastic: .* for 8 rounds"),
        ({"exact_steps": 0.3}, "exact_steps=0.3 is a share of the run, whose length depends on who takes part"),
        ({"exact_steps": 3, "elastic": WAITS_FOR_NOBODY}, "exact_steps=3 isn't compatible with asynchronous rounds"),
        ({"states": MOMENTUM, "elastic": WAITS_FOR_NOBODY}, "states=.* isn't compatible with asynchronous rounds"),
        ({"topology": Hypercube()}, "any number of workers up to 16; with 3: "),
        ({"topology": Stream(steps=4, inner=Hypercube(), parts=2)}, "any number of workers up to 16; with 3: "),
    ],
    ids=str,
)
def test_what_cannot_be_elastic_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GossipStrategy(**{"elastic": Elastic(lobby="127.0.0.1:29400"), **options})


def test_the_usual_options_make_an_elastic_strategy() -> None:
    usual = {"codec": Plain(), "island": Solo(), "states": None, "exact_steps": 0, "heals": 2, "topology": Ring()}
    strategy: Any = GossipStrategy(elastic=Elastic(lobby="127.0.0.1:29400"), delay=0, **usual)
    assert type(strategy) is ElasticGossipStrategy
    assert (strategy.delay, strategy.heals, strategy.topology) == (0, 2, Ring())
    assert type(GossipStrategy(**usual)) is GossipStrategy


class Sums(LightningModule):
    """Learns from what it is given; keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, dtype=torch.float64)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)
        self.seen: list[tuple[int, int, list[float]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((self.trainer.current_epoch, self.global_step, batch[0].flatten().tolist()))
        return (self.layer(batch[0]) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@pytest.mark.sampled
@pytest.mark.parametrize("processes", [0, 2])
def test_one_member_trains_as_a_loop_by_hand(tmp_path: Path, processes: int) -> None:
    module, places = Sums(), torch.arange(10, dtype=torch.float64).reshape(10, 1) / 10
    with LobbyProcess(least=1, most=1) as lobby:
        strategy: Any = GossipStrategy(elastic=Elastic(lobby=lobby.place, workers=(1, 1), host="127.0.0.1"))
        trainer = Trainer(**QUIET, strategy=strategy, devices=1, max_epochs=3, accumulate_grad_batches=2)
        trainer.fit(module, DataLoader(TensorDataset(places), batch_size=3, num_workers=processes))
    by_hand = Sums()
    (optimizer,), (scheduler,) = by_hand.configure_optimizers()
    for epoch in range(3):
        rows = module.seen[4 * epoch : 4 * epoch + 4]
        assert [row[:2] for row in rows] == [(epoch, 2 * epoch + step) for step in (0, 0, 1, 1)]
        given = [x for *_, batch in rows for x in batch]
        assert len(given) == 12  # the last batch is filled up
        assert sorted(set(given)) == places.flatten().tolist()
        for pair in (rows[:2], rows[2:]):
            optimizer.zero_grad()
            for *_, batch in pair:
                x = torch.tensor(batch, dtype=torch.float64)[:, None]
                ((by_hand.layer(x) - 1).square().mean() / 2).backward()
            optimizer.step()
        scheduler.step()
    assert torch.equal(by_hand.layer.weight, module.layer.weight)


def test_a_step_past_the_strategy_is_refused() -> None:
    class Bypass(Sums):
        def on_train_batch_end(self, *_: Any) -> None:
            self.optimizers(use_pl_optimizer=False).step()  # type: ignore[union-attr]

    places = torch.arange(6, dtype=torch.float64).reshape(6, 1)
    with LobbyProcess(least=1, most=1) as lobby:
        strategy: Any = GossipStrategy(elastic=Elastic(lobby=lobby.place, workers=(1, 1), host="127.0.0.1"))
        trainer = Trainer(**QUIET, strategy=strategy, devices=1, max_epochs=1)
        with pytest.raises(RuntimeError, match=r"Adam stepped past the strategy.*what self.optimizers\(\)"):
            trainer.fit(Bypass(), DataLoader(TensorDataset(places)))


@pytest.mark.parametrize("hook", ["configure_optimizers", "setup"])
def test_schedules_may_ask_for_the_steps_before_anybody_knows_who_trains(hook: str) -> None:
    steps = list[float]()

    class Asks(Sums):
        def setup(self, stage: str) -> None:
            if hook == "setup":
                steps.append(float(self.trainer.estimated_stepping_batches))

        def configure_optimizers(self) -> Any:
            if hook == "configure_optimizers":
                steps.append(float(self.trainer.estimated_stepping_batches))
            return super().configure_optimizers()

    module = Asks()
    with LobbyProcess(least=1, most=1) as lobby:
        strategy: Any = GossipStrategy(elastic=Elastic(lobby=lobby.place, workers=(1, 1), host="127.0.0.1"))
        trainer = Trainer(**{**QUIET, "limit_train_batches": 0.5}, strategy=strategy, devices=1, max_epochs=2)
        places = torch.arange(10, dtype=torch.float64).reshape(10, 1) / 10
        trainer.fit(module, DataLoader(TensorDataset(places), batch_size=2))
    epoch = 2  # half of five
    assert steps == [2 * epoch]
    assert [row[:2] for row in module.seen] == [(step // epoch, step) for step in range(2 * epoch)]
    first_pass = [x for *_, batch in module.seen[:5] for x in batch]
    assert len(first_pass) == len(set(first_pass))


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        ({"devices": 3}, {}, "devices=3 workers would start, outside of workers=\\(4, 16\\)"),
        ({"devices": 4, "num_nodes": 2}, {}, "without a lobby is for one machine"),
        ({"devices": 1}, {"LOCAL_RANK": "1"}, "without a lobby is for one machine"),
        ({"devices": 1}, TORCHRUN_OF_TWO, "this torchrun has 2 workers and restarts all when one"),
    ],
    ids=["few", "nodes", "elsewhere", "torchrun"],
)
def test_what_starts_no_elastic_workers_says_so(
    options: dict[str, Any], environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    strategy: Any = GossipStrategy(elastic=Elastic(workers=(4, 16)))
    with pytest.raises(ValueError, match=said):
        Trainer(**QUIET, strategy=strategy, **options)


@pytest.mark.parametrize("workers", [(0, 2), (3, 2)])
def test_impossible_numbers_of_workers_are_refused(workers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="LEAST:MOST"):
        Elastic(lobby="127.0.0.1:29400", workers=workers)


def test_one_trainer_is_one_device(tmp_path: Path) -> None:
    strategy: Any = GossipStrategy(elastic=Elastic(lobby="127.0.0.1:1"), start_method="fork")
    trainer = Trainer(**QUIET, strategy=strategy, devices=2, max_steps=1, default_root_dir=tmp_path)
    strategy.connect(module := Net(1))
    module.trainer = trainer
    with pytest.raises(
        ValueError, match=r"is Solo\(.*\), but this Trainer has 2 devices: start a process with Trainer\(devices=1\)"
    ):
        strategy.refuse(Net(1), fitting=True)
    assert trainer.strategy is strategy


def assert_mean_kept(found: dict[int, dict[str, dict[str, Any]]]) -> None:
    kept = 0
    for step in sorted(found):
        now, then = found[step], found.get(step + 1, {})
        views = {tuple(line["members"]) for line in (*now.values(), *then.values())}
        # A newcomer's first step, and whose message was on its way when it came, are of two views.
        if step > APART + 1 and set(now) == set(then) and len(views) == 1 and set(now) == set(*views):
            before, after = (
                torch.tensor([line["x"] for line in of.values()], dtype=torch.float64).mean(0) for of in (now, then)
            )
            torch.testing.assert_close(after, before, rtol=0, atol=1e-12)
            kept += 1
    assert kept > STEPS // 4
    sizes = [len(next(iter(of.values()))["members"]) for _, of in sorted(found.items())]
    after = sizes[sizes.index(3) :]
    assert 2 in after
    assert after[-1] == 3


def assert_newcomer(folder: Path, newcomer: str, other: str) -> None:
    (healed,), (begins,) = told(folder, newcomer, "healed"), told(folder, newcomer, "begins")
    copies = [line["digest"] for name in (*FIRST, "w3") for line in told(folder, name, "copied")]
    assert begins["digest"] in copies
    steps = told(folder, newcomer, "step")
    others = {line["step"]: line for line in told(folder, other, "step")}
    assert steps[0]["step"] > healed["step"]
    shared = 0
    for line in steps:  # schedules, epochs and places are the run's
        theirs = others[line["step"]]
        assert line["rate"] == pytest.approx(theirs["rate"], rel=1e-9)
        told_of = "epoch", "members", "validations"
        assert [line[name] for name in told_of] == [theirs[name] for name in told_of]
        shared += bool(set(line["examples"]) & set(theirs["examples"]))
    assert shared <= 2  # where a pass ends in which somebody was lost, it is filled up


def assert_views_are_known(folder: Path, ended: set[str], found: dict[int, dict[str, dict[str, Any]]]) -> None:
    """Of the whole run, to all that end it; the picture is drawn of them."""
    lines = [line for step in found.values() for line in step.values()]
    entered = {str(int(line["watched"]["view"])): line["members"] for line in lines}
    for name in ended:
        known = told(folder, name, "end")[0]["views"]
        assert list(known) == [str(number + 1) for number in range(len(known))]
        assert known == {**known, **entered}
    assert (folder / "report" / "members.png").read_bytes().startswith(b"\x89PNG")


def assert_watched(found: dict[int, dict[str, dict[str, Any]]], ended: set[str]) -> None:
    for lines in found.values():
        for line in lines.values():
            assert line["watched"]["members"] <= len(line["members"])
    last = max(step for step, lines in found.items() if set(lines) == ended)
    for line in found[last].values():  # the same for a newcomer
        seen = line["watched"]
        assert [seen[name] for name in ("members", "joins", "losses", "delay")] == [3, 2, 2, 1]
        assert seen["view"] in (4, 5)  # on a busy machine a loss and a newcomer come in one view
        assert 2 / 3 < seen["participation"] <= 1
    assert max(line["watched"]["stall_seconds"] for lines in found.values() for line in lines.values()) > DEAD / 2
    measured = [
        list(lines.values())
        for step, lines in found.items()
        if step % APART_EVERY == 0 and set(lines) == set(next(iter(lines.values()))["members"])
    ]
    assert {len(lines) for lines in measured} >= {3}
    for lines in measured:
        assert all(line["apart"] == lines[0]["apart"] for line in lines)
    assert any(line["apart"][0] > 0 for lines in measured for line in lines)


def assert_evaluated_alike(folder: Path, names: Iterable[str], steps: dict[int, dict[str, dict[str, Any]]]) -> None:
    found = defaultdict(list)
    for name in names:
        for line in told(folder, name, "validated"):
            found[line["step"]].append(line)
    whole = [lines for step, lines in found.items() if step > APART and len(lines) == len(lines[0]["members"])]
    assert len(whole) > 5
    for lines in whole:
        assert all((line["x"], line["own"]) == (lines[0]["x"], lines[0]["own"]) for line in lines)
    assert {len(lines) for lines in whole} >= {3}
    saved = sorted(folder.glob("saved/*.ckpt"))
    assert len(saved) in (STEPS // EVERY - 1, STEPS // EVERY)  # the one that was killed may have been about to save
    for file in saved:
        checkpoint = torch.load(file, weights_only=False)
        lines = list(steps[checkpoint["global_step"]].values())
        if {line["name"] for line in lines} == set(lines[0]["members"]):
            mean = torch.tensor([line["x"] for line in lines], dtype=torch.float64).mean(0)
            torch.testing.assert_close(checkpoint["state_dict"]["x"], mean, rtol=0, atol=1e-12)
