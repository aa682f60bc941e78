"""What a rehearsal foretells from little, against what came: steps beyond those rehearsed, and steps of more workers.

    nice python benchmarks/rehearse.py foretold          # about five minutes on two cores; a busy machine will do
    nice python benchmarks/rehearse.py foretold --apart  # what disagreement costs; about a minute
    python benchmarks/rehearse.py foretold --whole       # a rehearsal as users ask for it: at most ten minutes

Beyond: every committed curve of `loss/per_second.py` is cut off after 0.3, 0.4, ... of its steps, and the steps to the
loss that it has 1.1 to 1.5 times as far are extrapolated as a rehearsal does.

Noise: `ddp` is rehearsed on 2 to 16 workers, `gpt` with AdamW and `vit` with its own optimizer. The noise scale of the
gradients on two workers predicts the ratio of the steps to a loss; rehearsals on more workers measure it.

Apart: what the disagreement of gossip's workers costs after 44 of 300 steps, while learning rates are high, under
several methods on 4 and 8 workers. The probe of the first one, on 4 workers, foretells it for all.

Whole: `lightning-decentral rehearse` with its defaults, six methods on four workers, 300 steps of `gpt`: its minutes,
what it prints, its processor time over that of its forwards and backwards (`rehearse/gradients.py`), and how long as
many of them take by themselves, one after the other: on all of torch's threads or on one, whichever is faster, mean of
before and behind.

Writes `results/foretold-<hardware>.json`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from common.hardware import description, slug
from common.paths import RESULTS, command
from common.quiet_recipe import built, composed, own_batches
from lightning_decentral.planner.forecasts import strategy_of
from lightning_decentral.planner.noise import steps_ratio
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.evaluation import HeldOutEvaluation, held_out
from lightning_decentral.planner.rehearsal.excess_loss import Drift, excess_now, probed
from lightning_decentral.planner.rehearsal.loop_settings import LoopSettings, loss_of
from lightning_decentral.planner.rehearsal.rehearse import METHODS
from lightning_decentral.planner.rehearsal.search import (
    Found,
    SearchCourse,
    beyond,
    reached,
    search,
    smoothed,
)
from lightning_decentral.planner.rehearsal.worker import copies_of, data_of, quiet

CURVES = RESULTS / "loss-per-second-2-cores.json"
PARTS, FARTHER = (0.3, 0.4, 0.5, 0.6), (1.1, 1.2, 1.3, 1.4, 1.5)
WORKERS, STEPS = (2, 4, 8, 16), 300
TARGETS = {"gpt": (2.6, 2.4, 2.3), "vit": (1.6, 1.2, 0.9)}
APART = {
    "gossip": "strategy=gossip",
    "gossip, ring": "strategy=gossip strategy/topology=ring",
    "gossip, int8": "strategy=gossip strategy/codec=int8",
    "gossip, every eighth step": "strategy=gossip strategy/topology=every",
    "streamed outer rounds": METHODS[-1].overrides,
}
APART_OF = {4: [*APART], 8: ["gossip, ring", "gossip, every eighth step"]}
APART_STEPS = 44
"""Four behind the last of every eighth."""
SAID = ("the noise", "the disagreement", "so the learning", "on 4 workers", "~", "train with", "stay", "recipe=")


def far() -> dict[str, Any]:
    """Relative errors of extrapolated steps."""
    errors: list[float] = []
    missed = 0
    for runs in json.loads(CURVES.read_text())["curves"].values():
        for run in runs.values():
            points = smoothed(list(zip(run["steps"], run["scores"], strict=True)))
            for part, times in ((p, t) for p in PARTS for t in FARTHER):
                seen = [point for point in points if point[0] <= part * points[-1][0]]
                there = next((loss for step, loss in points if step >= times * seen[-1][0]), None)
                came = None if there is None else reached(points, there)
                if there is None or came is None or reached(seen, there) is not None:
                    continue
                foreseen = beyond(seen, there)
                if foreseen is None:
                    missed += 1
                else:
                    errors.append(foreseen / came - 1)
    off = sorted(map(abs, errors))
    found = {"extrapolated": len(off), "too far": missed, "median off": statistics.median(off)}
    return {**found, "nine in ten within": off[int(0.9 * len(off))], "bias": statistics.median(errors)}


def trained(recipe: str, workers: int) -> Found:
    make, evaluation = making(recipe, workers, "strategy=ddp")
    return search(make, [1.0], SearchCourse(STEPS, 0.0, evaluation, lambda: None))


def making(recipe: str, workers: int, words: str) -> tuple[Callable[[float], Crew], HeldOutEvaluation]:
    """(What makes the crew at a learning rate, what its losses are taken by)."""
    cfg = composed([f"recipe={recipe}"], 0)
    data, module, _ = built(cfg)
    given = data_of(data)
    batches = copies_of(given)
    clip = cfg.trainer.gradient_clip_val

    def make(rate: float) -> Crew:
        return Crew(module, batches, strategy_of(words), workers, STEPS, loop=LoopSettings(clip, rate, STEPS))

    return make, HeldOutEvaluation(module, held_out(module, given, None))


def apart(recipe: str) -> Iterator[dict[str, Any]]:
    """Yield what disagreement costs each method while it learns fast, predicted and measured."""
    drift: Drift | None = None
    for workers, title in ((n, title) for n, titles in APART_OF.items() for title in titles):
        make, evaluation = making(recipe, workers, APART[title])
        with make(1.0) as crew:
            crew.train(APART_STEPS)
            came, learning_rate = excess_now(crew, evaluation), crew.learning_rate
            drift = drift or probed(crew, evaluation, 1.0)
        assert drift is not None
        foretold = drift.excess(strategy_of(APART[title]), workers, 1, learning_rate)
        yield {"method": title, "workers": workers, "foretold": foretold, "came": came, "drift": asdict(drift)}


def noisy(recipe: str) -> dict[str, Any]:
    """Steps to each target by workers; what the noise on the fewest workers foretells of the others."""
    found = {workers: trained(recipe, workers) for workers in track(WORKERS, f"{recipe}, noise")}
    first = WORKERS[0]
    noise, rows = found[first].noise or 0.0, []
    for target in TARGETS[recipe]:
        base = reached(found[first].points, target)
        for workers in WORKERS[1:]:
            steps = reached(found[workers].points, target)
            if base and steps:
                foretold = steps_ratio(noise, first, workers)
                rows.append({"target": target, "workers": workers, "foretold": foretold, "came": steps / base})
    noises = {workers: one.noise for workers, one in found.items()}
    return {"noise": noises, "losses": {workers: one.loss for workers, one in found.items()}, "rows": rows}


class Loss(nn.Module):
    """training_step as a forward, which is what `functional_call` calls."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> torch.Tensor:
        return loss_of(self.module.training_step(batch, 0))


def whole() -> dict[str, Any]:
    """Minutes of the command, the profile not included; the lines behind its table; what it computes."""
    ours = str(Path(sys.executable).parent / "lightning-decentral")
    with tempfile.TemporaryDirectory() as folder:
        profile = f"{folder}/profile.json"
        subprocess.run([ours, "profile", "recipe=gpt", "--out", profile], check=True, capture_output=True)
        before = alone_seconds("gpt")
        begun = time.monotonic()
        words = ["recipe=gpt", "workers=4", "--profile", profile, "--bandwidth", "200mbit", "--target", "2.2"]
        counting = [*command("rehearse", "gradients"), f"{folder}/counted.json"]
        printed = subprocess.run([*counting, "rehearse", *words], check=True, capture_output=True, text=True)
        counted = json.loads(Path(f"{folder}/counted.json").read_text())
    minutes, lines = (time.monotonic() - begun) / 60, printed.stdout.splitlines()
    alone = counted["gradients"] * (before + alone_seconds("gpt")) / 2 / 60
    behind = [line for line in lines if line.startswith(SAID)]
    return {
        "minutes": minutes,
        "minutes_of_gradients_alone": alone,
        **counted,
        "words": words[:2] + words[4:],
        "lines": behind,
        "printed": lines,
    }


def alone_seconds(recipe: str, times: int = 100) -> float:
    """Return the seconds of a forward and a backward, the median of `times`."""
    data, module, _ = built(composed([f"recipe={recipe}"], 0))
    rows, model, own, found = own_batches(data, WORKERS[1], 0), Loss(quiet(module).train()), torch.get_num_threads(), []
    for threads in (own, 1):
        torch.set_num_threads(threads)
        seconds = []
        for _ in range(times):
            row, begun = next(rows), time.perf_counter()
            model(row).backward()
            seconds.append(time.perf_counter() - begun)
            model.zero_grad()
        found.append(statistics.median(seconds))
    torch.set_num_threads(own)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--apart", action="store_true", help="what disagreement costs, and nothing else")
    parser.add_argument("--whole", action="store_true", help="a rehearsal as users ask for it, and nothing else")
    path = RESULTS / f"foretold-{slug()}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    options = parser.parse_args()
    if options.whole:
        found["whole"] = whole()
    elif options.apart:
        torch.set_num_threads(1)
        found["apart"] = {recipe: list(track(apart(recipe), recipe, total=7)) for recipe in TARGETS}
    else:
        found["beyond"] = far()
        found["noise"] = {recipe: noisy(recipe) for recipe in TARGETS}
    Console().print(found)
    path.write_text(json.dumps({**found, "hardware": description()}, indent=1) + "\n")
