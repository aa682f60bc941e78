"""Member (job) of a sweep: its overrides, its folder, and how it ended."""

from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

LOG = "member.log"


@dataclass(frozen=True)
class SweepMember:
    """Settings that a member is started with.

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


def width_of(config: DictConfig) -> int:
    """trainer.devices where that is a number or a list; otherwise 1."""
    try:
        devices: object = OmegaConf.select(config, "trainer.devices")
    except OmegaConfBaseException:  # a trainer of another kind
        return 1
    if isinstance(devices, ListConfig):
        return max(1, len(devices))
    return max(1, devices) if isinstance(devices, int) else 1
