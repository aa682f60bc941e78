"""A save is whole or didn't happen: workers are killed at each of their operations, and disks are full."""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral.shared.checkpoint import resuming_replicas as module
from lightning_decentral.shared.checkpoint import store
from lightning_decentral.shared.checkpoint.resuming_replicas import ReplicaCheckpoints, WholeModel
from lightning_decentral.shared.wire.mean import MeanModel
from tests.shared import test_checkpoint

SIZE = 2


class Killed(BaseException):
    """Nothing that a worker does afterwards happens."""


class Meeting:
    """Where the workers, threads of this process, gather; one that is killed breaks it."""

    def __init__(self) -> None:
        self.barrier, self._values = threading.Barrier(SIZE), [None] * SIZE

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self.barrier.wait(20)
        values = list(self._values)
        self.barrier.wait(20)
        return values


class Worker(test_checkpoint.Worker):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__()
        self.global_rank = self.local_rank = rank
        self.is_global_zero = rank == 0
        self._meeting = meeting

    def gather(self, value: Any) -> list[Any]:
        return self._meeting.gather(self.global_rank, value)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.gather(obj)[src]

    def mean_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack(row).mean(0) for row in zip(*self.gather(tensors), strict=True)]

    def checkpoints(self) -> ReplicaCheckpoints:
        mean_model = MeanModel(self.mean_of)
        mean_model.diverged = True
        return ReplicaCheckpoints(self, mean_model, WholeModel())


def together(act: Callable[[Worker], Any]) -> list[Any]:
    """What every worker returns or raises."""
    meeting, results = Meeting(), [None] * SIZE

    def run(rank: int) -> None:
        try:
            results[rank] = act(Worker(rank, meeting))
        except BaseException as error:
            results[rank] = error
            if not isinstance(error, OSError | ValueError):
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"worker {rank}") for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


def save(path: Path, generation: int) -> list[Any]:
    def act(worker: Worker) -> None:
        own = torch.tensor([generation * 10.0 + worker.global_rank])
        worker.checkpoints().save({"state_dict": {"x": own}, "optimizer_states": []}, path, None)

    return together(act)


def load(path: Path) -> list[float]:
    """What every worker goes on from, each with a state of its own."""

    def act(worker: Worker) -> float:
        checkpoints = worker.checkpoints()
        x = float(checkpoints.load(path, None)["state_dict"]["x"])
        assert checkpoints.resuming
        return x

    return together(act)


OPERATIONS = ("replace", "fsync", "unlink", "mkdir", "rmdir")


class Kill:
    """Kills a worker before its k-th operation on the file system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, at: int) -> None:
        self._left, self._victim, self.died = at, f"worker {rank}", False
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == self._victim:
                self._left -= 1
                if self._left < 0:
                    self.died = True
                    raise Killed
            return operation(*args, **kwargs)

        return call


@pytest.fixture(autouse=True)
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "connected", lambda: True)


@pytest.mark.sampled
@pytest.mark.parametrize("names", [("last", "last"), ("step=1", "step=2")], ids=["same name", "new name"])
@pytest.mark.parametrize("rank", range(SIZE))
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path, rank: int, names: tuple[str, str]) -> None:
    outcomes = []
    for at in range(40):
        folder = tmp_path / str(at)
        before, after = (folder / f"{name}.ckpt" for name in names)
        assert save(before, 1) == [None, None]
        with pytest.MonkeyPatch.context() as patch:
            kill = Kill(patch, rank, at)
            save(after, 2)
        newest = after if after.exists() else before
        outcomes.append(load(newest)[0])
        assert load(newest) in ([10.0, 11.0], [20.0, 21.0])
        if names[0] != names[1]:
            assert load(before) == [10.0, 11.0]
        assert save(after, 3) == [None, None]
        assert load(after) == [30.0, 31.0]
        left = sorted(str(p.relative_to(folder)).split(".")[-1] for p in folder.rglob("*") if p.is_file())
        kept = len({before, after})
        assert left == ["ckpt"] * kept + ["state"] * SIZE * kept
        if not kill.died:
            break
    assert not kill.died
    assert at > 2
    # Who makes a folder that both need is a matter of speed, so the k-th operation isn't always the same one.
    assert outcomes[0] == 10.0 or rank > 0
    assert outcomes[-1] == 20.0


class Full:
    """A file on a disk without room."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def write(self, _: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        self._stream.flush()


@pytest.mark.parametrize(("part", "who"), [("worker-0", 0), ("worker-1", 1), ("last.ckpt", 0)])
def test_a_full_disk_is_told_to_all_and_the_old_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, who: int
) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    here = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        full = lambda p, mode: Full(open(p, mode)) if part in p else open(p, mode)  # noqa: E731, SIM115
        patch.setattr(store, "open", full, raising=False)
        errors = save(path, 2)
    for error in errors:
        assert isinstance(error, OSError)
        said = str(error)
        assert said.startswith(f"worker {who} can't write {tmp_path}")
        assert part in said
        assert "No space left on device" in said
        assert "\n" not in said
    assert sorted(tmp_path.rglob("*")) == here
    assert load(path) == [10.0, 11.0]


def test_a_damaged_file_is_the_same_error_on_all(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    path.write_bytes(path.read_bytes()[:-40])
    errors = load(path)
    assert {type(error) for error in errors} == {ValueError}
    assert len({str(error) for error in errors}) == 1


def test_a_worker_whose_file_is_damaged_takes_all_to_the_mean(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path, 1)
    (own,) = (tmp_path / ".workers" / "last").glob("worker-1-*")
    own.write_bytes(own.read_bytes()[:-40])
    found = together(lambda worker: float(worker.checkpoints().load(path, None)["state_dict"]["x"]))
    assert found == [10.5, 10.5]


def test_a_temporary_folder_elsewhere_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert save(tmp_path / "last.ckpt", 1) == [None, None]
