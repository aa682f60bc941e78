"""What workers that die and come cost the others, on one machine.

    python benchmarks/elastic.py                                 # about 8 minutes
    python benchmarks/elastic.py --parts kills --kills 50 --workers 8

kills   kill -9 of one at random moments. `beyond`: the longest step of a survivor that ends within a second of it, or
        among its next five, less its median step. `joined`: a newcomer's first step has begun, since its process has
        everything imported: processes are forked from one that has.
steps   a step with `elastic`, without faults, and one of plain gossip: runs in turn
storm   a lost worker is started again `--restart` seconds later (what importing takes); stalls are of 1 to 3 s. All
        against the same steps without faults: seconds, the final loss, and the share of workers that took part

A step sleeps for `--sleep` seconds, as an accelerator would compute: otherwise workers would share the cores.
"""

import argparse
import json
import multiprocessing
import os
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from elastic_worker import Job, train
from hardware import description, slug

from lightning_decentral.shared.plan.elastic.view import Bounds, Times
from lightning_decentral.shared.wire.elastic.lobby import serve

FORK = multiprocessing.get_context("fork")
Row = dict[str, Any]
WARM = 20
"""First steps of a run, of which nothing is measured."""
WAIT_SECONDS = 120.0
ENDING_SECONDS = 15.0


class Run:
    """A lobby and workers, in processes; all are killed in the end."""

    def __init__(self, job: Job) -> None:
        self._lobby: Any = None
        self.job = job
        self.alive: dict[str, Any] = {}
        self.names: list[str] = []

    def __enter__(self) -> "Run":
        ready, says = FORK.Pipe(duplex=False)
        bounds = Bounds(max(1, self.job.workers // 2), self.job.workers)
        args = bounds, Times(self.job.dead_after), "127.0.0.1", 0, says.send
        self._lobby = FORK.Process(target=serve, args=args, daemon=True)
        self._lobby.start()
        self.job = replace(self.job, lobby=f"127.0.0.1:{ready.recv()}")
        for _ in range(self.job.workers):
            self.start()
        return self

    def start(self) -> str:
        name = f"w{len(self.names)}"
        self.names.append(name)
        self.alive[name] = FORK.Process(target=train, args=(os.getpid(), self.job, name))
        self.alive[name].start()
        return name

    def warm(self) -> bool:
        """Whether all train. Who came just while the run began has ended, and is started again."""
        for name in [name for name, process in self.alive.items() if not process.is_alive()]:
            if not self.said(name, "end"):
                self.alive.pop(name)
                self.start()
        return all(len(self.said(name, "step")) > WARM for name in self.alive)

    def kill(self, name: str) -> float:
        """When."""
        process, at = self.alive.pop(name), time.monotonic()
        process.kill()
        process.join()
        return at

    def stall(self, name: str, seconds: float) -> None:
        os.kill(self.alive[name].pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(self.alive[name].pid, signal.SIGCONT)

    def said(self, name: str, kind: str) -> list[Row]:
        return lines(self.job.folder / f"{name}.jsonl", kind)

    def has_ended(self, name: str) -> bool:
        """By its last line: reading all of a long run's again and again would take a core from its workers."""
        file = self.job.folder / f"{name}.jsonl"
        if not file.exists():
            return False
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - 200))
            return b'"kind": "end"' in stream.read()

    def until(self, holds: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                logs = [(self.job.folder / f"{name}.log").read_text()[-1500:] for name in self.names[-2:]]
                raise TimeoutError("\n".join(logs))
            time.sleep(0.02)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name in list(self.alive):
            self.kill(name)
        self._lobby.kill()


def lines(file: Path, kind: str) -> list[Row]:
    text = file.read_text() if file.exists() else ""
    return [row for row in map(json.loads, text.split("\n")[:-1]) if row["kind"] == kind]


def took(steps: list[Row]) -> list[tuple[float, float]]:
    """(when it ended, seconds) of each step but the first."""
    return [(b["at"], b["at"] - a["at"]) for a, b in pairwise(steps)]


def kills(job: Job, number: int, seed: int) -> list[Row]:
    draw, found = random.Random(seed), []
    with Run(job) as run:
        run.until(run.warm)
        for _ in range(number):
            time.sleep(draw.uniform(0.5, 1.5))
            at = run.kill(draw.choice(sorted(run.alive)))
            survivors, began = list(run.alive), time.monotonic()
            newcomer = run.start()
            run.until(lambda name=newcomer: len(run.said(name, "step")) > 5)  # type: ignore[misc]
            first, second = (step["at"] for step in run.said(newcomer, "step")[:2])
            beyond = [beyond_a_step(took(run.said(name, "step")), at) for name in survivors]
            found.append({"beyond": beyond, "joined": first - (second - first) - began})
            print(f"killed: {max(beyond):.3f} s beyond a step, joined after {found[-1]['joined']:.2f} s", flush=True)
    return found


def beyond_a_step(steps: list[tuple[float, float]], killed: float) -> float:
    usual = statistics.median(seconds for at, seconds in steps if at < killed)
    after = [(at, seconds) for at, seconds in steps if at >= killed]
    near = [seconds for place, (at, seconds) in enumerate(after) if place < 5 or at < killed + 1]
    return max(0.0, max(near) - usual)


def steps(job: Job, pairs: int) -> list[Row]:
    """Medians over a run's steps, of all its workers."""
    found = []
    for turn in range(pairs):
        row: Row = {}
        for name, seconds in (("elastic", elastic_step), ("plain", plain_step))[:: 1 if turn % 2 else -1]:
            row[name] = seconds(replace(job, folder=fresh(job)))
        found.append(row)
        print(f"a step: {row['elastic']:.5f} s elastic, {row['plain']:.5f} s plain", flush=True)
    return found


def fresh(job: Job) -> Path:
    return Path(tempfile.mkdtemp(dir=job.folder))


def elastic_step(job: Job) -> float:
    with Run(job) as run:
        run.until(run.warm)
        run.until(lambda: all(run.said(name, "end") for name in run.alive))
    return median_step(job)


def plain_step(job: Job) -> float:
    process = FORK.Process(target=train, args=(os.getpid(), job, "plain"))
    process.start()
    process.join(WAIT_SECONDS)
    process.kill()
    return median_step(job)


def median_step(job: Job) -> float:
    return statistics.median(s for file in job.folder.glob("*.jsonl") for _, s in took(lines(file, "step"))[WARM:])


def storm(job: Job, faults_per_hour: float, restart: float, seed: int) -> Row:
    """The same steps without faults, then with them."""
    calm = stormed(replace(job, folder=fresh(job)), 0.0, restart, seed)
    found = stormed(replace(job, folder=fresh(job)), faults_per_hour, restart, seed)
    row = {"calm": calm, "storm": found, "share": calm["seconds"] / found["seconds"]}
    print(f"storm: {row['share']:.3f} of the steps, {found}, without: {calm}", flush=True)
    return row


def stormed(job: Job, faults_per_hour: float, restart: float, seed: int) -> Row:
    draw, faults = random.Random(seed), {"kill": 0, "stall": 0}
    with Run(job) as run:
        run.until(run.warm)
        began, restarts, due = time.monotonic(), list[float](), pause(draw, faults_per_hour)
        while not any(run.has_ended(name) for name in run.alive):
            now = time.monotonic()
            while restarts and restarts[0] < now:
                restarts.pop(0)
                run.start()
            if now - began > due:
                due += pause(draw, faults_per_hour)
                kind, name = draw.choice(["kill", "stall"]), draw.choice(sorted(run.alive))
                faults[kind] += 1
                if kind == "kill":
                    run.kill(name)
                    restarts.append(now + restart)
                else:
                    run.stall(name, draw.uniform(1, 3))
            time.sleep(0.05)
        with suppress(TimeoutError):  # who came too late to take part waits for others
            run.until(lambda: all(run.said(name, "end") for name in run.alive), ENDING_SECONDS)
        return {"faults": faults, **ended(run)}


def pause(draw: random.Random, faults_per_hour: float) -> float:
    return draw.expovariate(faults_per_hour / 3600) if faults_per_hour else float("inf")


def ended(run: Run) -> Row:
    taken = {name: run.said(name, "step") for name in run.names}
    ends = [end for name in run.names for end in run.said(name, "end")]
    each = [step for of in taken.values() for step in of if step["step"] > WARM]
    last = max(step["step"] for step in each)
    return {
        "steps": last - WARM,
        "seconds": max(step["at"] for step in each) - min(step["at"] for step in each),
        "participation": len(each) / ((last - WARM) * run.job.workers),
        "loss": statistics.mean(end["loss"] for end in ends),
        "ended": len(ends),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["kills", "steps", "storm"], default=["kills", "steps", "storm"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of a run of a pair")
    parser.add_argument("--storm-steps", type=int, default=2000)
    parser.add_argument("--faults-per-hour", type=float, default=360.0)
    parser.add_argument("--restart", type=float, default=5.0)
    parser.add_argument("--sleep", type=float, default=0.03)
    parser.add_argument("--dead-after", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / f"elastic-{slug()}.json")
    told = parser.parse_args()
    kept = json.loads(told.output.read_text()) if told.output.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), told.workers, -1, told.sleep, told.dead_after)
        made: dict[str, Callable[[], Any]] = {
            "kills": lambda: kills(replace(job, folder=fresh(job)), told.kills, told.seed),
            "steps": lambda: steps(replace(job, steps=told.steps), told.pairs),
            "storm": lambda: storm(replace(job, steps=told.storm_steps), told.faults_per_hour, told.restart, told.seed),
        }
        for part in told.parts:
            found = {"command": shlex.join(["python", "benchmarks/elastic.py", *sys.argv[1:]]), "workers": told.workers}
            settings = {name: value for name, value in vars(told).items() if name not in ("output", "parts")}
            kept[part] = {**found, "hardware": description(), "settings": settings, "rows": made[part]()}
            told.output.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
