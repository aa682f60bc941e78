"""What every test may rely on: one thread per process, no network, a device where its marker asks for one."""

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize

# Before torch is imported, and inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import hypothesis
import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero
from lightning_utilities.core.rank_zero import rank_zero_only

from tests import fresh, ports, quick, sampled, world

torch.set_num_threads(1)

# Machines that build are shared, so an example has no deadline of its own: pytest-timeout ends a test that hangs.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

DEVICES = {"gpu": 1, "multigpu": 2}


def pytest_collectstart() -> None:
    """Before any test is imported, and anything forked. What imports and collecting make stays: no collector looks
    through it, again and again, until all is there."""
    gc.disable()
    ports.use()
    fresh.server()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Worlds of threads come last: whoever forks after one may inherit a lock that nobody holds any more, and wait for
    it for ever."""
    items.sort(key=lambda item: item.get_closest_marker("threads") is not None)
    picked = quick.chosen([item.nodeid for item in items])
    for item in items:
        if item.path.parent.name == "plan" or item.nodeid in picked:  # a law, or chosen
            item.add_marker(pytest.mark.quick)
    cases: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            if not hasattr(item, "callspec"):
                raise pytest.UsageError(f"{item.nodeid} is marked sampled and has no cases to choose from")
            cases.setdefault(item.nodeid.partition("[")[0], {})[item.nodeid] = item
    for test in cases.values():
        for name in sampled.left_out({name: item.callspec.params for name, item in test.items()}):
            test[name].add_marker(pytest.mark.thorough)


def pytest_collection_finish() -> None:
    """Nor does one later. Above all those of forked workers don't, each of which would copy half of the parent's memory
    by touching it."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def leaves_no_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes that are killed or end at once tidy nothing up (torch's error files, sockets' folders): all of it goes
    with the session. The folder's name is short, as that of a socket must be."""
    tmp_path_factory.getbasetemp()  # what pytest keeps for a few sessions stays where it was
    before, folder = os.environ.get("TMPDIR"), tempfile.mkdtemp(prefix="tests-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    Finalize(None, shutil.rmtree, (folder, True), exitpriority=-1000)  # after multiprocessing's own, which is in there
    yield
    tempfile.tempdir = None
    os.environ.pop("TMPDIR")
    if before is not None:
        os.environ["TMPDIR"] = before


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """What torch calls the device that a test is run on: "cpu", "cuda", and "cuda" where it is "simulated"."""
    if request.param != "simulated":
        yield request.param
        return
    from tests import simulated

    with simulated.device(seed=1):
        yield "cuda"


LEFT_BY_A_RUN = (
    *("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS"),
)


@pytest.fixture(autouse=True)
def leaves_no_world(request: pytest.FixtureRequest) -> Iterator[None]:
    """A group has threads; its variables would make later tests meet at its port, a seed would shuffle their data."""
    for name in LEFT_BY_A_RUN:
        os.environ.pop(name, None)
    rank_zero_only.rank = 0  # kept for a whole process: another one would silence the warnings of all tests behind it
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        assert world.allowed, "this test made a process group in the tests' own process: mark it with threads"


@pytest.fixture(autouse=True)
def leaves_no_log() -> Iterator[None]:
    """Hydra gives the root logger a console and a file, and importing pytorch_lightning, even while tests are
    collected, makes its logger that of rank_zero_info, for as long as the process lives: later tests would look for
    messages on the other stream."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    rank_zero.log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """AssertionError where a Trainer would start workers."""
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process would start")

    for launcher in (_MultiProcessingLauncher, _SubprocessScriptLauncher):
        monkeypatch.setattr(launcher, "launch", never)


def pytest_runtest_setup(item: pytest.Item) -> None:
    world.allowed = item.get_closest_marker("threads") is not None
    for marker, needed in DEVICES.items():
        found = torch.cuda.device_count()
        if item.get_closest_marker(marker) and found < needed:
            pytest.skip(f"needs {needed} CUDA device(s), this machine has {found}")
