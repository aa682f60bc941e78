"""Hydra launcher `shard_parallel`: Hydra's words become members, a sweep runs them, its end is shown."""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.plan.timeline import chrome_trace, write_chrome_trace
from lightning_decentral.sweep import gantt, ranking
from lightning_decentral.sweep import progress as table
from lightning_decentral.sweep.member import SweepMember, width_of
from lightning_decentral.sweep.plan.arbiter import Arbiter
from lightning_decentral.sweep.plan.devices import slots
from lightning_decentral.sweep.plan.policy import Policy
from lightning_decentral.sweep.plan.scores import Scoreboard
from lightning_decentral.sweep.processes import Fork, Spawn
from lightning_decentral.sweep.record import read_record
from lightning_decentral.sweep.score_file import forget_scores, read_scores
from lightning_decentral.sweep.server import Starts, Sweep

log = logging.getLogger(__name__)

FACTORIES = "lightning.pytorch.callbacks_factory"


class Launch:
    """One batch of a sweeper's jobs.

    Args:
        arbiter: who may use which device.
        alive_per_device: how many members' processes there may be for each device.
        resume: finished members of the folder are not run again.
        checkpoint: where the application's configuration takes a checkpoint to go on from.
        scores: what members said so far, of earlier batches.
    """

    def __init__(
        self, arbiter: Arbiter, *, alive_per_device: int, resume: bool, checkpoint: str, scores: Scoreboard
    ) -> None:
        self._arbiter, self._resume, self._checkpoint, self._scores = arbiter, resume, checkpoint, scores
        self._alive = alive_per_device * len(arbiter.devices)

    def __call__(
        self,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
        job_overrides: Sequence[Sequence[str]],
        initial_job_idx: int,
    ) -> list[JobReturn]:
        """The outcome of each job, in their order.

        Raises:
            ValueError: nothing to run, or a job that no device of this sweep can take.
        """
        if not job_overrides:
            raise ValueError("the sweep is empty: a value list such as optimizer.lr=1e-3,3e-4 has no values")
        setup_globals()
        configure_log(config.hydra.hydra_logging, config.hydra.verbose)
        refuse_without_gate()
        numbered = enumerate(job_overrides, start=initial_job_idx)
        entrants = [_entrant(hydra_context, config, list(words), number) for number, words in numbered]
        entrants = told_apart(entrants)
        for entrant in entrants:
            self._arbiter.refuse_wider(entrant.name, entrant.width)
        for entrant in entrants:
            if self._resume:
                read_scores(entrant, self._scores)
            else:
                forget_scores(entrant)
        done = self._finished(entrants, Path(str(config.hydra.sweep.dir))) if self._resume else {}
        starts = starts_on(self._arbiter.devices)
        outcomes = {**done, **self._run(entrants, done, starts(hydra_context, task_function))}
        self._report(entrants, outcomes, Path(str(config.hydra.sweep.dir)), initial_job_idx)
        return [outcomes[entrant.name] for entrant in entrants]

    def _run(self, entrants: list[SweepMember], done: dict[str, JobReturn], starts: Starts) -> dict[str, JobReturn]:
        left = [entrant for entrant in entrants if entrant.name not in done]
        where = ", ".join(self._arbiter.devices)
        log.info(f"Launching {len(left)} jobs on {where}, {type(self._arbiter.policy).__name__} first")
        for entrant in left:
            log.info(f"\t#{entrant.name} : {' '.join(entrant.words)}")
        with table.LiveTable() as watcher:
            return Sweep(left, self._arbiter, starts, watcher, self._alive, self._scores).run() if left else {}

    def _finished(self, entrants: list[SweepMember], folder: Path) -> dict[str, JobReturn]:
        """Outcomes of earlier; the others are told to go on from their last checkpoint, if they take one."""
        if not any(entrant.log.exists() for entrant in entrants):
            raise ValueError(f"nothing to resume in {folder}: name the sweep's folder with hydra.sweep.dir=...")
        found = {entrant.name: (entrant, read_record(entrant)) for entrant in entrants}
        done = {}
        for name, (entrant, outcome) in found.items():
            if outcome is not None and outcome.status is JobStatus.COMPLETED:
                done[name] = outcome
                log.info(f"\t#{name} : {' '.join(entrant.words)} : finished before")
            else:
                self._go_on(entrant)
        return done

    def _go_on(self, entrant: SweepMember) -> None:
        # Lightning names a further one last-v1.ckpt: the youngest counts.
        last = max(entrant.folder.rglob("last*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
        if last is None or self._checkpoint not in entrant.config:
            reason = "no last.ckpt in its folder" if last is None else f"no key {self._checkpoint} takes one"
            log.info(f"\t#{entrant.name} : {' '.join(entrant.words)} : from its start ({reason})")
            return
        with open_dict(entrant.config):
            entrant.config[self._checkpoint] = str(last)
        log.info(f"\t#{entrant.name} : {' '.join(entrant.words)} : from {last}")

    def _report(self, entrants: list[SweepMember], outcomes: dict[str, JobReturn], folder: Path, first: int) -> None:
        """The ranking, and who ran when, beside the members' folders."""
        end = f"-{first}" if first else ""
        ranked = ranking.standings(entrants, outcomes, self._scores)
        ranking.write_ranking(ranked, folder / f"ranking{end}.csv")
        console = table.LiveTable().console
        console.print(ranking.ranking(ranked))
        spans = self._arbiter.spans()
        write_chrome_trace(chrome_trace(spans, "sweep"), folder / f"trace{end}.json")
        try:
            panels = {"Members of the sweep by device": gantt.bars_of_sweep(spans)}
            gantt.draw(panels, folder / f"gantt{end}.png")
        except ValueError as error:
            log.info(f"no gantt.png: {error}")
        log.info(f"ranking, trace and Gantt chart: {folder}")
        for entrant in entrants:
            if outcomes[entrant.name].status is JobStatus.FAILED:
                log.error(f"member {entrant.name} ({' '.join(entrant.words)}) failed, its log: {entrant.log}")
        if (best := ranking.best_line(ranked)) is not None:
            console.print(best, markup=False, highlight=False, soft_wrap=True)


def arbiter_of(
    devices: int | Sequence[str] | None, memory_bytes: int | None, policy: Policy, quantum_seconds: float
) -> Arbiter:
    """The arbiter of a launcher's configuration, on this machine.

    Raises:
        ValueError: a value that can't be.
    """
    if memory_bytes is not None and memory_bytes < 1:
        raise ValueError(
            f"hydra.launcher.memory_bytes={memory_bytes}: give each device at least 1, or null for no limit"
        )
    if not quantum_seconds > 0:
        raise ValueError(f"hydra.launcher.quantum_seconds={quantum_seconds}: use more than 0")
    names = slots(devices, cuda.device_count())
    on_gpus = any(name.startswith("cuda") for name in names)
    return Arbiter(policy, names, memory_bytes=memory_bytes, pinned=on_gpus, quantum_seconds=quantum_seconds)


def refuse_without_gate() -> None:
    """ValueError where no member would ever ask for its device."""
    if not entry_points(group=FACTORIES, name="shard_parallel"):
        raise ValueError(
            f"lightning-decentral was installed before it had the entry point {FACTORIES}: run pip install again"
        )


def told_apart(entrants: Sequence[SweepMember]) -> list[SweepMember]:
    """The entrants with those of their words that not all of them have."""
    shared = set.intersection(*(set(entrant.words) for entrant in entrants)) if len(entrants) > 1 else set()
    kept = [tuple(word for word in entrant.words if word not in shared) for entrant in entrants]
    return [replace(entrant, words=words) for entrant, words in zip(entrants, kept, strict=True)]


def starts_on(devices: Sequence[str]) -> type[Fork] | type[Spawn]:
    """How members on these devices come to be."""
    return Spawn if _must_spawn(devices) else Fork


def _must_spawn(devices: Sequence[str]) -> bool:
    # A copy of this process has none of its threads, and can't use a GPU that this process has asked about.
    tasks = Path("/proc/self/task")  # threads of libraries, too, of which `threading` knows nothing
    alone = len(os.listdir(tasks)) == 1 if tasks.exists() else False
    return not alone or threading.active_count() > 1 or any(name.startswith("cuda") for name in devices)


def _entrant(hydra_context: HydraContext, config: DictConfig, words: list[str], number: int) -> SweepMember:
    """The job of these overrides, as Hydra's basic launcher would run it."""
    one = hydra_context.config_loader.load_sweep_config(config, words)
    with open_dict(one):
        one.hydra.job.id, one.hydra.job.num = str(number), number
    with _as_hydra_config(one):
        folder = Path(str(one.hydra.sweep.dir)) / str(one.hydra.sweep.subdir)
    return SweepMember(str(number), tuple(filter_overrides(words)), one, folder.absolute(), width_of(one))


@contextmanager
def _as_hydra_config(config: DictConfig) -> Iterator[None]:
    """Names of folders may ask for ${hydra:...}."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before
