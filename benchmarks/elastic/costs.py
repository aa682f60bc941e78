"""What workers that die and come cost the others, on one machine.

    python benchmarks/elastic.py                                 # about 8 minutes
    python benchmarks/elastic.py --parts kills --kills 50 --workers 8
    sudo python benchmarks/elastic.py --parts storm --rate 200mbit --faults-per-hour 60 --storm-steps 40000
    python benchmarks/elastic.py --parts uneven --slow 3
    python benchmarks/elastic.py --parts sizes --workers 3 --sizes 1 3
    python benchmarks/elastic.py --parts sizes --workers 8 --sizes 4 8

kills   kill -9 of one at random moments. `beyond`: the longest step of a survivor that ends within a second of it, or
        among its next five, less its median step. `joined`: a newcomer's first step has begun, since its process has
        everything imported: processes are forked from one that has.
steps   a step with `elastic`, without faults, and one of plain gossip: runs in turn
storm   a lost worker is started again `--restart` seconds later (what importing takes); stalls are of 1 to 3 s; with
        `--rate` workers are hosts of `cluster.py`, and links are cut for 1 to 10 s, too. `fallen`: who ended for that.
        All against the same steps without faults: seconds, the final loss, and the share of workers that took part
uneven  the same steps where all workers are even, and where those of one are `--slow` times as long: workers that wait
        for neighbours, and asynchronous ones
sizes   the oldest are killed, all at once, or others started, until there are so many; `--sizes 4 8` replaces half of 8

With `--asynchronous` nobody waits; with `--peer` torchft does it instead (`elastic/torchft_worker.py`). A step sleeps
for `--sleep` seconds, as an accelerator would compute: otherwise workers would share the cores.
"""

import argparse
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.paths import RESULTS

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common.hardware import description, slug
from elastic.run import FORK, WAIT_SECONDS, WARM, Here, Hosts, Row, Run, lines, took
from elastic.worker import Job, train
from network.cluster import cluster

ENDING_SECONDS = 15.0
SECONDS = {"kill": (0.0, 0.0), "stall": (1.0, 3.0), "cut": (1.0, 10.0)}
"""Of the faults that end by themselves, from and to."""


def kills(job: Job, place: Here, number: int, seed: int) -> list[Row]:
    draw, found = random.Random(seed), []
    with Run(job, place) as run:
        run.until(run.warm)
        for _ in range(number):
            time.sleep(draw.uniform(0.5, 1.5))
            at = run.kill(draw.choice(sorted(run.alive)))
            survivors, began = list(run.alive), time.monotonic()
            newcomer = run.start()
            run.until(lambda name=newcomer: len(run.said(name, "step")) > 5)  # type: ignore[misc]
            run.until(lambda at=at: all(run.said(name, "step")[-1]["at"] > at + 1 for name in run.alive))  # type: ignore[misc]
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


def steps(job: Job, place: Here, pairs: int) -> list[Row]:
    """Medians over a run's steps, of all its workers."""
    found = []
    for turn in range(pairs):
        row: Row = {}
        both = ("elastic", lambda job: elastic_step(job, place)), ("plain", plain_step)
        for name, seconds in both[:: 1 if turn % 2 else -1]:
            row[name] = seconds(replace(job, folder=fresh(job)))
        found.append(row)
        print(f"a step: {row['elastic']:.5f} s elastic, {row['plain']:.5f} s plain", flush=True)
    return found


def fresh(job: Job) -> Path:
    return Path(tempfile.mkdtemp(dir=job.folder))


def elastic_step(job: Job, place: Here) -> float:
    with Run(job, place) as run:
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


def storm(job: Job, place: Here, faults_per_hour: float, restart: float, seed: int) -> Row:
    """The same steps without faults, then with them."""
    calm = stormed(replace(job, folder=fresh(job)), place, 0.0, restart, seed)
    found = stormed(replace(job, folder=fresh(job)), place, faults_per_hour, restart, seed)
    row = {"calm": calm, "storm": found, "share": calm["seconds"] / found["seconds"]}
    print(f"storm: {row['share']:.3f} of the steps, {found}, without: {calm}", flush=True)
    return row


def stormed(
    job: Job, place: Here, faults_per_hour: float, restart: float, seed: int, kind_of_run: type[Run] = Run
) -> Row:
    draw, faults = random.Random(seed), dict.fromkeys((*place.faults, "fallen"), 0)
    with kind_of_run(job, place) as run:
        run.until(run.warm)
        due: list[tuple[float, Callable[[], Any]]] = []
        next_fault = time.monotonic() + pause(draw, faults_per_hour)
        while not run.is_over():
            now, fallen = time.monotonic(), run.fallen()
            faults["fallen"] += len(fallen)
            due += [(now + restart, run.start) for _ in fallen]
            if now > next_fault:
                next_fault += pause(draw, faults_per_hour)
                kind, name = draw.choice(place.faults), draw.choice(sorted(run.alive))
                faults[kind] += 1
                due.append(strike(run, kind, name, restart, draw.uniform(*SECONDS[kind])))
            for when, call in [pair for pair in due if pair[0] <= now]:
                due.remove((when, call))
                call()
            time.sleep(0.05)
        for _, call in due:
            if call != run.start:
                call()
        finish(run)
        return {"faults": faults, **ended(run)}


def uneven(job: Job, place: Here, slow: float, seed: int) -> Row:
    """The same steps, of even workers and with a slow one."""
    found = {}
    for name, times in (("even", 1.0), ("uneven", slow)):
        for order, asynchronous in (("waits", False), ("asynchronous", True)):
            of = replace(job, folder=fresh(job), slow=times, asynchronous=asynchronous)
            found[f"{name}, {order}"] = stormed(of, place, 0.0, 0.0, seed)
            print(f"{name}, {order}: {found[f'{name}, {order}']}", flush=True)
    return found


def strike(run: Run, kind: str, name: str, restart: float, seconds: float) -> tuple[float, Callable[[], Any]]:
    """(when, what ends the fault). A host whose link is cut may get its next worker before."""
    if kind == "kill":
        return run.lose(name) + restart, run.start
    return time.monotonic() + seconds, run.begin(kind, name)


def finish(run: Run) -> None:
    with suppress(TimeoutError):  # who came too late to take part waits for others
        run.until(lambda: all(run.said(name, "end") for name in run.alive), ENDING_SECONDS)


def resized(job: Job, place: Here, sizes: list[int], seed: int) -> Row:
    """The same steps without a change, then with as many workers as these, one number after the other."""
    calm = stormed(replace(job, folder=fresh(job)), place, 0.0, 0.0, seed)
    moments, draw = [], random.Random(seed)
    with Run(replace(job, folder=fresh(job)), place) as run:
        run.until(run.warm)
        for size in sizes:
            time.sleep(draw.uniform(1.0, 3.0))
            moments.append({"size": size, "seconds": resize(run, size)})
            print(f"{size} workers: all took part after {moments[-1]['seconds']:.2f} s", flush=True)
        run.until(run.is_over, 2 * calm["seconds"] + WAIT_SECONDS)
        finish(run)
        row = {"calm": calm, "changed": ended(run), "moments": moments}
    print(f"changes: {row['changed']}, without: {calm}", flush=True)
    return row


def resize(run: Run, size: int) -> float:
    """Kill the oldest, all at once, or start others; seconds until each has taken five more steps."""
    began = time.monotonic()
    for name in list(run.alive)[: max(0, len(run.alive) - size)]:
        run.kill(name)
    for _ in range(size - len(run.alive)):
        run.start()
    before = {name: len(run.said(name, "step")) for name in run.alive}
    run.until(lambda: run.is_over() or all(len(run.said(name, "step")) > before[name] + 5 for name in run.alive))
    if run.is_over():
        raise ValueError(f"the run ended before {size} workers took part: give more --storm-steps")
    return time.monotonic() - began


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
    parts = ["kills", "steps", "storm", "uneven", "sizes"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts[:3])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of a run of a pair")
    parser.add_argument("--storm-steps", type=int, default=2000)
    parser.add_argument("--faults-per-hour", type=float, default=360.0)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4], help="of the part of that name")
    parser.add_argument("--rate", help="of links between hosts, as 200mbit, which the storm cuts; needs root")
    parser.add_argument("--asynchronous", action="store_true", help="nobody waits")
    parser.add_argument("--peer", choices=["torchft-ddp", "torchft-localsgd"], default="")
    parser.add_argument("--slow", type=float, default=3.0, help="of the part uneven")
    parser.add_argument("--restart", type=float, default=5.0)
    parser.add_argument("--sleep", type=float, default=0.03)
    parser.add_argument("--dead-after", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / f"elastic-{slug()}.json")
    told = parser.parse_args()
    kept = json.loads(told.output.read_text()) if told.output.exists() else {}
    hosts = cluster(max(told.workers, *told.sizes) + 1, told.rate, "elastic") if told.rate else nullcontext()
    with tempfile.TemporaryDirectory() as folder, hosts as made_hosts:
        place = Hosts(made_hosts) if made_hosts else Here()
        job, seed = Job(Path(folder), told.workers, -1, told.sleep, told.dead_after), told.seed
        job = replace(job, asynchronous=told.asynchronous, peer=told.peer)
        long = replace(job, steps=told.storm_steps)
        made: dict[str, Callable[[], Any]] = {
            "kills": lambda: kills(replace(job, folder=fresh(job)), place, told.kills, seed),
            "steps": lambda: steps(replace(job, steps=told.steps), place, told.pairs),
            "storm": lambda: storm(long, place, told.faults_per_hour, told.restart, seed),
            "uneven": lambda: uneven(long, place, told.slow, seed),
            "sizes": lambda: resized(long, place, told.sizes, seed),
        }
        for part in told.parts:
            found = {"command": shlex.join(["python", "benchmarks/elastic.py", *sys.argv[1:]]), "workers": told.workers}
            settings = {name: value for name, value in vars(told).items() if name not in ("output", "parts")}
            kept[part] = {**found, "hardware": description(), "settings": settings, "rows": made[part]()}
            told.output.write_text(json.dumps(kept, indent=1) + "\n")
