"""Real processes: every way to start them, from the command line, with a hard kill."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.run

from tests import ports
from tests.fresh import Script
from tests.standing_in import Launching

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
from lightning.pytorch import Trainer
import lightning_decentral
from tests.tiny import QUIET, Batches, Net, SizedBatches
from tests.gossip.test_lightning import Inspect

if __name__ == "__main__":
    from pathlib import Path
    folder, strategy, devices, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    module = Net()
    trainer = Trainer(**QUIET, strategy=strategy, devices=devices, max_steps=steps, callbacks=[Inspect(folder)])
    trainer.fit(module, SizedBatches(6))
    if strategy == "gossip":  # must leave the mean where fit put it
        trainer.test(module, SizedBatches(2), verbose=False)
    print("world", trainer.world_size, "rank", trainer.global_rank, flush=True)
    torch.save(module.state_dict(), folder / f"handed-back-{trainer.global_rank}.pt")
    if strategy == "gossip":  # the processes live on: save, train on unequal batches, resume from what was saved
        trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, Inspect)]
        trainer.save_checkpoint(folder / "after.ckpt")
        trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = trainer.current_epoch + 2, -1
        trainer.fit(module, Batches(lengths=(3, 2)))
        trainer.fit(module, Batches(lengths=(4, 2)), ckpt_path=folder / "after.ckpt")
"""


def start(script: Path, *words: str, environment: dict[str, str] | None = None) -> Script:
    """In a process that has the package imported; those that it starts itself don't."""
    return Script(script, words, {"PYTHONPATH": str(ROOT), **(environment or {})}, folder=ROOT)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def assert_mean_of_own(folder: Path, size: int, handed_back: list[int]) -> None:
    own = [torch.load(folder / f"{rank}.pt")["own"] for rank in range(size)]
    assert not torch.equal(own[0]["head.weight"], own[1]["head.weight"]), "the workers were never apart"
    for rank in handed_back:
        state = torch.load(folder / f"handed-back-{rank}.pt")
        mean = torch.stack([o["head.weight"] for o in own]).mean(0)
        torch.testing.assert_close(state["head.weight"], mean)


def run_again_if_torch_aborts(script: Path, *words: str) -> tuple[int, str]:
    """Spawned processes of torch 2.13 sometimes abort in gloo's destructor as they end, under `ddp_spawn` as well."""
    for _ in range(3):
        code, output = start(script, *words).finish(100)
        if "terminate called without an active exception" not in output:
            break
    return code, output


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "handed_back"), [("gossip", [0, 1]), ("gossip_spawn", [0])])
def test_lightning_starts_the_processes(tmp_path: Path, script: Path, strategy: str, handed_back: list[int]) -> None:
    code, output = run_again_if_torch_aborts(script, str(tmp_path), strategy, "2", "5")
    assert code == 0, output[-4000:]
    assert_mean_of_own(tmp_path, 2, handed_back)


@pytest.mark.slow
def test_torchrun_starts_the_processes(tmp_path: Path, script: Path) -> None:
    words = ("--standalone", "--nproc-per-node=2", str(script), str(tmp_path), "gossip", "2", "5")
    torchrun = Launching(Path(torch.distributed.run.__file__), words, {"PYTHONPATH": str(ROOT)}, ROOT)
    code, output = torchrun.finish(100)
    assert code == 0, output[-4000:]
    assert_mean_of_own(tmp_path, 2, [0, 1])


@pytest.mark.slow
def test_slurm_starts_the_processes(tmp_path: Path, script: Path) -> None:
    slurm = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports.free()),
    }
    words = (str(tmp_path), "gossip", "2", "5")
    ranks = [{**slurm, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(2)]
    tasks = [start(script, *words, environment=environment) for environment in ranks]
    for code, output in [task.finish(100) for task in tasks]:
        assert code == 0, output[-4000:]
    assert_mean_of_own(tmp_path, 2, [0, 1])


@pytest.mark.thorough
@pytest.mark.slow
def test_a_sigterm_to_the_command_ends_every_worker(tmp_path: Path, script: Path) -> None:
    process = start(script, str(tmp_path), "gossip", "2", "100000")
    deadline = time.monotonic() + 60
    while not (tmp_path / "1.pt").exists() and time.monotonic() < deadline and process.status(0.1) is None:
        pass
    os.kill(process.pid, signal.SIGTERM)
    code = process.status(60)
    deadline = time.monotonic() + 10
    while (left := alive(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    _, output = process.finish(0)
    assert code == 128 + signal.SIGTERM, output[-4000:]
    assert not left, "a worker outlived the command"


def alive(group: int) -> bool:
    """Whether the process group has a member left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
