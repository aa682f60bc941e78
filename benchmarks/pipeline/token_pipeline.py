"""What a token pipeline gains on one machine, as ratios within one run.

    python benchmarks/pipeline.py

Two processes of one thread each; GPT-2 over bytes, of the size given by the options. In every turn all variants take
two steps each, of which the second counts, as in training a step follows one like it; and worker 0 takes the same steps
of the whole model alone, while worker 1 waits. They begin when the machine does nothing else, and are taken again where
other work took a tenth of a core or more meanwhile, four times at most. A ratio is that of medians over the turns in
which it took less, or over the half in which it took least (the system's work for our own messages is in there, too).
All processes keep the memory that they free.

A pipeline of two needs two free cores at once, so on a busy machine its seconds say little. Therefore results are also
given in processor time, which doesn't include waiting: "replayed" is the timeline of the real step with the measured
processor seconds of each action, against the whole model's. And where the rest of the bound 2 S / (S + 1) goes:
"slicing" is what all slices cost on both stages against the whole model alone, "unevenness" what the slower stage costs
against the mean, "seconds / replayed" what messages, waiting and other work on the machine add. "predicted" is the
forecast from the costs measured before the first turn, as training prints it; 1, 2, 4, 8 and 16 equal slices are what
these were measured with, other slices aren't. "Two at once" is the whole model on both processes, each for itself,
against one process: what the machine has for two, which no pipeline of two can exceed.

Against `torch.distributed.pipelining`: the same stages, its GPipe and 1F1B schedules with one micro-batch per sequence
(1F1B refuses fewer micro-batches than stages). Ours has one, too, in slices planned for so many.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.paths import RESULTS

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from common.hardware import description, sentence, slug
from lightning_decentral.pipeline import Balanced, OneForwardOneBackward, Planned, TeraPipe
from lightning_decentral.pipeline.compute.model import Call
from lightning_decentral.pipeline.plan.cost import Priced, expected, priced
from lightning_decentral.pipeline.plan.schedule import forecast, in_flight
from lightning_decentral.pipeline.plan.slicing import equal
from lightning_decentral.pipeline.wire.slice_planner import profile
from lightning_decentral.shared.wire.objects import gather_objects
from pipeline.stages import PATIENCE_SECONDS, STAGES, Bench, Size, Step, Taken, saved_bytes

BATCHES = (1, 2, 8)
KEEP_FREED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**26)}
"""For glibc: otherwise what a step frees goes back to the system, and the next one gets pages of zeros for it, most of
all the whole model, whose tensors are the largest."""
BALANCED = (8, 16)


def work(rank: int, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    bench, length = Bench(rank, Size.of(options), options.patience), options.length
    order, began = OneForwardOneBackward(), time.perf_counter()
    mine, disturbance = bench.undisturbed(lambda: profile(bench.pipe(order), Call(bench.ids(1))))
    profiles = gather_objects(bench.over, mine)
    profile_seconds = time.perf_counter() - began
    situations = {batch: priced(profiles, order, batch) for batch in BATCHES}
    cut = slicings(length, situations[1], options.equal)
    steps: dict[str, Step] = {"alone 1": bench.alone(1), "two at once": bench.alone(1, STAGES)}
    steps |= {name: bench.sliced(1, slices) for name, slices in cut.items()}
    planned = {batch: list(Planned().slices(length, situation)) for batch, situation in situations.items()}
    rows = bench.turns(steps, options.turns) + bench.turns(beside_torch(bench, planned), options.torch_turns)
    predicted = {name: expected(profiles, order, 1, slices).seconds for name, slices in cut.items()}
    predicted |= {f"sliced {b}": expected(profiles, order, b, slices).seconds for b, slices in planned.items()}
    memory = {
        f"{type(schedule).__name__} {m} x {n}": (
            saved_bytes(bench, schedule, m, list(equal(length, n))), in_flight(schedule.actions(STAGES, m, n)[rank])
        )
        for schedule in (TeraPipe(), OneForwardOneBackward())
        for m, n in ((4, 1), (4, 4), (4, 8))
        if options.memory
    }  # fmt: skip
    results[rank] = {"rows": rows, "slices": cut, "planned": planned, "predicted": predicted, "memory": memory,
                     "profiles": [asdict(p) for p in profiles], "profile_seconds": profile_seconds,
                     "disturbance": disturbance, "dropped": bench.dropped}  # fmt: skip
    dist.destroy_process_group()


def slicings(length: int, situation: Priced, counts: Sequence[int]) -> dict[str, list[int]]:
    """Return the slicings of a sequence, by name."""
    found = {f"{n} equal": list(equal(length, n)) for n in counts}
    found |= {f"{n} balanced": list(Balanced(n).slices(length, situation)) for n in BALANCED}
    planned = list(Planned().slices(length, situation))
    return found | {f"{len(planned)} planned": planned}


def beside_torch(bench: Bench, planned: dict[int, list[int]]) -> dict[str, Step]:
    """Torch's own schedules, and ours and one process on the same batches."""
    steps: dict[str, Step] = {"GPipe 1": bench.torch_pipelining(ScheduleGPipe, 1)}
    steps |= {f"alone {b}": bench.alone(b) for b in BATCHES}
    steps |= {f"sliced {b}": bench.sliced(b, planned[b], b) for b in BATCHES}
    kinds = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
    return steps | {f"{name} {b}": bench.torch_pipelining(kind, b) for name, kind in kinds.items() for b in BATCHES[1:]}


def undisturbed(rows: list[dict[str, Taken]], name: str) -> list[Taken]:
    """The steps that other work took less than a tenth of a core from; no less than half of all."""
    share = lambda step: step["others"] / step["seconds"]  # noqa: E731
    steps = sorted((row[name] for row in rows if name in row), key=share)
    return steps[: max((len(steps) + 1) // 2, sum(share(step) < 0.1 for step in steps))]


def median(rows: list[dict[str, Taken]], name: str, what: str = "seconds") -> float:
    return statistics.median(step[what] for step in undisturbed(rows, name))


def actions(rows: list[dict[str, Taken]], name: str) -> dict[str, float]:
    """Processor seconds of each action of a stage."""
    steps = [step["actions"] for step in undisturbed(rows, name)]
    return {action: statistics.median(step[action] for step in steps) for action in steps[0]}


def replayed(found: list[dict[str, Any]], name: str, slices: int) -> float:
    """Makespan of the step if every action took its processor seconds."""
    seconds = {action: own for stage in found for action, own in actions(stage["rows"], name).items()}
    return forecast(OneForwardOneBackward(), STAGES, 1, slices, lambda action: seconds[str(action)]).seconds


def report(found: list[dict[str, Any]]) -> None:
    console, rows = Console(width=230), [row for row in found[0]["rows"] if "two at once" in row]
    console.print(bounded([{**stage, "rows": stage["rows"][: len(rows)]} for stage in found]))
    speed, own = (median(rows, "two at once", what) / median(rows, "alone 1", what) for what in ("seconds", "own"))
    print(f"two at once: {STAGES / speed:.2f} x one process in seconds, {own:.2f} x its processor time for each")
    others = max(step["others"] / step["seconds"] for name in rows[0] for step in undisturbed(rows, name))
    print(f"other work took at most {others:.0%} of a core during the steps that count")
    if len(rows) < len(found[0]["rows"]):
        console.print(compared(found, found[0]["rows"][len(rows) :]))
    if found[0]["memory"]:
        console.print(held(found))
    costs = [profile[way] for profile in found[0]["profiles"] for way in ("forward", "backward")]
    print(f"errors of the fit (forward, backward of each stage): {', '.join(format(c['error'], '.1%') for c in costs)}")
    print(f"stretch {found[0]['profiles'][0]['stretch']:.2f}, link {found[0]['profiles'][0]['link']}, "
          f"measured in {found[0]['profile_seconds']:.0f} s while other work took {found[0]['disturbance']:.0%} "
          f"of a core; {found[0]['dropped']} times something was disturbed and done again")  # fmt: skip
    print(f"slices: {found[0]['slices']}, planned for a batch of {found[0]['planned']}")


def bounded(found: list[dict[str, Any]]) -> Table:
    rows = found[0]["rows"]
    whole_seconds, whole_own = median(rows, "alone 1"), median(rows, "alone 1", "own")
    table = Table(
        "batch 1", "bound 2S/(S+1)", "x one process, replayed", "share", "x one process, seconds", "share", "slicing",
        "unevenness", "seconds / replayed", "predicted / replayed", "predicted / seconds",
    )  # fmt: skip
    for name, slices in found[0]["slices"].items():
        count, predicted = len(slices), found[0]["predicted"][name]
        step, seconds, bound = replayed(found, name, count), median(rows, name), 2 * count / (count + 1)
        stages = [sum(actions(stage["rows"], name).values()) for stage in found]
        gains = [x for gain in (whole_own / step, whole_seconds / seconds) for x in (gain, gain / bound)]
        shares = [sum(stages) / whole_own, STAGES * max(stages) / sum(stages), seconds / step]
        cells = [bound, *gains, *shares, predicted / step, predicted / seconds]
        table.add_row(name, *(f"{cell:.2f}" for cell in cells))
    return table


def compared(found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Table:
    title = "x one process, seconds; GPipe and 1F1B of torch"
    table = Table("batch", "planned", "slices", "GPipe", "1F1B", "predicted / seconds", title=title)
    for batch in BATCHES:
        one, ours = median(rows, f"alone {batch}"), f"sliced {batch}"
        names = (f"GPipe {batch}", f"1F1B {batch}")
        torchs = [f"{one / median(rows, n):.2f}" if n in rows[0] else "refused" for n in names]
        ratio = found[0]["predicted"][ours] / median(rows, ours)
        slices = str(len(found[0]["planned"][batch]))
        table.add_row(str(batch), f"{one / median(rows, ours):.2f}", slices, *torchs, f"{ratio:.2f}")
    return table


def held(found: list[dict[str, Any]]) -> Table:
    columns = [f"stage {r}: {title}" for r in range(STAGES) for title in ("MB held", "chunks by formula", "MB a chunk")]
    table = Table("schedule, micro-batches x slices", *columns)
    for name in found[0]["memory"]:
        pairs = [(f["memory"][name][0] / 1e6, f["memory"][name][1]) for f in found]
        table.add_row(name, *(text for held, n in pairs for text in (f"{held:,.1f}", str(n), f"{held / n:,.2f}")))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--torch-turns", type=int, default=3, help="beside torch's schedules, which take longer")
    parser.add_argument("--equal", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12, 16], help="numbers of equal slices")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="what autograd holds")
    Size.options(parser)
    parser.add_argument("--patience", type=float, default=PATIENCE_SECONDS, help="seconds; 0: on a busy machine")
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where results go")
    options = parser.parse_args()
    os.environ.update(KEEP_FREED)  # of the processes that are started now
    results = torch.multiprocessing.get_context("spawn").Manager().dict()
    torch.multiprocessing.spawn(work, args=(options, results), nprocs=STAGES)
    found = [results[rank] for rank in range(STAGES)]
    print(f"{Size.of(options)}, {sentence()}")
    report(found)
    path = options.folder / f"token-pipeline-width-{options.width}-length-{options.length}-{slug()}.json"
    settings = {"size": asdict(Size.of(options)), "turns": options.turns, "torch_turns": options.torch_turns}
    path.write_text(json.dumps({"hardware": description(), **settings, "stages": found}, indent=1))
    print(f"raw results: {path}")
