"""Member (job) of a sweep: its words, its folder, and the record there of what became of it."""

import pickle
from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

LOG = "member.log"
RECORD = "member.pkl"


@dataclass(frozen=True)
class SweepMember:
    """What a member is started with.

    Args:
        words: the overrides that make it differ from the others.
        folder: its output folder.
        width: devices that its trainer asks for.
    """

    name: str
    words: tuple[str, ...]
    config: DictConfig
    folder: Path
    width: int = 1

    @property
    def log(self) -> Path:
        return self.folder / LOG

    @property
    def overrides(self) -> list[str]:
        """All its overrides of the task's configuration."""
        return [str(word) for word in self.config.hydra.overrides.task]


def returned(entrant: SweepMember, status: JobStatus, value: object, **more: str | None) -> JobReturn:
    """The outcome of a member that returned, or raised, this value."""
    parts = {part: OmegaConf.masked_copy(entrant.config, _keys(entrant, part)) for part in ("task", "hydra")}
    return JobReturn(entrant.overrides, parts["task"], parts["hydra"], status=status, _return_value=value, **more)


def _keys(entrant: SweepMember, part: str) -> list[str]:
    return [str(key) for key in entrant.config if (key == "hydra") == (part == "hydra")]


def failed(entrant: SweepMember, error: BaseException) -> JobReturn:
    """The outcome of a member that ended so."""
    return returned(entrant, JobStatus.FAILED, error)


def write_record(entrant: SweepMember, outcome: JobReturn) -> None:
    """The outcome into the member's folder, whole or not at all."""
    entrant.folder.mkdir(parents=True, exist_ok=True)
    about = {"task_name": outcome.task_name, "working_dir": outcome.working_dir}
    new = entrant.folder / f".{RECORD}"  # renamed when it is whole: a member may be killed at any moment
    new.write_bytes(_packed(entrant.overrides, outcome.status, outcome._return_value, about))
    new.replace(entrant.folder / RECORD)


def _packed(overrides: list[str], status: JobStatus, value: object, about: dict[str, str | None]) -> bytes:
    """What can't be packed, or not unpacked, is replaced by an error that says so."""
    try:
        packed = pickle.dumps((overrides, status, value, about))
        pickle.loads(packed)  # here, where it fails one member and not the sweep
    except Exception as error:
        kind = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else f"returned {value!r:.200}"
        replaced = RuntimeError(f"{kind} (which can't be sent to the sweep: {error})")
        return pickle.dumps((overrides, JobStatus.FAILED, replaced, about))
    return packed


def forget_record(entrant: SweepMember) -> None:
    """An earlier run's outcome is not this one's."""
    (entrant.folder / RECORD).unlink(missing_ok=True)


def read_record(entrant: SweepMember) -> JobReturn | None:
    """What the folder says became of the member; None: it has not ended.

    Raises:
        ValueError: the folder's member had other overrides.
    """
    path = entrant.folder / RECORD
    if not path.exists():
        return None
    overrides, status, value, about = pickle.loads(path.read_bytes())
    if overrides != entrant.overrides:
        raise ValueError(
            f"{entrant.folder} holds a member that ended with other overrides ({' '.join(overrides)}), not "
            f"{' '.join(entrant.overrides)}: resume a sweep with its own words"
        )
    return returned(entrant, status, value, **about)


def width_of(config: DictConfig) -> int:
    """trainer.devices where that is a number or a list; otherwise 1."""
    try:
        devices: object = OmegaConf.select(config, "trainer.devices")
    except OmegaConfBaseException:  # a trainer of another kind
        return 1
    if isinstance(devices, ListConfig):
        return max(1, len(devices))
    return max(1, devices) if isinstance(devices, int) else 1
