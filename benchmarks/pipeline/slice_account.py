"""What cutting a sequence into slices costs one process, operation by operation.

    python benchmarks/pipeline.py slice_account

The model of `token_pipeline` as a single stage of one thread: a step of the whole sequence and the same step in
slices, without any wait. First the processor seconds of each (the least of several turns), without the profiler; then,
under the profiler, which itself adds to every call, the operations whose own time differs most.
"""

import argparse
import os
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from lightning_decentral.pipeline import Keep, OneForwardOneBackward
from lightning_decentral.pipeline.compute.causal.trial import adapted
from lightning_decentral.pipeline.compute.model import Call, StagePlace
from lightning_decentral.pipeline.compute.stage import Stage
from lightning_decentral.pipeline.wire.executor import Channel, Executor
from pipeline.stages import Size, token_mean

Step = Callable[[], None]
Account = dict[str, tuple[float, int]]
BETWEEN = "Python, between operations"


def alone(size: Size, ids: torch.Tensor) -> Step:
    model = size.model()

    def step() -> None:
        token_mean(model(input_ids=ids).logits, ids).backward()
        model.zero_grad()

    return step


def sliced(size: Size, ids: torch.Tensor, count: int) -> Step:
    model, tokens = adapted(size.model()), ids.shape[1]
    actions = OneForwardOneBackward().actions(1, 1, count)[0]

    def step() -> None:
        stage = Stage(model, StagePlace(0, size.blocks, True, True), [Call(ids)], [tokens // count] * count, Keep())
        Executor(stage, Channel({}, {}, torch.device("cpu")), lambda m, logits: token_mean(logits, ids)).run(actions)
        model.module.zero_grad()

    return step


def seconds(step: Step) -> float:
    begin = time.thread_time()
    step()
    return time.thread_time() - begin


def account(step: Step) -> Account:
    """(own milliseconds, calls) of each operation of one step."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    rows: Account = {}
    for event in found.key_averages():
        key = BETWEEN if "micro-batch" in event.key else event.key  # what an action does outside any operation
        ms, calls = rows.get(key, (0.0, 0))
        rows[key] = ms + event.self_cpu_time_total / 1e3, calls + event.count
    return rows


def report(steps: dict[str, Step], turns: int, rows: int) -> None:
    times = [{name: seconds(step) for name, step in steps.items()} for _ in range(turns + 1)][1:]
    least = {name: min(turn[name] for turn in times) for name in steps}
    console = Console(width=160)
    accounts = {name: account(step) for name, step in steps.items()}
    table = Table("operation: own ms (calls)", *steps)
    table.add_row("all, unprofiled ms", *(f"{1e3 * least[name]:.1f}" for name in steps))
    table.add_row("against the whole", *(f"{least[name] / least['whole']:.3f}" for name in steps))
    first, *_, last = accounts.values()
    own = lambda found, key: found.get(key, (0.0, 0))  # noqa: E731
    for key in sorted({*first, *last}, key=lambda k: own(first, k)[0] - own(last, k)[0])[:rows]:
        table.add_row(key[:60], *("{:.1f} ({})".format(*own(found, key)) for found in accounts.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slices", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--turns", type=int, default=5)
    Size.options(parser)
    parser.add_argument("--rows", type=int, default=20, help="operations shown")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = Size.of(options)
    ids = torch.randint(0, 256, (1, size.length_tokens), generator=torch.Generator().manual_seed(1))
    steps = {"whole": alone(size, ids), **{f"{n} slices": sliced(size, ids, n) for n in options.slices}}
    report(steps, options.turns, options.rows)
