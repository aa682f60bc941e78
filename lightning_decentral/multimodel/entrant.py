"""One member of a sweep: its words, its folder, and the record there of what became of it."""

import pickle
from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

LOG = "member.log"
RECORD = "member.pkl"


@dataclass(frozen=True)
class Entrant:
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
        """Everything that it prints."""
        return self.folder / LOG

    @property
    def overrides(self) -> list[str]:
        """All its overrides of the task's configuration."""
        return [str(word) for word in self.config.hydra.overrides.task]


def failed(entrant: Entrant, error: BaseException) -> JobReturn:
    """The outcome of a member that ended so."""
    outcome = JobReturn(overrides=entrant.overrides, cfg=entrant.config, status=JobStatus.FAILED)
    outcome._return_value = error
    return outcome


def write_record(entrant: Entrant, outcome: JobReturn) -> None:
    """The outcome into the member's folder, whole or not at all."""
    entrant.folder.mkdir(parents=True, exist_ok=True)
    new = entrant.folder / f".{RECORD}"
    new.write_bytes(_packed(entrant, outcome))
    new.replace(entrant.folder / RECORD)


def _packed(entrant: Entrant, outcome: JobReturn) -> bytes:
    """What can't be packed, or not unpacked, is replaced by an error that says so."""
    try:
        packed = pickle.dumps(outcome)
        pickle.loads(packed)
    except Exception as error:
        value = outcome._return_value
        kind = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else f"returned {value!r:.200}"
        return pickle.dumps(failed(entrant, RuntimeError(f"{kind} (which can't be sent to the sweep: {error})")))
    return packed


def forget_record(entrant: Entrant) -> None:
    """An earlier run's outcome is not this one's."""
    (entrant.folder / RECORD).unlink(missing_ok=True)


def read_record(entrant: Entrant) -> JobReturn | None:
    """What the folder says became of the member; None: it has not ended."""
    path = entrant.folder / RECORD
    if not path.exists():
        return None
    outcome: JobReturn = pickle.loads(path.read_bytes())
    return outcome


def width_of(config: DictConfig) -> int:
    """trainer.devices where that is a number or a list; otherwise 1."""
    try:
        devices: object = OmegaConf.select(config, "trainer.devices")
    except OmegaConfBaseException:  # a trainer of another kind
        return 1
    if isinstance(devices, ListConfig):
        return max(1, len(devices))
    return max(1, devices) if isinstance(devices, int) else 1
