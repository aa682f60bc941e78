"""What a token pipeline gains on one machine, as ratios within one run.

    python benchmarks/token_pipeline.py

Two processes of one thread each; GPT-2 over bytes, of the size that the options say. In every turn all variants take
one step each and worker 0 takes the same step of the whole model alone, while worker 1 waits. A ratio is that of
medians over the turns in which other work took less than a tenth of a core, or over the half in which it took least
(the system's work for our own messages is in there, too).

A pipeline of two needs two free cores at once, so on a busy machine its seconds say little. Therefore the same is told
once more in processor time, which waiting doesn't add to: "replayed" is the timeline of the real step with the measured
processor seconds of each action, against the whole model's. And where the rest of the bound 2 S / (S + 1) goes:
"slicing" is what all slices cost on both stages against the whole model alone, "unevenness" what the slower stage costs
against the mean, "seconds / replayed" what messages, waiting and other work on the machine add. "predicted" is the
forecast from the measured costs of slices, as training prints it. "Two at once" is the whole model on both processes,
each for itself, against one process: what the machine has for two, which no pipeline of two can exceed.

Against `torch.distributed.pipelining`: the same stages, its GPipe and 1F1B schedules with one micro-batch per sequence
(1F1B refuses fewer micro-batches than stages).
"""

import argparse
import json
import os
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from hardware import description, sentence, slug
from rich.console import Console
from rich.table import Table
from stages import STAGES, Bench, Size, Step, Taken, saved_bytes
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from lightning_decentral.pipeline.forecast import forecast
from lightning_decentral.pipeline.models import Call
from lightning_decentral.pipeline.profile import action_seconds, profile, slowest
from lightning_decentral.pipeline.schedule import OneForwardOneBackward, TeraPipe, in_flight
from lightning_decentral.pipeline.slicing import Planned, Situation, Uniform
from lightning_decentral.transport import gather_objects

BATCHES = (1, 2, 8)


def work(rank: int, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    bench, length = Bench(rank, Size.of(options)), options.length
    uniform = {n: list(Uniform(n).slices(length, Situation(num_stages=STAGES, seconds=lambda i, j: i))) for n in
               (1, 2, 4, 8, 16)}  # fmt: skip
    profiles = gather_objects(bench.over, profile(bench.model, bench.place, Call(bench.ids(1))))
    seconds, ratio = slowest(profiles)
    situation = Situation(num_stages=STAGES, seconds=seconds, backward_over_forward=ratio)
    planned = list(Planned().slices(length, situation))
    steps: dict[str, Step] = {"alone 1": bench.alone(1), "two at once": bench.alone(1, STAGES)}
    steps |= {f"uniform {n}": bench.sliced(1, slices) for n, slices in uniform.items()}
    steps |= {"planned": bench.sliced(1, planned)}
    rows = bench.turns(steps, options.turns) + bench.turns(beside_torch(bench, planned), options.torch_turns)
    predicted = {}
    for name, slices in {**{f"uniform {n}": s for n, s in uniform.items()}, "planned": planned}.items():
        costs = lambda action, slices=slices: action_seconds(profiles, slices, action)  # noqa: E731
        predicted[name] = forecast(OneForwardOneBackward(), STAGES, 1, len(slices), costs).seconds
    memory = {
        f"{type(schedule).__name__} {m} x {n}": (
            saved_bytes(bench, schedule, m, uniform[n]), in_flight(schedule.actions(STAGES, m, n)[rank])
        )
        for schedule in (TeraPipe(), OneForwardOneBackward())
        for m, n in ((4, 1), (4, 4), (4, 8))
    }  # fmt: skip
    results[rank] = {"rows": rows, "planned": planned, "predicted": predicted, "memory": memory,
                     "errors": [(p.forward.error, p.backward.error) for p in profiles]}  # fmt: skip
    dist.destroy_process_group()


def beside_torch(bench: Bench, planned: list[int]) -> dict[str, Step]:
    """Torch's own schedules, and ours and one process on the same batches."""
    steps: dict[str, Step] = {"GPipe 1": bench.torch_pipelining(ScheduleGPipe, 1)}
    steps |= {f"alone {b}": bench.alone(b) for b in BATCHES}
    steps |= {"planned" if b == 1 else f"sliced {b}": bench.sliced(b, planned, b) for b in BATCHES}
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
        console.print(compared(found[0]["rows"][len(rows) :]))
    console.print(held(found))
    errors = ", ".join(f"{forward:.1%} {backward:.1%}" for forward, backward in found[0]["errors"])
    print(f"planned: {found[0]['planned']}; errors of the fit (forward, backward of each stage): {errors}")


def bounded(found: list[dict[str, Any]]) -> Table:
    rows = found[0]["rows"]
    whole_seconds, whole_own = median(rows, "alone 1"), median(rows, "alone 1", "own")
    table = Table(
        "batch 1", "bound 2S/(S+1)", "x one process, replayed", "share", "x one process, seconds", "share", "slicing",
        "unevenness", "seconds / replayed", "predicted / replayed", "predicted / seconds",
    )  # fmt: skip
    for name, predicted in found[0]["predicted"].items():
        count = len(found[0]["planned"]) if name == "planned" else int(name.split()[1])
        step, seconds, bound = replayed(found, name, count), median(rows, name), 2 * count / (count + 1)
        stages = [sum(actions(stage["rows"], name).values()) for stage in found]
        gains = [x for gain in (whole_own / step, whole_seconds / seconds) for x in (gain, gain / bound)]
        shares = [sum(stages) / whole_own, STAGES * max(stages) / sum(stages), seconds / step]
        cells = [bound, *gains, *shares, predicted / step, predicted / seconds]
        table.add_row(f"{name} ({count} slices)", *(f"{cell:.2f}" for cell in cells))
    return table


def compared(rows: list[dict[str, Any]]) -> Table:
    table = Table("batch", "slices", "GPipe", "1F1B", title="x one process, seconds; the last two of torch")
    for batch in BATCHES:
        one, ours = median(rows, f"alone {batch}"), f"sliced {batch}" if batch > 1 else "planned"
        names = (ours, f"GPipe {batch}", f"1F1B {batch}")
        table.add_row(str(batch), *(f"{one / median(rows, n):.2f}" if n in rows[0] else "refused" for n in names))
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
    Size.options(parser)
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results", help="where results go")
    options = parser.parse_args()
    results = torch.multiprocessing.get_context("spawn").Manager().dict()
    torch.multiprocessing.spawn(work, args=(options, results), nprocs=STAGES)
    found = [results[rank] for rank in range(STAGES)]
    print(f"{Size.of(options)}, {sentence()}")
    report(found)
    path = options.folder / f"token-pipeline-width-{options.width}-{slug()}.json"
    settings = {"size": asdict(Size.of(options)), "turns": options.turns, "torch_turns": options.torch_turns}
    path.write_text(json.dumps({"hardware": description(), **settings, "stages": found}, indent=1))
    print(f"raw results: {path}")


if __name__ == "__main__":
    main()
