"""What a token pipeline gains on one machine, as ratios within one run.

    python benchmarks/token_pipeline.py

Two processes of one thread each; GPT-2 of 8 blocks, width 192, bytes, sequences of 1,024. In every turn all variants
take one step each and worker 0 takes the same step of the whole model alone, while worker 1 waits; a ratio is that of
medians over the turns.

A pipeline of two needs two free cores at once, so on a busy machine its seconds say little. Therefore the same is told
once more in processor time, which waiting doesn't add to: "replayed" is the timeline of the real step with the measured
processor seconds of each action, against the whole model's. And where the rest of the bound 2 S / (S + 1) goes:
"slicing" is what all slices cost on both stages against the whole model alone, "unevenness" what the slower stage costs
against the mean. "predicted" is the forecast from the measured costs of slices, as training prints it.

Against `torch.distributed.pipelining`: the same stages, its GPipe and 1F1B schedules with one micro-batch per sequence
(1F1B refuses fewer micro-batches than stages).
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from hardware import description, slug
from rich.console import Console
from rich.table import Table
from stages import LENGTH, STAGES, Bench, Step, saved_bytes
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from lightning_decentral.pipeline.forecast import forecast
from lightning_decentral.pipeline.models import Call
from lightning_decentral.pipeline.profile import action_seconds, profile, slowest
from lightning_decentral.pipeline.schedule import OneForwardOneBackward, TeraPipe, in_flight
from lightning_decentral.pipeline.slicing import Planned, Situation, Uniform
from lightning_decentral.transport import gather_objects


def work(rank: int, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    bench, parts = Bench(rank, options.length), options.parts
    uniform = {n: list(Uniform(n).slices(options.length, Situation(num_stages=STAGES, seconds=lambda i, j: i))) for n in
               (1, 2, 4, 8, 16)}  # fmt: skip
    profiles = gather_objects(bench.over, profile(bench.model, bench.place, Call(bench.ids(1))))
    seconds, ratio = slowest(profiles)
    situation = Situation(num_stages=STAGES, seconds=seconds, backward_over_forward=ratio)
    planned = list(Planned().slices(options.length, situation))
    batches = (2, 8) if "torch" in parts else ()
    steps: dict[str, Step] = {f"alone {b}": bench.alone(b) for b in (1, *batches)}
    steps |= {f"uniform {n}": bench.sliced(1, slices) for n, slices in uniform.items()}
    steps |= {"planned": bench.sliced(1, planned)}
    steps |= {f"sliced {b}": bench.sliced(b, planned, b) for b in batches}
    if "torch" in parts:
        steps |= {f"GPipe {b}": bench.torch_pipelining(ScheduleGPipe, b) for b in (1, *batches)}
        steps |= {f"1F1B {b}": bench.torch_pipelining(Schedule1F1B, b) for b in batches}
    bench.turn(
        {name: step for name, step in steps.items() if not name.endswith(" 8")}
    )  # a batch of eight warms nothing
    rows = [bench.turn(steps) for _ in range(options.turns)]
    predicted = {}
    for name, slices in {**{f"uniform {n}": s for n, s in uniform.items()}, "planned": planned}.items():
        costs = lambda action, slices=slices: action_seconds(profiles, slices, action)  # noqa: E731
        predicted[name] = forecast(OneForwardOneBackward(), STAGES, 1, len(slices), costs).seconds
    memory = {
        f"{type(schedule).__name__} {m} x {n}": (
            saved_bytes(bench, schedule, m, uniform[n]), in_flight(schedule.actions(STAGES, m, n)[rank])
        )
        for schedule in (TeraPipe(), OneForwardOneBackward())
        for m, n in (((4, 1), (4, 4), (4, 8)) if "memory" in parts else ())
    }  # fmt: skip
    results[rank] = {"rows": rows, "planned": planned, "predicted": predicted, "memory": memory,
                     "errors": [(p.forward.error, p.backward.error) for p in profiles]}  # fmt: skip
    dist.destroy_process_group()


def median(rows: list[dict[str, Any]], name: str, index: int = 0) -> float:
    return statistics.median(row[name][index] for row in rows)


def replayed(found: list[dict[str, Any]], name: str, slices: int) -> float:
    """Makespan of the step if every action took the median of its processor seconds."""
    rows = [row[name][2] for stage in found for row in stage["rows"]]
    seconds: dict[str, float] = {
        action: statistics.median(row[action] for row in rows if action in row) for action in set().union(*rows)
    }
    return forecast(OneForwardOneBackward(), STAGES, 1, slices, lambda action: seconds[str(action)]).seconds


def report(found: list[dict[str, Any]]) -> None:
    rows, theirs = found[0]["rows"], found[1]["rows"]
    whole_seconds, whole_own = median(rows, "alone 1"), median(rows, "alone 1", 1)
    console = Console(width=190)
    table = Table(
        "batch 1", "bound 2S/(S+1)", "x one process, replayed", "share of the bound", "slicing", "unevenness",
        "predicted / replayed", "predicted / measured s", "x one process, seconds",
    )  # fmt: skip
    for name in [n for n in rows[0] if n.startswith("uniform") or n == "planned"]:
        count = len(found[0]["planned"]) if name == "planned" else int(name.split()[1])
        step, bound = replayed(found, name, count), 2 * count / (count + 1)
        stages = [
            sum(statistics.median(r[name][2][a] for r in half) for a in half[0][name][2]) for half in (rows, theirs)
        ]
        slicing, uneven = sum(stages) / whole_own, 2 * max(stages) / sum(stages)
        guess, seconds = found[0]["predicted"][name], median(rows, name)
        shares = [slicing, uneven, guess / step, guess / seconds]
        cells = [bound, whole_own / step, whole_own / step / bound, *shares, whole_seconds / seconds]
        table.add_row(f"{name} ({count} slices)", *(f"{cell:.2f}" for cell in cells))
    console.print(table)
    compare(rows, console)
    columns = [f"stage {r}: {title}" for r in range(STAGES) for title in ("MB held", "chunks by formula", "MB a chunk")]
    table = Table("schedule, micro-batches x slices", *columns)
    for name in found[0]["memory"]:
        pairs = [(f["memory"][name][0] / 1e6, f["memory"][name][1]) for f in found]
        table.add_row(name, *(text for held, n in pairs for text in (f"{held:,.1f}", str(n), f"{held / n:,.2f}")))
    if found[0]["memory"]:
        console.print(table)
    errors = ", ".join(f"{forward:.1%} {backward:.1%}" for forward, backward in found[0]["errors"])
    print(f"planned: {found[0]['planned']}; errors of the fit (forward, backward of each stage): {errors}")


def compare(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("batch", "slices", "GPipe", "1F1B", title="x one process, seconds; the last two of torch")
    for batch, name in ((1, "planned"), (2, "sliced 2"), (8, "sliced 8")):
        if f"GPipe {batch}" not in rows[0]:
            return
        one, keys = median(rows, f"alone {batch}"), (name, f"GPipe {batch}", f"1F1B {batch}")
        table.add_row(str(batch), *(f"{one / median(rows, k):.2f}" if k in rows[0] else "refused" for k in keys))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument(
        "--parts", nargs="+", default=["slices", "torch", "memory"], choices=["slices", "torch", "memory"]
    )
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence")
    parser.add_argument("--port", type=int, default=29517)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results", help="where results go")
    options = parser.parse_args()
    results = torch.multiprocessing.get_context("spawn").Manager().dict()
    torch.multiprocessing.spawn(work, args=(options, results), nprocs=STAGES)
    found = [results[rank] for rank in range(STAGES)]
    report(found)
    path = options.folder / f"token-pipeline-{slug()}.json"
    path.write_text(json.dumps({"hardware": description(), "stages": found}, indent=1))
    print(f"raw results: {path}")


if __name__ == "__main__":
    main()
