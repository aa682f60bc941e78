"""Reads a checkpoint so that all workers resume alike: each from its own state, or all from the mean."""

import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_decentral.shared.checkpoint import store
from lightning_decentral.shared.checkpoint.saving import CheckpointedStrategy, store_of
from lightning_decentral.shared.compute import cuda, worker_state
from lightning_decentral.shared.compute.worker_state import KEY
from lightning_decentral.shared.wire.meeting.notices import one_line

PRECISION = "parameter precision"
"""Key of `plan()`: the type of parameters, and so of messages in flight. Files of version 0.2 lack it."""


class Distrusted(ValueError):
    """An undamaged file has more than tensors and plain values: loading it would call functions that the file names."""


@dataclass
class Reading:
    """Reads the checkpoint's files for one worker, and decides with all workers what each resumes from."""

    worker: CheckpointedStrategy

    def read(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        path = store.plain(path)
        cuda.give_back()  # as Lightning does: the loaded tensors may need the device's memory
        try:
            io, trusted = self.worker.checkpoint_io, weights_only is False
            checkpoint: dict[str, Any] = io.load_checkpoint(path, weights_only=not trusted)
            kind = type(checkpoint).__name__
            if wrong := self._damage(checkpoint, path) if isinstance(checkpoint, dict) else f"it holds a {kind}":
                raise ValueError(wrong)
        except (FileNotFoundError, IsADirectoryError, PermissionError):
            raise  # these errors name the file already, and it isn't damaged
        except Exception as error:
            reason = one_line(error)
            if isinstance(error, pickle.UnpicklingError) and not trusted:
                if found := _objects(path, error):
                    raise Distrusted(
                        f"the checkpoint {os.fspath(path)} holds {', '.join(found)} in addition to tensors and plain "
                        "values: if you trust the file pass weights_only=False, or name these to "
                        "torch.serialization.add_safe_globals"
                    ) from error
                reason = "it can't be read as tensors and plain values"  # torch's own text has many lines
            wrong = f"{os.fspath(path)} ({reason}): it's damaged or of another kind"
            raise ValueError(f"can't read the checkpoint {wrong}") from error
        return checkpoint

    def _damage(self, checkpoint: dict[str, Any], path: str | Path) -> str | None:
        if not store_of(self.worker, path).sealed:
            return None
        if zipfile.is_zipfile(path):
            _check_sums(path)
        return worker_state.damage(checkpoint)

    def read_together(self, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Read the plain file, or receive it from worker 0 where this node doesn't have it. Collective. Every worker
        raises ValueError if one finds the file damaged, FileNotFoundError if worker 0 doesn't have it."""
        checkpoint, problem, missing = {}, None, False
        try:
            checkpoint = self.read(path, weights_only)
        except FileNotFoundError:
            missing = True
        except (OSError, ValueError) as error:
            # Another checkpoint of this run holds the same objects.
            problem = one_line(error) + ("" if isinstance(error, Distrusted) else _others(path))
        reports = self.worker.gather((problem, missing))
        problems = [p for p, _ in reports if p]
        if problems:
            raise ValueError(problems[0])
        if reports[0][1]:
            raise FileNotFoundError(f"there is no checkpoint {os.fspath(path)}{_others(path)}")
        self._check_same(path, None if missing else checkpoint)
        if any(absent for _, absent in reports):
            whole = self.worker.broadcast(checkpoint)
            return whole if missing else checkpoint
        return checkpoint

    def _check_same(self, path: str | Path, checkpoint: Mapping[str, Any] | None) -> None:
        """Raise ValueError where nodes have different saves under the same name. Collective."""
        mine = None
        if checkpoint is not None:
            mark = checkpoint.get(KEY, {})
            mine = f"step {checkpoint.get('global_step')}, {str(mark.get('digest', 'no digest'))[:8]}"
        found = dict.fromkeys(one for one in self.worker.gather(mine) if one is not None)
        if len(found) > 1:
            raise ValueError(
                f"workers read different checkpoints at {os.fspath(path)} ({' and '.join(found)}): give every worker "
                "the same file, or remove the old one where only worker 0's is meant"
            )

    def misfit(self, mark: Mapping[str, Any]) -> str | None:
        """Return the reason why no worker can resume from its own state; None where all may."""
        size, plan = self.worker.world_size, self.worker.plan()
        if mark.get("version") != worker_state.VERSION:
            return f"written in format {mark.get('version')}, this package reads {worker_state.VERSION}"
        if mark.get("size") != size:
            return f"saved by {mark.get('size')} workers, resumed on {size}"
        saved = mark.get("plan", {})
        if PRECISION in plan:
            saved = {PRECISION: plan[PRECISION], **saved}
        # All keys of both plans: another method's plan has other keys, and its state would be misread.
        differing = [key for key in {**plan, **saved} if saved.get(key) != plan.get(key)]
        by, own = mark.get("strategy"), type(self.worker).__name__
        if differing and by and by != own:
            return f"saved by {by}, whose state {own} can't take"
        return next((f"saved with {key} {saved.get(key)}, this run has {plan.get(key)}" for key in differing), None)

    def read_own(
        self, path: str | Path, mark: Mapping[str, Any], weights_only: bool | None, problem: str | None = None
    ) -> dict[str, Any] | None:
        """Return this worker's own state if every worker can read its own, else None: all start from the mean.
        Collective. `problem`: a reason against own states that this worker knows already."""
        path = store.plain(path)
        target = os.path.realpath(path) if os.path.islink(path) else os.fspath(path)
        name, own = os.path.basename(str(mark.get("folder", ""))), None
        file = store.file(target, self.worker.global_rank, self.worker.world_size, str(mark.get("id")), name)
        if problem is None:
            try:
                own = self.read(file, weights_only)
                problem = self._foreign(own, mark, file)
            except FileNotFoundError:
                problem = f"worker {self.worker.global_rank} can't read its own state {file} (it isn't there)"
            except (OSError, ValueError) as error:
                problem = f"worker {self.worker.global_rank} can't read its own state: {one_line(error)}"
        # All workers or none: training can't go on with the own states of some and the mean on others.
        problems = [p for p in self.worker.gather(problem) if p]
        if problems:
            rank_zero_warn(f"resuming {os.fspath(path)}: {problems[0]}; all workers start from the mean")
            return None
        for key, now in self.worker.changeable().items():
            if (saved := mark.get("changeable", {}).get(key, now)) != now:
                rank_zero_warn(f"resuming {os.fspath(path)}: saved with {key} {saved}, this run continues with {now}")
        rank_zero_info(f"every worker resumes from its own state in {os.path.dirname(file)}")
        return own

    def _foreign(self, own: Mapping[str, Any], mark: Mapping[str, Any], file: str) -> str | None:
        found = own.get(KEY)
        if not isinstance(found, Mapping) or found.get("version") != mark["version"]:
            return f"{file} is of another format"
        if found.get("id") != mark["id"]:
            return f"{file} belongs to another checkpoint"
        if found.get("rank") != self.worker.global_rank:
            return f"{file} is worker {found.get('rank')}'s, not worker {self.worker.global_rank}'s"
        return None


def report_mean(path: str | Path, checkpoint: Mapping[str, Any]) -> None:
    """Warn that this strategy reads the plain file alone, without the own states of the workers that saved it."""
    mark = checkpoint.get(KEY, {})
    if mark.get("id"):
        rank_zero_warn(
            f"resuming {os.fspath(path)}: saved by {mark.get('strategy')} on {mark.get('size')} workers, whose own "
            "states aren't read: training resumes from their mean and worker 0's optimizers"
        )


@contextmanager
def of_this_model() -> Iterator[None]:
    """Raise ValueError in one line where a state_dict doesn't fit the module that it is loaded into."""
    try:
        yield
    except RuntimeError as error:
        first = next(iter([line.strip() for line in str(error).splitlines() if line.strip()][1:2]), error)
        raise ValueError(
            f"the checkpoint is of another model: {first} (build the model with the settings it was saved with)"
        ) from error


def refuse_other_number(checkpoint: Mapping[str, Any], optimizers: Sequence[object]) -> None:
    """Raise ValueError where optimizers of a resumed run would start without their states."""
    saved = len(checkpoint.get("optimizer_states", ()))
    if saved != len(optimizers):
        raise ValueError(
            f"the checkpoint holds the states of {saved} optimizers, this run has {len(optimizers)}: resume one that "
            "was saved with save_weights_only=False by this module, or load its weights alone with load_state_dict"
        )


def _objects(path: str | Path, error: pickle.UnpicklingError) -> list[str]:
    """Return the names of a file's objects other than tensors and plain values; none where the file is damaged."""
    try:
        with fsspec.open(os.fspath(path), "rb") as stream:
            if zipfile.is_zipfile(stream):
                _check_sums(stream)
            stream.seek(0)
            # All of it: the first one alone doesn't show whether to trust the rest.
            found = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
    except zipfile.BadZipFile:
        return []
    except Exception:  # an older format, or an instruction that torch doesn't list
        found = re.findall(r"GLOBAL (\S+)", str(error))
    return [repr(name)[1:-1] for name in sorted(found)]  # a name may hold what a terminal obeys


def _check_sums(file: Any) -> None:
    """Raise BadZipFile where the checksum of the file's pickled part (all but tensors) is wrong."""
    if not torch.serialization.get_crc32_options():
        return
    with zipfile.ZipFile(file) as parts:
        # The digest is among them; it covers the tensors.
        for name in (n for n in parts.namelist() if n.endswith("data.pkl")):
            parts.read(name)


def _others(path: str | Path) -> str:
    """Return text that names the other checkpoints in the folder of an unreadable one."""
    place = store.parent(store.plain(path))
    try:
        files = store.listed(place)
    except Exception:  # whatever a remote file system raises: the other workers wait for this worker's answer
        return ""
    names = [os.path.basename(f) for f in files if f.endswith(".ckpt") and f != os.fspath(path)]
    return f"; {place} also has {', '.join(names[-3:])}" if names else "; there is no other one in its folder"
