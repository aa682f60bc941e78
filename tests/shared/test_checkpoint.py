"""Checkpoints by themselves, of a single worker with files in a folder: what is written, read and refused."""

import shutil
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_decentral.shared.checkpoint import resuming_replicas as module
from lightning_decentral.shared.checkpoint import store
from lightning_decentral.shared.checkpoint.reading import PRECISION
from lightning_decentral.shared.checkpoint.resuming_replicas import ReplicaCheckpoints, WholeModel
from lightning_decentral.shared.compute.worker_state import KEY, digest, sealed
from lightning_decentral.shared.wire.mean import MeanModel


class Worker:
    """One of two workers as far as its files go; the other one says what it is told to."""

    global_rank = local_rank = 0
    world_size = 2
    is_global_zero = True
    cut_off = False
    drifts = keeps = True

    def __init__(self, left: int = 0) -> None:
        self.checkpoint_io = TorchCheckpointIO()
        batches = SimpleNamespace(current=SimpleNamespace(ready=left), is_last_batch=False)
        loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=batches))
        state = SimpleNamespace(fn=TrainerFn.FITTING)
        self.lightning_module: Any = nn.Module()
        self.lightning_module.trainer = SimpleNamespace(state=state, fit_loop=loop, lr_scheduler_configs=[])
        self.codec = "Plain()"
        self.optimizers: list[Any] = []
        self.loaded: dict[str, Any] | None = None

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj

    def gather(self, value: Any) -> list[Any]:
        return [value, (None, False) if isinstance(value, tuple) else None]

    def plan(self) -> dict[str, str]:
        return {"codec": self.codec}

    def changeable(self) -> dict[str, str]:
        return {}

    def rounds(self) -> list[int]:
        return [3]

    def progress_state(self) -> dict[str, Any]:
        return {"in flight": torch.arange(3.0)}

    def load_progress_state(self, state: dict[str, Any]) -> None:
        self.loaded = state


@pytest.fixture(autouse=True)
def two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "connected", lambda: True)


def checkpoints(worker: Worker) -> ReplicaCheckpoints:
    mean_model = MeanModel(lambda tensors: [t + 1 for t in tensors])
    mean_model.diverged = True
    return ReplicaCheckpoints(worker, mean_model, WholeModel())


def saved(folder: Path, worker: Worker, **more: Any) -> Path:
    path = folder / "last.ckpt"
    state = {"state_dict": {"x": torch.tensor([2.0])}, "optimizer_states": [], **more}
    checkpoints(worker).save(state, path, None)
    return path


def own_file(path: Path) -> Path:
    (file,) = (path.parent / ".workers" / path.stem).iterdir()
    return file


def test_the_plain_file_holds_the_mean_and_the_workers_its_own(tmp_path: Path) -> None:
    path = saved(tmp_path, Worker())
    assert torch.load(path, weights_only=True)["state_dict"]["x"].item() == 3.0
    own = torch.load(own_file(path), weights_only=True)
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
    assert not (tmp_path / ".workers").exists()


def _another_size(path: Path, worker: Worker) -> None:
    worker.world_size = 3


def _another_checkpoint(path: Path, worker: Worker) -> None:
    file = own_file(path)
    own = torch.load(file, weights_only=True)
    own[KEY]["id"] = "another"
    own[KEY].pop("digest")
    torch.save(sealed(own), file)


def _another_workers(path: Path, worker: Worker) -> None:
    worker.global_rank = 1
    own_file(path).rename(str(own_file(path)).replace("worker-0", "worker-1"))


def _another_format(path: Path, worker: Worker) -> None:
    torch.save({"x": 1}, own_file(path))


def _another_codec(path: Path, worker: Worker) -> None:
    worker.codec = "Int8()"


def _another_method(path: Path, worker: Worker) -> None:
    worker.plan = dict  # type: ignore[method-assign]


def _no_state(path: Path, worker: Worker) -> None:
    torch.save(torch.zeros(3), own_file(path))


def _damaged(path: Path, worker: Worker) -> None:
    own_file(path).write_bytes(b"no checkpoint")


def _missing(path: Path, worker: Worker) -> None:
    own_file(path).unlink()


@pytest.mark.parametrize(("mischief", "said"), [
    (_another_size, "saved by 2 workers, resumed on 3"),
    (_another_checkpoint, "belongs to another checkpoint"),
    (_another_workers, "is worker 0's, not worker 1's"),
    (_another_format, "is of another format"),
    (_another_codec, r"saved with codec Plain\(\), this run has Int8\(\)"),
    (_another_method, r"saved with codec Plain\(\), this run has None"),
    (_no_state, "it holds a Tensor"),
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


def test_a_file_that_does_not_say_its_precision_is_taken_in_any(tmp_path: Path) -> None:
    path, worker = saved(tmp_path, Worker()), Worker()
    worker.plan = lambda: {"codec": "Plain()", PRECISION: "bf16"}  # type: ignore[method-assign]
    again = checkpoints(worker)
    again.load(path, None)
    assert again.resuming


def test_a_damaged_plain_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match=r"can't read the checkpoint .*last.ckpt .*damaged or of another kind"):
        checkpoints(Worker()).load(path, None)


def test_workers_that_read_different_checkpoints_are_told_so(tmp_path: Path) -> None:
    """A node with a disk of its own may have an older save under the same name."""

    class Beside(Worker):
        def gather(self, value: Any) -> list[Any]:
            return [value, "step 2, 12345678"] if str(value).startswith("step") else super().gather(value)

    path = saved(tmp_path, Worker(), global_step=4)
    with pytest.raises(ValueError, match=r"different checkpoints at .*\.ckpt \(step 4, \w{8} and step 2, 12345678\)"):
        checkpoints(Beside()).load(path, None)


@pytest.mark.sampled
@pytest.mark.parametrize("of", ["mean", "own"])
def test_no_flipped_byte_goes_unnoticed(tmp_path: Path, of: str) -> None:
    """A byte that is flipped is refused, or isn't part of what is loaded (the padding of the archive)."""
    path = saved(tmp_path, Worker())
    file = path if of == "mean" else own_file(path)
    whole, reading, refused = file.read_bytes(), checkpoints(Worker())._reading, 0
    wanted = digest(reading.read(file, None))
    for place in range(0, len(whole), 23):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        with suppress(ValueError):
            assert digest(reading.read(file, None)) == wanted, place
            continue
        refused += 1
    assert refused > 20
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="damaged or of another kind"):
        reading.read(file, None)


def test_the_remedy_for_a_damaged_plain_file_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path, Worker())
    path.rename(tmp_path / "step=4.ckpt")
    path.write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match=r"last.ckpt .*damaged.* also has step=4.ckpt$"):
        checkpoints(Worker()).load(path, None)


class Drawn:
    """An object that a checkpoint holds."""


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match=r".") as refused:
        checkpoints(Worker()).load(path, None)
    return str(refused.value)


def test_only_tensors_and_plain_values_are_loaded_unless_asked_otherwise(tmp_path: Path) -> None:
    odd = {"object": Drawn(), "time": timedelta(1), "place": PurePosixPath("x"), "set": {1, 2}}
    path = saved(tmp_path, Worker(), hyper_parameters=odd)
    names = f"{timedelta.__module__}.timedelta, {PurePosixPath.__module__}.PurePosixPath, {Drawn.__module__}.Drawn"
    assert refusal(path) == (
        f"the checkpoint {path} holds {names} in addition to tensors and plain values: if you trust the file pass "
        "weights_only=False, or name these to torch.serialization.add_safe_globals"
    )
    assert isinstance(checkpoints(Worker()).load(path, False)["hyper_parameters"]["object"], Drawn)
    with torch.serialization.safe_globals([Drawn, timedelta, PurePosixPath]):
        assert checkpoints(Worker()).load(path, None)["hyper_parameters"]["time"] == timedelta(1)


def test_objects_are_named_in_a_file_of_an_older_format_and_where_the_file_cannot_be_opened(tmp_path: Path) -> None:
    class Elsewhere(TorchCheckpointIO):
        def load_checkpoint(self, path: Any, *_: Any, **options: Any) -> Any:
            return super().load_checkpoint(tmp_path / "old.ckpt", **options)

    path, worker = tmp_path / "old.ckpt", Worker()
    torch.save({"time": timedelta(1)}, path, _use_new_zipfile_serialization=False)
    assert "holds datetime.timedelta in addition to" in refusal(path)
    worker.checkpoint_io = Elsewhere()
    with pytest.raises(ValueError, match=r"shop:a.ckpt holds datetime.timedelta in addition to"):
        checkpoints(worker).load("shop:a.ckpt", None)


def test_a_name_that_damage_made_is_damage(tmp_path: Path) -> None:
    path = saved(tmp_path, Worker())
    path.write_bytes(path.read_bytes().replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"))
    assert "damaged or of another kind" in refusal(path)


def test_what_a_terminal_would_obey_is_not_said(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"c" + b"os\nsystem\x1b[1m\n.")
    line = refusal(path)
    assert "holds posix" in line or "os.system" in line, line
    assert line.isprintable()


def test_listings_find_the_plain_file_alone(tmp_path: Path) -> None:
    path = saved(tmp_path, Worker())
    assert list(tmp_path.rglob("*.ckpt")) == [path]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".workers", "last.ckpt"]


def test_names_of_folders_differ_as_the_files_do() -> None:
    names = ["a.ckpt", "a", "a%.ckpt", "a%25", "a.ckpt.ckpt", "a%ckpt.ckpt", "a.pt", "a.pt.ckpt"]
    folders = [store.name_of(f"x/{name}") for name in names]
    assert len(set(folders)) == len(names)
    assert not any(f.endswith(".ckpt") for f in folders)


def test_a_link_leads_to_its_targets_workers_and_goes_alone(tmp_path: Path) -> None:
    path, link = saved(tmp_path, Worker()), tmp_path / "link.ckpt"
    link.symlink_to(path.name)
    again = checkpoints(Worker())
    again.load(link, None)
    assert again.resuming
    again.remove(link)
    assert own_file(path).exists()
    assert not link.is_symlink()


@pytest.mark.parametrize("scheme", store.LOCAL)
def test_a_url_of_the_local_file_system_is_that_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    monkeypatch.chdir(here)
    url, worker = f"{scheme}{there}/last.ckpt", Worker()
    checkpoints(worker).save({"state_dict": {"x": torch.tensor([2.0])}, "optimizer_states": []}, url, None)
    assert sorted(p.name for p in there.iterdir()) == [".workers", "last.ckpt"]
    again = checkpoints(Worker())
    again.load(url, None)
    assert again.resuming
    again.remove(url)
    worker.cut_off = True
    checkpoints(worker).save({"state_dict": {}}, url, None)  # worker 0 by itself, as after an exception
    assert list(there.iterdir()) == [there / "last.ckpt"]
    assert list(here.iterdir()) == []


def test_other_file_systems_are_lightnings_and_their_scheme_is_no_folder() -> None:
    url = "memory://of-this-test.ckpt"
    assert store.folder(url) == "memory://.workers/of-this-test"
    assert store.folder("s3://bucket/x/y.ckpt") == "s3://bucket/x/.workers/y"
    state = {"state_dict": {"x": torch.tensor([2.0])}, "optimizer_states": []}
    checkpoints(Worker()).save(state, url, None)
    again = checkpoints(Worker())
    again.load(url, None)
    assert again.resuming
    again.remove(url)
    assert not any("of-this-test" in name for name in fsspec.filesystem("memory").find("/"))


def test_a_copied_folder_and_a_renamed_file_keep_their_workers(tmp_path: Path) -> None:
    path = saved(tmp_path / "run", Worker())
    shutil.copytree(path.parent, tmp_path / "copy")
    path.rename(path.parent / "best.ckpt")
    for place in (tmp_path / "copy" / "last.ckpt", path.parent / "best.ckpt"):
        again = checkpoints(Worker())
        again.load(place, None)
        assert again.resuming


def test_a_plugin_writes_every_file_and_the_save_before_is_kept(tmp_path: Path) -> None:
    class Plugin(TorchCheckpointIO):
        written: ClassVar[list[str]] = []

        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.written.append(Path(path).name)
            super().save_checkpoint(checkpoint, path, storage_options)

    worker = Worker()
    worker.checkpoint_io = Plugin()
    own = checkpoints(worker)
    for _ in range(4):
        own.save({"state_dict": {"x": torch.tensor([2.0])}, "optimizer_states": []}, tmp_path / "last.ckpt", None)
    assert [name[:6] for name in Plugin.written] == ["worker", "last.c"] * 4
    assert len(list((tmp_path / ".workers" / "last").iterdir())) == 2
    again = checkpoints(worker)
    again.load(tmp_path / "last.ckpt", None)
    assert again.resuming


def test_a_name_that_differs_between_workers_is_worker_0s(tmp_path: Path) -> None:
    worker = Worker()
    worker.broadcast = lambda obj, src=0: (str(tmp_path / "theirs.ckpt"), "id", [])  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="name differs between workers"):
        saved(tmp_path, worker)
    assert (tmp_path / "theirs.ckpt").exists()


def test_a_worker_with_a_folder_of_its_own_writes_there(tmp_path: Path) -> None:
    """As Ray gives one to each, from which it takes the file into its storage."""
    worker = Worker()
    theirs = tmp_path / "theirs" / "last.ckpt"
    worker.broadcast = lambda obj, src=0: (str(theirs), "id", [])  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = saved(tmp_path, worker)
    assert own_file(path).name == "worker-0-of-2.id.state"
    assert not theirs.parent.exists()


def test_what_stands_in_the_way_of_a_workers_file_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / ".workers").write_text("no folder")
    with pytest.raises(OSError, match=r"worker 0 can't write .*\.state \(Not a directory\); the checkpoint before"):
        saved(tmp_path, Worker())


def test_an_old_file_that_cannot_be_removed_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    own, path = checkpoints(Worker()), tmp_path / "last.ckpt"
    state = {"state_dict": {"x": torch.tensor([2.0])}, "optimizer_states": []}
    own.save(state, path, None)
    monkeypatch.setattr(store.Durable, "remove", refuse)
    with pytest.warns(UserWarning, match=r"worker 0 can't remove .*\.state: .*Permission denied"):
        own.save(state, path, None)


def test_removing_takes_the_workers_files_too(tmp_path: Path) -> None:
    path = saved(tmp_path, Worker())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints(Worker()).remove(path)
        checkpoints(Worker()).remove(path)  # another node was faster
    assert list(tmp_path.iterdir()) == []
