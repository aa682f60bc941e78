"""Whole sweeps of a Hydra application, in processes with a hard kill, against Hydra's own launcher."""

import csv
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from inspect import signature
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from hydra.utils import instantiate
from omegaconf import OmegaConf

from hydra_plugins.shard_parallel import _callbacks
from hydra_plugins.shard_parallel.launcher import (
    ARGUMENTS,
    CARRIERS,
    POLICIES,
    ShardParallelConf,
    ShardParallelLauncher,
)
from lightning_decentral.sweep import LRTF, processes
from lightning_decentral.sweep.launcher import slots
from lightning_decentral.sweep.member import (
    RECORD,
    SweepMember,
    begin_record,
    read_record,
    returned,
    width_of,
    write_record,
)
from lightning_decentral.sweep.plan import policy as policies
from lightning_decentral.sweep.processes import attempt, packed, run_member, spawn, spawned
from lightning_decentral.sweep.server import environment
from lightning_decentral.sweep.spase import SpaseCarrier
from lightning_decentral.sweep.time_slicing import Gate
from lightning_decentral.sweep.wire.client import VARIABLE, Admission
from tests.sweep import application
from tests.sweep.application import Tuned
from tests.tiny import in_processes

POLICY_NODES = ConfigStore.instance().repo["hydra"]["launcher"]["policy"]
SHARDED = ("-m", "hydra/launcher=shard_parallel", "hydra.launcher.quantum_seconds=0.001")
LRS = "lr=0.1,0.01,0.001"
# One of the members at a time: its parameters, gradients and optimizer state are 2,832 bytes.
TIGHT = "hydra.launcher.memory_bytes=4000"


def weights(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(path) for path in sorted(folder.glob("sweep/*/weights.pt"))]


@pytest.fixture(scope="module")
def sequential(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sweep by Hydra's basic launcher: one after the other, in one process."""
    folder = tmp_path_factory.mktemp("sequential")
    in_processes(application.run, folder, "-m", LRS)
    return folder


@pytest.mark.sampled
@pytest.mark.parametrize(
    "words", [("hydra.launcher.devices=2",), (TIGHT, "hydra/launcher/policy=round_robin")], ids=str
)
@pytest.mark.usefixtures("entry_points")
def test_an_interleaved_sweep_gives_the_weights_of_the_sequential_one(
    words: tuple[str, ...], sequential: Path, tmp_path: Path
) -> None:
    in_processes(application.run, tmp_path, *SHARDED, LRS, "together=3", *words)
    plain, shared = weights(sequential), weights(tmp_path)
    assert len(plain) == len(shared) == 3
    assert not torch.equal(plain[0]["head.weight"], plain[1]["head.weight"])
    for one, other in zip(plain, shared, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    events = json.loads((tmp_path / "sweep" / "trace.json").read_text())["traceEvents"]
    turns = sorted((event["tid"], event["ts"], event["name"].split("/")[0]) for event in events)
    stretches = [member for (_, member), _ in groupby(turns, key=lambda turn: (turn[0], turn[2]))]
    assert len(stretches) > len(set(stretches)), "nobody gave a device up before its end"
    rows = list(csv.DictReader((tmp_path / "sweep" / "ranking.csv").open()))
    assert [float(row["objective"]) for row in rows] == sorted(float(row["objective"]) for row in rows)
    assert (tmp_path / "sweep" / "gantt.png").stat().st_size > 1000


@pytest.mark.usefixtures("entry_points")
def test_failures_end_nothing_else_and_resume_goes_on_with_them(tmp_path: Path) -> None:
    words = (*SHARDED, "lr=0.1", "fails=once,never", "hydra.sweep.dir=sweep")
    with pytest.raises(RuntimeError, match=r"ArithmeticError: lr=0.1 is unlucky") as failure:
        in_processes(application.run, tmp_path, *words)
    assert "its log: " in str(failure.value)
    logs = [(tmp_path / "sweep" / str(i) / "member.log").read_text() for i in range(2)]
    assert ["unlucky" in log for log in logs] == [True, False]
    returned = in_processes(values, tmp_path, *words, "hydra.launcher.resume=true")
    starts = [(tmp_path / "sweep" / str(i) / "starts").read_text().split() for i in range(2)]
    last = [str(tmp_path / "sweep" / str(i) / "last.ckpt") for i in range(2)]
    assert starts == [["None", last[i]] if i % 2 == 0 else ["None"] for i in range(2)]
    # The unlucky one of the pair trained as the other did, from its checkpoint on.
    assert returned[0::2] == returned[1::2]


@pytest.mark.usefixtures("entry_points")
def test_a_sweep_that_came_in_batches_is_resumed_and_has_one_ranking_and_one_chart(tmp_path: Path) -> None:
    words = (*SHARDED, "lr=0.1", "fails=never,once,never", "hydra.sweep.dir=sweep", "hydra.sweeper.max_batch_size=1")
    with pytest.raises(RuntimeError, match=r"ArithmeticError: lr=0.1 is unlucky"):
        in_processes(application.run, tmp_path, *words)
    folder = tmp_path / "sweep"
    assert not (folder / "2").exists(), "its batch hasn't come"
    assert {row["member"]: row["status"] for row in ranked(folder)} == {"0": "completed", "1": "failed"}
    before = turns(folder)
    in_processes(application.run, tmp_path, *words, "hydra.launcher.resume=true")
    starts = [(folder / name / "starts").read_text().split() for name in "012"]
    assert starts == [["None"], ["None", str(folder / "1" / "last.ckpt")], ["None"]]
    rows = ranked(folder)
    assert {row["member"]: row["status"] for row in rows} == dict.fromkeys("012", "completed")
    assert len({row["objective"] for row in rows}) == 1, "three members of equal words"
    assert {path.name for path in folder.iterdir()} == {
        *"012",
        "ranking.csv",
        "trace.json",
        "gantt.png",
        "multirun.yaml",
    }
    after = turns(folder)
    assert after[: len(before)] == before
    assert {member for member, _, _ in after} == set("012")
    assert all(one[2] <= other[1] for one, other in pairwise(after)), "batch behind batch, as they were"


def ranked(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "ranking.csv").open()))


def turns(folder: Path) -> list[tuple[str, float, float]]:
    """(member, start, finish) of what the chart shows, by start; a microsecond of rounding."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    rounded = [(e["name"].split("/")[0], round(e["ts"]), round(e["ts"] + e["dur"])) for e in events]
    return sorted(rounded, key=lambda turn: turn[1:])


def test_resume_refuses_a_folder_of_other_words_and_a_value_that_cant_travel_says_so(tmp_path: Path) -> None:
    one = member(tmp_path)
    assert read_record(one) is None
    write_record(one, returned(one, JobStatus.COMPLETED, lambda: 0))
    outcome = read_record(one)
    with pytest.raises(RuntimeError, match=r"returned <function .* can't be sent"):
        _ = outcome.return_value
    assert outcome.cfg == {"lr": 1}
    assert list(outcome.hydra_cfg) == ["hydra"]
    other = member(tmp_path, task="lr=2")
    with pytest.raises(ValueError, match=r"overrides lr=1, but this sweep's overrides there are lr=2: resume"):
        read_record(other)
    begin_record(one)  # and is killed: its checkpoint is no other's
    assert read_record(one) is None
    with pytest.raises(ValueError, match=r"overrides lr=1, but this sweep's overrides there are lr=2: resume"):
        read_record(other)


def values(folder: Path, *words: str) -> list[float]:
    """What the sweep's members returned, finished earlier or now."""
    application.run(folder, *words)
    return [json.loads((folder / "sweep" / str(i) / RECORD).read_text())["value"] for i in range(2)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def _sleeping(folder: Path) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, wherever the tests run
    with (folder / "output").open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    tempfile.tempdir = str(folder)  # where the folder of its socket is
    application.run(folder, *SHARDED, "lr=1,2", task=application.sleep)


@pytest.mark.sampled
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("entry_points")
def test_a_sweep_that_ends_leaves_nobody_behind(blow: signal.Signals, tmp_path: Path) -> None:
    sweep = multiprocessing.get_context("fork").Process(target=_sleeping, args=(tmp_path,))
    sweep.start()
    try:
        files = [tmp_path / "sweep" / name / "pids" for name in "01"]
        wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        assert all(map(alive, pids))
        (socket,) = tmp_path.glob("sweep-*")
        assert socket.stat().st_mode & 0o777 == 0o700
        os.kill(sweep.pid, blow)
        sweep.join(30)
        assert sweep.exitcode not in (None, 0)
        wait_for(lambda: not any(map(alive, pids)))
        assert not socket.exists(), "its folder is left"
        records = [json.loads(path.read_text()) for path in tmp_path.glob(f"sweep/*/{RECORD}")]
        assert [record["status"] for record in records] == ["UNKNOWN"] * 2, "who was interrupted has not finished"
    finally:
        sweep.kill()


def member(folder: Path, task: str = "lr=1") -> SweepMember:
    return SweepMember("0", (), OmegaConf.create({"lr": 1, "hydra": {"overrides": {"task": [task]}}}), folder)


def test_a_new_interpreter_gets_what_a_copy_has(tmp_path: Path) -> None:
    """As Spawn does it, but for the interpreter."""
    assert in_processes(_as_spawned, tmp_path) == (JobStatus.COMPLETED, 6.0)


def _as_spawned(folder: Path) -> tuple[JobStatus, float]:
    three = 3
    task = lambda cfg: three * cfg.lr  # noqa: E731  # no import finds it

    with initialize(version_base="1.3", config_path=None):
        config = compose("application", ["lr=2"], return_hydra_config=True)
    config.hydra.mode, config.hydra.job.num, config.hydra.job.id = "MULTIRUN", 0, "0"
    config.hydra.sweep.dir = str(folder)
    one = SweepMember("0", ("lr=2",), config, folder / "0")
    context = HydraContext(config_loader=ConfigLoaderImpl(ConfigSearchPathImpl()), callbacks=Callbacks())
    content = packed(partial(run_member, context, task), one)
    lifeline = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=spawned, args=(content, {}, lifeline[0]))
    child.start()
    child.join(30)
    outcome = read_record(one)
    assert outcome is not None, one.log.read_text()
    return outcome.status, outcome.return_value


def test_a_new_interpreter_finds_its_devices_before_it_imports_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports the user's script before it calls anything of ours, and there `torch.cuda` may be asked."""
    seen: list[tuple[str | None, ...]] = []
    names = "CUDA_VISIBLE_DEVICES", "OF_A_MEMBER"

    class Process:
        def __init__(self, **_: Any) -> None: ...
        def start(self) -> None:
            seen.append(tuple(map(os.environ.get, names)))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: SimpleNamespace(Process=Process))
    monkeypatch.setattr(processes, "packed", lambda run, member: b"")
    run: Any = None
    spawn(run, member(tmp_path), {"CUDA_VISIBLE_DEVICES": "1", "OF_A_MEMBER": "x"}, multiprocessing.Pipe(duplex=False))
    assert seen == [("1", "x")]
    assert tuple(map(os.environ.get, names)) == ("0,1", None)


def test_a_program_that_ends_itself_has_failed_with_its_message(tmp_path: Path) -> None:
    def ends(_: SweepMember) -> Any:
        sys.exit("error: no such file")

    write_record(one := member(tmp_path), attempt(one, ends))
    outcome = read_record(one)
    with pytest.raises(ValueError, match=r"^error: no such file$"):  # which a command line shows as it is
        _ = outcome.return_value


def test_hydra_finds_the_launcher_and_every_policy() -> None:
    assert ShardParallelLauncher.__qualname__ in [found.__qualname__ for found in Plugins.instance().discover(Launcher)]
    listed = {name.removesuffix(".yaml") for name in ConfigStore.instance().list("hydra/launcher/policy")}
    classes = {c.__name__ for c in vars(policies).values() if isinstance(c, type) and issubclass(c, policies.Policy)}
    assert listed == set(POLICIES) | (CARRIERS.keys() & ARGUMENTS)
    assert set(POLICIES.values()) == classes - {"Policy"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_made_where_hydra_gives_parts_as_they_are_configured(policy: str) -> None:
    # Of Hydra 1.4: plug-ins are no longer instantiated recursively.
    asked = POLICY_NODES[f"{policy}.yaml"].node
    chosen = OmegaConf.merge(asked, {"metric": "loss", "mode": "min"} if policy == "asha" else {})
    config = OmegaConf.create({"_target_": ShardParallelConf._target_, "policy": chosen})
    for recursive in (True, False):
        launcher = instantiate(config, _recursive_=recursive)
        assert type(launcher._granting[2]).__name__ == POLICIES[policy]


def launching(folder: Path, *words: str) -> None:
    application.run(folder, "-m", "hydra/launcher=shard_parallel", *words)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lr=range(1,1)"], "the sweep is empty"),
        (["hydra/launcher/policy=longest"], "Could not find 'hydra/launcher/policy/longest'(.|\n)*round_robin"),
        (["hydra.launcher.devices=[cuda:7]"], r"devices=\['cuda:7'\]: name each device once, .*those that exist"),
        (["hydra.launcher.resume=true"], "nothing to resume in sweep"),
        (
            ["trainer.devices=1,3", "hydra.launcher.devices=2"],
            "member 1 asks for trainer.devices=3, but the sweep has only cpu:0",
        ),
        (["hydra.launcher.memory_bytes=900"], "at least [0-9,]+ bytes .* more than any device .*strategy=spilled"),
    ],
)
@pytest.mark.usefixtures("entry_points")
def test_what_cant_be_is_said(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=message):
        in_processes(launching, tmp_path, *words)


@pytest.mark.parametrize("policy", ["spase", POLICY_NODES["spase.yaml"].node], ids=["name", "node"])
def test_a_carrier_is_named_or_has_options(policy: Any) -> None:
    launcher = ShardParallelLauncher(policy, devices=["cpu"])
    carrier = launcher._carrier(*launcher._granting)
    assert (type(carrier).__name__, carrier.devices) == ("SpaseCarrier", ("cpu:0",))
    arguments = signature(SpaseCarrier).parameters
    assert {name: arguments[name].default for name in ARGUMENTS["spase"]} == ARGUMENTS["spase"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "longest"}, "policy=longest: choose one with hydra/launcher/policy=..., of lrtf, srtf"),
        ({"devices": 0}, "hydra.launcher.devices=0: a sweep needs at least 1"),
        ({"memory_bytes": 0}, "memory_bytes=0: give each device at least 1"),
        ({"quantum_seconds": 0.0}, "quantum_seconds=0.0: use more than 0"),
        ({"alive_per_device": 0}, "hydra.launcher.alive_per_device must be at least 1 member, got 0"),
    ],
)
def test_what_no_launcher_can_be_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ShardParallelLauncher(**{"policy": LRTF(), **options}).launch([], 0)


def test_a_trainer_wider_than_its_grant_is_an_error() -> None:
    trainer: Any = SimpleNamespace(world_size=2)
    with pytest.raises(ValueError, match=r"trainer\.devices=2 is larger than the 1 device\(s\) granted"):
        Gate(Admission("", "0")).setup(trainer, Tuned(0.1, 0.0), "fit")


@pytest.mark.usefixtures("entry_points")
def test_a_launcher_without_multirun_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"launches sweeps only: add --multirun \(-m\)"):
        in_processes(application.run, tmp_path, "hydra/launcher=shard_parallel")


def test_a_trainer_outside_of_sweeps_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert _callbacks.callbacks() == []
    assert _callbacks.VARIABLE == VARIABLE


def test_devices_by_number_and_by_name() -> None:
    assert slots(2, gpus=0) == ("cpu:0", "cpu:1")
    assert slots(None, gpus=0) == ("cpu:0",)
    assert slots(None, gpus=2) == ("cuda:0", "cuda:1")
    assert slots(["cuda:1", "cpu"], gpus=2) == ("cuda:1", "cpu:1")
    for wrong in (0, 3, ["cuda:0", "cuda:0"], ["tpu:0"], []):
        with pytest.raises(ValueError, match=r"hydra\.launcher\.devices"):
            slots(wrong, gpus=2)
    assert environment(["cuda:1"], {"CUDA_VISIBLE_DEVICES": "4,6"}) == {"CUDA_VISIBLE_DEVICES": "6"}
    assert environment(["cuda:0", "cuda:1"], {}) == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert environment(["cpu:0"], {}) == {}


@pytest.mark.parametrize(
    ("trainer", "width"),
    [
        ({"devices": 2}, 2),
        ({"devices": [0, 1, 2]}, 3),
        ({"devices": "auto"}, 1),
        ({"devices": -1}, 1),
        ({}, 1),
        (None, 1),
    ],
)
def test_the_width_of_a_member_is_what_its_trainer_asks_for(trainer: Any, width: int) -> None:
    assert width_of(OmegaConf.create({"trainer": trainer})) == width


def test_a_configuration_that_was_composed_only_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has set its mode then."""
    config = SimpleNamespace(initialized=lambda: True, get=lambda: SimpleNamespace(mode=None))
    monkeypatch.setitem(sys.modules, "hydra.core.hydra_config", SimpleNamespace(HydraConfig=config))
    assert _callbacks.callbacks() == []
