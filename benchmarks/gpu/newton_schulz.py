"""What Newton-Schulz costs, equal shapes in one call against one matrix after the other, and torch's against both.

    python benchmarks/gpu.py newton_schulz            # one thread
    python benchmarks/gpu.py newton_schulz --device cuda

Timed are the hidden matrices of a model, all of one update: `together`, as `Muon` does it; `one by one`, the same code
on one matrix at a time; both also in bfloat16 (the default on devices); `torch's`, the function that
`torch.optim.Muon` calls for each matrix, in bfloat16 (missing before torch 2.9). Beside them the whole update: `Muon`
and `torch.optim.AdamW` (foreach) for all parameters. All take turns, so that a neighbour's load on the machine hits
all; medians over the turns. On the CPU the seconds are those that the one thread computed; on a device they are wall
seconds. Writes `results/newton-schulz-<hardware>.json`, which holds every turn.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from common.paths import RESULTS

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from common.hardware import description, slug
from lightning_decentral.optim import Muon, muon_groups
from lightning_decentral.optim.newton_schulz import COEFFICIENTS, SMALLEST_NORM, orthogonalize

torch.set_num_threads(1)
STEPS = 5
MODELS = {  # (width, blocks) of GPT-2, its vocabulary left small: tables and heads aren't hidden
    "small": (32, 4),
    "gpt recipe": (96, 2),
    "twice as wide and deep": (192, 4),
    "one block of GPT-2": (768, 1),
}
ON_A_DEVICE = {"GPT-2 small": (768, 12)}


def gpt2(width: int, blocks: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=width, n_layer=blocks, n_head=4, vocab_size=256, n_positions=64, bos_token_id=None, eos_token_id=None
        )
    )


def one_by_one(matrices: Sequence[Tensor], dtype: torch.dtype | None = None) -> None:
    for matrix in matrices:
        orthogonalize([matrix], dtype=dtype)


def torchs(matrices: Sequence[Tensor]) -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    for matrix in matrices:
        matrix.copy_(_zeropower_via_newtonschulz(matrix, COEFFICIENTS, STEPS, SMALLEST_NORM))


def calls(width: int, blocks: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name."""
    model = gpt2(width, blocks).to(device)
    groups = muon_groups(model)
    matrices = [torch.randn_like(p) for p in groups[0]["params"]]
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    muon, adamw = Muon(groups, lr=1e-4), torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    ways: dict[str, Callable[[], Any]] = {
        "together": lambda: orthogonalize(matrices),
        "bfloat16, together": lambda: orthogonalize(matrices, dtype=torch.bfloat16),
        "bfloat16, one by one": lambda: one_by_one(matrices, torch.bfloat16),
        "one by one": lambda: one_by_one(matrices),
        "torch's": lambda: torchs(matrices),
        "Muon": muon.step,
        "AdamW": adamw.step,
    }
    return ways if "Muon" in dir(torch.optim) else {name: way for name, way in ways.items() if name != "torch's"}


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Computed by this thread in one call, or until the device is done."""
    if device.type == "cpu":
        started = time.thread_time()
        call()
        return time.thread_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(width: int, blocks: int, turns: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds by way and turn, after two turns that don't count."""
    ways = calls(width, blocks, device)
    rows: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 2):
        for name, way in ways.items():
            taken = seconds(way, device)
            rows[name] += [taken] if turn >= 2 else []
    return rows


def summary(name: str, rows: dict[str, list[float]]) -> dict[str, Any]:
    """One line of the table: ratios of medians."""
    median = {way: statistics.median(taken) for way, taken in rows.items()}
    return {
        "model": name,
        "together, ms": round(1e3 * median["together"], 2),
        "one by one": round(median["one by one"] / median["together"], 2),
        "bfloat16, together": round(median["bfloat16, together"] / median["together"], 2),
        "bfloat16, one by one": round(median["bfloat16, one by one"] / median["together"], 2),
        "torch's": round(median["torch's"] / median["together"], 2) if "torch's" in median else None,
        "update, Muon / AdamW": round(median["Muon"] / median["AdamW"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    load, device = os.getloadavg()[0], torch.device(options.device)
    models = MODELS if device.type == "cpu" else {**MODELS, **ON_A_DEVICE}
    results = {name: measure(*shape, options.turns, device) for name, shape in models.items()}
    lines = [summary(name, rows) for name, rows in results.items()]
    table = Table(*lines[0])
    for line in lines:
        table.add_row(*map(str, line.values()))
    Console(width=140).print(table)
    about = {
        "hardware": description(),
        "threads": 1,
        "clock": "thread" if options.device == "cpu" else "wall",
        "load of the machine when it began": round(load, 1),
    }
    path = RESULTS / f"newton-schulz-{slug()}.json"
    path.write_text(json.dumps({**about, "summary": lines, "seconds": results}, indent=1))
    print(f"raw results: {path}")
