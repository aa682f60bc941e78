"""Sweeps that share devices: how busy they are, how long they take, what a hand-over costs.

    python benchmarks/sweep.py

Where the cost of sharing is the question, an accelerator is simulated by sleeps: a batch is device seconds asleep
with a grant, then host seconds asleep without one. Real trainings follow, on the processor, by the
recipes' command line with three launchers. Under four minutes on two cores.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from common.hardware import description, slug
from common.paths import RESULTS, ROOT
from lightning_decentral.sweep import FIFO, LRTF, SRTF, Complementary, Policy, RoundRobin
from lightning_decentral.sweep.member import SweepMember
from lightning_decentral.sweep.plan.arbiter import Arbiter, TurnReport
from lightning_decentral.sweep.processes import live
from lightning_decentral.sweep.server import Sweep
from lightning_decentral.sweep.wire.client import Admission, Seat

POLICIES: tuple[Policy, ...] = (LRTF(), SRTF(), RoundRobin(), FIFO(), Complementary())
Stamp = tuple[str, float, float]


@dataclass(frozen=True)
class Job:
    """`batches` times device seconds, then host seconds (data, logs)."""

    batches: int
    device: float
    host: float = 0.0

    @property
    def length(self) -> float:
        return self.batches * (self.device + self.host)


class Nothing:
    """A simulated member has nothing on its device."""

    def leave(self) -> None: ...
    def enter(self) -> None: ...


class Silent:
    def show(self, sweep: Sweep) -> None: ...
    def ended(self, member: SweepMember, outcome: JobReturn) -> None: ...


class Simulated:
    """Starts members that sleep; they return when they had the device."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs

    def __call__(
        self, member: SweepMember, environment: Mapping[str, str], lifeline: tuple[Connection, Connection]
    ) -> Any:
        def run(member: SweepMember) -> JobReturn:
            admission = Admission.found()
            assert admission is not None
            return JobReturn(
                status=JobStatus.COMPLETED, _return_value=asleep(Seat(admission, Nothing()), self.job(member))
            )

        def main() -> None:
            lifeline[1].close()
            live(member, environment, lifeline[0], run)

        process = get_context("fork").Process(target=main)
        process.start()
        return process

    def job(self, member: SweepMember) -> Job:
        return self._jobs[int(member.name)]


def clock() -> float:
    """Seconds on a clock that all members share: for a member `time.perf_counter` stands still while it waits."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def asleep(seat: Seat, job: Job) -> list[tuple[float, float]]:
    """Return when each grant began and ended."""
    grants: list[tuple[float, float]] = []
    for batch in range(job.batches):
        turn = TurnReport(batch / job.batches, (job.batches - batch) * job.device)
        if not seat.fresh:
            ending = clock()
            if seat.held:
                grants[-1] = (grants[-1][0], ending)
            seat.take(turn)
            grants.append((clock(), 0.0))
        time.sleep(job.device)
        if job.host:
            grants[-1] = (grants[-1][0], clock())
            seat.give(TurnReport((batch + 1) / job.batches, (job.batches - batch - 1) * job.device))
            time.sleep(job.host)
    grants[-1] = (grants[-1][0], grants[-1][1] or clock())
    seat.give(TurnReport(1.0, 0.0))
    return grants


def shared(jobs: Sequence[Job], devices: int, policy: Policy, quantum: float) -> dict[str, Any]:
    """A sweep of sleeping members: seconds from first grant to last end, and the share that devices were used."""
    with tempfile.TemporaryDirectory() as folder:
        members = [
            SweepMember(str(i), (), OmegaConf.create({"hydra": {"overrides": {"task": []}}}), Path(folder) / str(i))
            for i in range(len(jobs))
        ]
        arbiter = Arbiter(policy, [f"simulated:{i}" for i in range(devices)], quantum_seconds=quantum)
        outcomes = Sweep(members, arbiter, Simulated(jobs), Silent(), alive=len(jobs)).run()
    grants = [(start, end) for outcome in outcomes.values() for start, end in outcome.return_value]
    makespan = max(end for _, end in grants) - min(start for start, _ in grants)
    work = sum(job.batches * job.device for job in jobs)
    bound = lower_bound(jobs, devices)
    return {
        "seconds": makespan,
        "bound_seconds": bound,
        "busy": work / (devices * makespan),
        "busy_of_bound": bound / makespan,
        "grants": sorted(grants),
    }


def lower_bound(jobs: Sequence[Job], devices: int) -> float:
    """max(longest job, device seconds / devices); without host seconds the optimum with interruptions (McNaughton)."""
    return max(max(job.length for job in jobs), sum(job.batches * job.device for job in jobs) / devices)


def handover() -> dict[str, float]:
    """Measure the handover between two members that take turns of 2 ms on one device: from the end of one's grant to
    the beginning of the other's."""
    grants = shared([Job(500, 0.002)] * 2, 1, RoundRobin(), 0.001)["grants"]
    waits = sorted(1e3 * (b[0] - a[1]) for a, b in pairwise(grants))
    return {
        "handovers": len(waits),
        "median_ms": statistics.median(waits),
        "p99_ms": waits[int(0.99 * len(waits))],
        "worst_ms": waits[-1],
    }


def by_joblib(jobs: Sequence[Job], devices: int) -> float:
    """Each device takes whole jobs in their order, as joblib's launcher does with n_jobs=devices."""
    from joblib import Parallel, delayed

    Parallel(n_jobs=devices)(delayed(time.sleep)(0.01) for _ in range(2 * devices))  # its processes have started
    start = time.perf_counter()
    Parallel(n_jobs=devices, batch_size=1)(delayed(time.sleep)(job.length) for job in jobs)
    return time.perf_counter() - start


SETS = {
    "equal": [Job(40, 0.02)] * 6,
    "one long, last": [*[Job(30, 0.02)] * 5, Job(90, 0.02)],
    "a third on the host": [Job(30, 0.02, 0.01)] * 6,
    "half on the host, one long": [*[Job(24, 0.02, 0.02)] * 5, Job(60, 0.02, 0.02)],
}


def simulated() -> dict[str, Any]:
    """Every set on two devices: the bound, the default policy, joblib, one after the other."""
    rows = {}
    for name, jobs in SETS.items():
        ours = shared(jobs, 2, LRTF(), 0.1)
        ours.pop("grants")
        rows[name] = {
            **ours,
            "joblib_seconds": by_joblib(jobs, 2) if find_spec("joblib") else None,
            "sequential_seconds": sum(job.length for job in jobs),
        }
    return rows


def small_sets(number: int = 5) -> dict[str, dict[str, float]]:
    """Random sets of 3 to 6 members without host seconds: makespan / optimum by policy."""
    draw = random.Random(0)
    sets = [[Job(draw.randint(5, 40), 0.02) for _ in range(draw.randint(3, 6))] for _ in range(number)]
    rows = {}
    for policy in POLICIES:
        ratios = [1 / shared(jobs, 2, policy, 0.02)["busy_of_bound"] for jobs in sets]
        rows[type(policy).__name__] = {"mean": statistics.mean(ratios), "worst": max(ratios)}
    return rows


WORDS = ["-m", "recipe=vit", "trainer=cpu", "trainer.max_epochs=8", "data.batch_size=64", "logger=none"]
MEMBERS = ["optimizer.lr=1e-3,3e-4,1e-4", "model.config.hidden_size=32,64"]
LAUNCHERS = {
    "one after the other": [],
    "joblib, n_jobs=2": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "shard_parallel, devices=2": ["hydra/launcher=shard_parallel", "hydra.launcher.devices=2"],
}


def trained() -> dict[str, Any]:
    """Six members of the recipe, each launcher, whole commands with their start; the shared launcher by devices."""
    rows: dict[str, Any] = {}
    for name, launcher in LAUNCHERS.items():
        if "joblib" in name and find_spec("hydra_plugins.hydra_joblib_launcher") is None:
            rows[name] = "skipped: no hydra-joblib-launcher here (extra benchmark)"
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = command([*WORDS, *MEMBERS, *launcher, f"hydra.sweep.dir={folder}"], Path(folder))
    return rows


def command(words: Sequence[str], folder: Path) -> dict[str, float]:
    """Seconds of the command; how much of the time from first to last grant the devices were granted."""
    start = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, str(ROOT / "recipes" / "train.py"), *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=True,
    )
    seconds = time.perf_counter() - start
    trace = folder / "trace.json"
    if not trace.exists():
        return {"seconds": seconds}
    events = json.loads(trace.read_text())["traceEvents"]
    whole = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
    return {"seconds": seconds, "busy": sum(e["dur"] for e in events) / (2 * whole), "training_seconds": whole / 1e6}


def main() -> None:
    results = {
        "hardware": description(),
        "hand-over between two members of one device": handover(),
        "two simulated devices": simulated(),
        "two simulated devices, makespan / optimum of five small sets": small_sets(),
        "six trainings of the ViT recipe on the processor": trained(),
    }
    print(json.dumps(results, indent=1))
    path = RESULTS / f"sweep-{slug()}.json"
    path.write_text(json.dumps(results, indent=1))
    print(f"raw results: {path}")
