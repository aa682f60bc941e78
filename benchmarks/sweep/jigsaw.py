"""Two partial-backprop jobs of two workers each on two cores: JigSaw's turns against other ways to share them.

    python benchmarks/sweep.py jigsaw

Each job is a Trainer with `PartialBackpropStrategy` and the depths of `Staircase`: worker 0 trains the upper half of
twelve equal blocks, worker 1 all. A device is one core with one thread. Compared are

    one after the other   a job has both cores until it is through; the half-deep worker's core waits in every iteration
    time slices           both at once, worker r of each on core r, as ranks are placed by default; the system slices
    time slices, free     both at once, the system may move workers between cores: what a GPU's processes can't do
    complementary         both at once, the half-deep worker of one beside the deep one of the other; the system slices
    jigsaw                the same places, and a core runs one piece at a time: `hydra.launcher.policy=jigsaw`

Seconds are from the moment at which all workers have warmed up to the end of the last one's last iteration. A piece is
forward and backward; the wait for the other worker's gradients and the update (about five percent) happen outside of a
turn, beside the other job's piece. All ways train the same: each job's weights must be equal bit by bit at the end.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from common.paths import RESULTS

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hydra.core.utils import JobReturn, JobStatus
from lightning.pytorch import Callback, Trainer
from omegaconf import OmegaConf
from rich.console import Console
from rich.markdown import Markdown
from torch import Tensor

from common.hardware import description, sentence, slug
from lightning_decentral import PartialBackpropStrategy
from lightning_decentral.partial import Blocks, Staircase
from lightning_decentral.shared.compute.device import Turn
from lightning_decentral.sweep.member import SweepMember, returned
from lightning_decentral.sweep.plan.gang_arbiter import GangArbiter
from lightning_decentral.sweep.plan.gangs import ComplementaryPairing, Gang, Turns, Unaware
from lightning_decentral.sweep.processes import fork
from lightning_decentral.sweep.progress import LiveTable
from lightning_decentral.sweep.server import Sweep
from partial.cost import BLOCKS, WIDTH, Chain

JOBS, WORKERS, WARM_UP, BATCH = 2, 2, 2, 1536
FORK = multiprocessing.get_context("fork")
EVEN = [Gang(str(job), (2.0, 3.0)) for job in range(JOBS)]  # half and full depth, a backward twice a forward


@dataclass(frozen=True)
class Way:
    """Which jobs run together, on which core each worker stays (None: any), whether a core's pieces take turns."""

    together: tuple[tuple[int, ...], ...]
    places: Turns | None
    turns: bool = False

    def core(self, job: int, rank: int) -> int | None:
        """Return the core of the piece `rank` of the job."""
        return None if self.places is None else cores()[self.places.pieces[job].index(rank)]


WAYS = {
    "one after the other": Way(((0,), (1,)), Unaware().turns(EVEN)),
    "time slices": Way(((0, 1),), Unaware().turns(EVEN)),
    "time slices, free": Way(((0, 1),), None),
    "complementary": Way(((0, 1),), ComplementaryPairing().turns(EVEN)),
    "jigsaw": Way(((0, 1),), ComplementaryPairing().turns(EVEN), turns=True),
}


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))[:WORKERS]


class Stopwatch(Turn):
    """Times pieces; the device is taken at once."""

    def __init__(self) -> None:
        self.pieces: list[float] = []

    def take(self) -> None:
        self._began = time.perf_counter()

    def give(self) -> None:
        self.pieces.append(time.perf_counter() - self._began)


class Pinned(PartialBackpropStrategy):
    """Partial backprop whose workers stay on cores, if there are any given."""

    def __init__(self, pins: Sequence[int | None]) -> None:
        super().__init__(depth=Staircase(), cuts=BLOCKS - 1, balance=Blocks(), start_method="fork")
        self.pins, self.watch = pins, Stopwatch()
        self._steps.turn = self.watch

    def setup_environment(self) -> None:
        """Before any thread of this worker is made."""
        pin = self.pins[self.local_rank]
        if pin is not None:
            os.sched_setaffinity(0, {pin})
        super().setup_environment()


class Batches:
    """Made before the run: a loader's own work would take the core outside of a turn."""

    def __init__(self, job: int) -> None:
        self.job = job

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(self._made(int(os.environ.get("LOCAL_RANK", "0"))))

    @cache  # noqa: B019
    def _made(self, rank: int) -> list[list[Tensor]]:
        generator = torch.Generator().manual_seed(10 * self.job + rank)
        return [[torch.randn(BATCH, WIDTH, generator=generator)] for _ in range(len(self))]


class Watch(Callback):
    """Meets all other workers after the warm-up; writes times, seconds of pieces and a digest of the weights."""

    def __init__(self, job: int, folder: Path, barrier: Any) -> None:
        self._job, self._folder, self._barrier = job, folder, barrier

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == WARM_UP:
            self._barrier.wait(120)
            self._began = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        ended = time.perf_counter()
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in pl_module.parameters())).hexdigest()
        pieces = trainer.strategy.watch.pieces[WARM_UP:]
        found = {"began": self._began, "ended": ended, "digest": digest, "pieces": pieces}
        (self._folder / f"{self._job}-{trainer.global_rank}.json").write_text(json.dumps(found))


def train(job: int, steps: int, way: Way, barrier: Any, folder: Path) -> None:
    """One job."""
    torch.manual_seed(job)
    Trainer(
        accelerator="cpu",
        devices=WORKERS,
        strategy=Pinned([None if way.turns else way.core(job, rank) for rank in range(WORKERS)]),
        max_steps=WARM_UP + steps,
        callbacks=[Watch(job, folder, barrier)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    ).fit(Chain(), Batches(job))


def carried_out(jobs: Sequence[int], steps: int, way: Way, barrier: Any, folder: Path) -> dict[int, Sequence[float]]:
    """The jobs as members of a sweep under JigSaw; returns the seconds of their pieces."""

    def run(member: SweepMember) -> JobReturn:
        train(int(member.name), steps, way, barrier, folder)
        return returned(member, JobStatus.COMPLETED, None)

    config = OmegaConf.create({"hydra": {"overrides": {"task": []}}})
    members = [SweepMember(str(job), (), config, folder / str(job), WORKERS) for job in jobs]
    devices = {f"cpu:{number}": [core] for number, core in enumerate(cores())}
    arbiter = GangArbiter(list(devices), {gang.name: gang.seconds for gang in EVEN}, cores=devices)
    outcomes = Sweep(members, arbiter, partial(fork, run), LiveTable(), len(members)).run()
    for outcome in outcomes.values():
        _ = outcome.return_value  # raises what a job raised
    return {job: arbiter.measured[str(job)] for job in jobs}


def measure(way: Way, steps: int) -> dict[str, Any]:
    """Seconds of all iterations of both jobs; of each job its weights' digest and its workers' median pieces."""
    seconds, rows = 0.0, {}
    for jobs in way.together:
        barrier = FORK.Barrier(len(jobs) * WORKERS)
        with tempfile.TemporaryDirectory() as name:
            folder, measured = Path(name), dict[int, Sequence[float]]()
            if way.turns:
                measured = carried_out(jobs, steps, way, barrier, folder)
            else:
                running = [FORK.Process(target=train, args=(j, steps, way, barrier, folder)) for j in jobs]
                for process in running:
                    process.start()
                for process in running:
                    process.join(300)
                    if process.exitcode != 0:
                        raise SystemExit(f"a job ended with {process.exitcode}: see above")
            found = {(j, r): json.loads((folder / f"{j}-{r}.json").read_text()) for j in jobs for r in (0, 1)}
        seconds += max(row["ended"] for row in found.values()) - min(row["began"] for row in found.values())
        for job in jobs:
            pieces = measured.get(job) or [statistics.median(found[job, rank]["pieces"]) for rank in range(WORKERS)]
            rows[str(job)] = {"digest": found[job, 0]["digest"], "pieces": list(pieces)}
    return {"seconds": seconds, "iterations_per_second": JOBS * steps / seconds, "jobs": rows}


def predicted(alone: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Iterations per second of both jobs from the pieces measured one job at a time: no hand-over, no reduction."""
    gangs = [
        Gang(
            str(job),
            tuple(statistics.median(run["jobs"][str(job)]["pieces"][rank] for run in alone) for rank in (0, 1)),
        )
        for job in range(JOBS)
    ]
    turns = ComplementaryPairing().turns(gangs)
    slices = Unaware().turns(gangs).cycle_seconds
    cycles = {"one after the other": turns.unaware_seconds, "time slices": slices, "jigsaw": turns.cycle_seconds}
    return {name: JOBS / cycle for name, cycle in cycles.items()}


def shown(runs: Mapping[str, Sequence[Mapping[str, Any]]], forecast: Mapping[str, float]) -> list[list[str]]:
    """Rows of the table."""
    rate = {name: statistics.median(run["iterations_per_second"] for run in found) for name, found in runs.items()}
    rows = []
    for name, found in runs.items():
        spread = [run["iterations_per_second"] for run in found]
        model = f"{forecast[name]:.2f}" if name in forecast else ""
        ratios = [f"{rate[name] / rate[other]:.3f}" for other in ("one after the other", "time slices")]
        rows.append([name, f"{rate[name]:.2f}", f"{min(spread):.2f} to {max(spread):.2f}", model, *ratios])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="iterations of each job that count")
    options = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for _ in range(options.turns):
        for name, way in WAYS.items():
            runs[name].append(measure(way, options.steps))
    digests = {job: {run["jobs"][job]["digest"] for found in runs.values() for run in found} for job in ("0", "1")}
    equal = all(len(found) == 1 for found in digests.values())
    path = RESULTS / f"jigsaw-{slug()}.json"
    about = {"hardware": description(), "turns": options.turns, "steps": options.steps}
    results = {**about, "weights_equal": equal, "runs": runs}
    path.write_text(json.dumps(results, indent=1) + "\n")
    Console().print(Markdown(page(results)))


def page(results: dict[str, Any]) -> str:
    """Markdown of all ways."""
    runs = results["runs"]
    rows = shown(runs, predicted(runs["one after the other"]))
    heads = ["way", "iterations/s", "range", "predicted", "x one after the other", "x time slices"]
    words = f"--turns {results['turns']} --steps {results['steps']}"
    about = f"`python benchmarks/sweep.py jigsaw {words}`: {sentence(results['hardware'])}. Medians, ranges."
    lines = ["| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *rows]]
    verdict = f"Weights of all ways equal bit by bit: {'yes' if results['weights_equal'] else 'NO'}."
    return "\n".join([about, "", *lines, "", verdict]) + "\n"
