"""Checkpoints by themselves, of a single worker with files in a folder: what is written, read and refused."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn

from lightning_decentral.shared import checkpoint as module
from lightning_decentral.shared.checkpoint import ReplicaCheckpoints, WholeModel
from lightning_decentral.shared.compute import worker_state
from lightning_decentral.shared.compute.worker_state import KEY
from lightning_decentral.shared.wire.mean import MeanModel


class Worker:
    """One of two workers as far as its files go; the other one says what it is told to."""

    global_rank = local_rank = 0
    world_size = 2
    is_global_zero = True
    alone = False
    drifts = True

    def __init__(self, left: int = 0) -> None:
        self.checkpoint_io = TorchCheckpointIO()
        batches = SimpleNamespace(current=SimpleNamespace(ready=left), is_last_batch=False)
        loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=batches))
        state = SimpleNamespace(fn=TrainerFn.FITTING)
        self.lightning_module: Any = SimpleNamespace(trainer=SimpleNamespace(state=state, fit_loop=loop))
        self.loaded: dict[str, Any] | None = None

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def rounds(self) -> list[int]:
        return [3]

    def progress_state(self) -> dict[str, Any]:
        return {"in flight": torch.arange(3.0)}

    def load_progress_state(self, state: dict[str, Any]) -> None:
        self.loaded = state


@pytest.fixture(autouse=True)
def two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "connected", lambda: True)
    monkeypatch.setattr(module, "gather_world", lambda value: [value, None])


def checkpoints(worker: Worker) -> ReplicaCheckpoints:
    mean_model = MeanModel(lambda tensors: [t + 1 for t in tensors])
    mean_model.apart = True
    return ReplicaCheckpoints(worker, mean_model, worker, WholeModel())


def saved(folder: Path, worker: Worker, **more: Any) -> Path:
    path = folder / "last.ckpt"
    state = {"state_dict": {"x": torch.tensor([2.0])}, "optimizer_states": [], **more}
    checkpoints(worker).save(state, path, None)
    return path


def test_the_plain_file_holds_the_mean_and_the_workers_its_own(tmp_path: Path) -> None:
    path = saved(tmp_path, Worker())
    assert torch.load(path, weights_only=True)["state_dict"]["x"].item() == 3.0
    own = torch.load(worker_state.file(path, 0, 2), weights_only=True)
    assert own["state_dict"]["x"].item() == 2.0
    assert own[KEY]["id"] == torch.load(path, weights_only=True)[KEY]["id"]


@pytest.mark.parametrize("left", [0, 5])
def test_a_worker_goes_on_from_its_own_state_and_random_numbers(tmp_path: Path, left: int) -> None:
    path = saved(tmp_path, Worker(left))
    expected = torch.rand(2)
    worker = Worker()
    again = checkpoints(worker)
    assert again.load(path, None)["state_dict"]["x"].item() == 2.0
    assert again.resuming
    torch.rand(7)
    again.resume()
    if left:  # within an epoch, Lightning draws once more before training starts
        torch.rand(7)
    again.start()
    assert torch.equal(torch.rand(2), expected)
    assert worker.loaded is not None
    assert not again.resuming


def test_weights_alone_have_no_workers_files(tmp_path: Path) -> None:
    path = tmp_path / "weights.ckpt"
    checkpoints(Worker()).save({"state_dict": {"x": torch.tensor([2.0])}}, path, None)
    assert KEY not in torch.load(path, weights_only=True)
    assert not Path(worker_state.folder(path)).exists()


def _another_size(path: Path, worker: Worker) -> None:
    worker.world_size = 3


def _another_checkpoint(path: Path, worker: Worker) -> None:
    file = worker_state.file(path, 0, 2)
    own = torch.load(file, weights_only=True)
    own[KEY]["id"] = "another"
    torch.save(own, file)


def _damaged(path: Path, worker: Worker) -> None:
    Path(worker_state.file(path, 0, 2)).write_bytes(b"no checkpoint")


def _missing(path: Path, worker: Worker) -> None:
    Path(worker_state.file(path, 0, 2)).unlink()


@pytest.mark.parametrize(("mischief", "said"), [
    (_another_size, "saved by 2 workers, resumed on 3"),
    (_another_checkpoint, "belongs to another checkpoint"),
    (_damaged, "can't read its own state"),
    (_missing, "can't read its own state"),
])  # fmt: skip
def test_what_does_not_fit_is_said_and_all_start_from_the_mean(tmp_path: Path, mischief: Any, said: str) -> None:
    worker, path = Worker(), saved(tmp_path, Worker())
    mischief(path, worker)
    again = checkpoints(worker)
    with pytest.warns(UserWarning, match=f"{said}.*all workers start from the mean"):
        assert again.load(path, None)["state_dict"]["x"].item() == 3.0
    assert not again.resuming


def test_a_damaged_plain_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match=r"can't read the checkpoint .*last.ckpt .*damaged or of another kind"):
        checkpoints(Worker()).load(path, None)


def test_a_name_that_differs_between_workers_is_worker_0s(tmp_path: Path) -> None:
    worker = Worker()
    worker.broadcast = lambda obj, src=0: (str(tmp_path / "theirs.ckpt"), "id")  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="name differs between workers"):
        saved(tmp_path, worker)
    assert (tmp_path / "theirs.ckpt").exists()


def test_removing_takes_the_workers_files_too(tmp_path: Path) -> None:
    path = saved(tmp_path, Worker())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints(Worker()).remove(path)
        checkpoints(Worker()).remove(path)  # another node was faster
    assert list(tmp_path.iterdir()) == []
