"""Seconds of a rehearsal beyond those that its gradients need.

    python benchmarks/rehearse.py cost   # two minutes

It is the processor time of all threads over whole steps, against forward and backward alone, one torch thread. The same
is counted of `plain` training: one worker's forward, backward, clipping and update, by loops of torch's own.
"""

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import _configure_optimizers
from rich.console import Console
from rich.progress import track

from common.hardware import description, slug
from common.paths import RESULTS
from common.quiet_recipe import built, composed, own_batches
from lightning_decentral.planner.forecasts import strategy_of
from lightning_decentral.planner.rehearsal.rehearse import METHODS
from lightning_decentral.planner.rehearsal.worker import QUIET, quiet
from rehearse.compared import crew_of
from rehearse.seconds import HOSTS, RECIPES, SEED

COST_STEPS, TURNS, PLAIN = 30, 3, "plain"


def shares() -> dict[str, float]:
    """{method, or plain: processor time of steps over that of forward and backward}, median of turns."""
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[], float]] = {PLAIN: _plain_share}
    kinds |= {one.title: partial(_share, one.overrides) for one in METHODS}
    turns = [{title: share() for title, share in kinds.items()} for _ in track(range(TURNS), "cost")]
    return {title: statistics.median(turn[title] for turn in turns) for title in kinds}


def _plain_share() -> float:
    cfg = composed([*RECIPES["gpt"].words], SEED)
    data, module, _ = built(cfg)
    module.trainer = Trainer(max_steps=RECIPES["gpt"].steps, **QUIET)
    (optimizer,), *_ = _configure_optimizers(quiet(module).train().configure_optimizers())
    batches = own_batches(data, HOSTS, 0)
    rows = [next(batches) for _ in range(3 + COST_STEPS)]

    def train(some: list[Any]) -> None:
        for index, batch in enumerate(some):
            loss = module.training_step(batch, index)
            optimizer.zero_grad()
            module.backward(loss)
            torch.nn.utils.clip_grad_norm_(module.parameters(), cfg.trainer.gradient_clip_val)
            optimizer.step()

    train(rows[:3])
    needed, begun = _counted(module, module), time.process_time()
    train(rows[3:])
    return (time.process_time() - begun) / sum(needed)


def _share(words: str) -> float:
    _, _, make = crew_of(RECIPES["gpt"], [], strategy_of(words))
    with make(1.0) as crew:
        crew.train(3)
        needed = [_counted(worker.module, worker.binding.precision_plugin) for worker in crew.workers]
        begun = time.process_time()
        crew.train(COST_STEPS)
        return (time.process_time() - begun) / sum(map(sum, needed))


def _counted(module: Any, going_back: Any) -> list[float]:
    """Seconds of each forward and backward from now on; who goes back isn't the module, which would be seen."""
    found: list[float] = []

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            begun = time.process_time()
            result = call(*given)
            found.append(time.process_time() - begun)
            return result

        return counted

    module.training_step, going_back.backward = timed(module.training_step), timed(going_back.backward)
    return found


def main() -> None:
    found = shares()
    plain = found.pop(PLAIN)
    kept = {"cost": found, "plain_cost": plain, "hardware": description()}
    (RESULTS / f"rehearsed-cost-{slug()}.json").write_text(json.dumps(kept, indent=1) + "\n")
    Console().print(kept)
