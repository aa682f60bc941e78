"""Losses of `loss/per_second.py` without a network: so many workers rehearsed in one process.

A rehearsal runs the strategy's own rules, codecs and mixers on the batches and random numbers of the run on as many
processes, and ends at the same bits (`docs/rehearse.md`). Not bit for bit, but to rounding:

- where more than two workers all-reduce, which is `ddp`: sums are made in another order;
- an update of several accumulated batches is that of one large batch;
- torch's half-precision hook is left out: on four hosts it moved no mean over three seeds by more than 0.002;
- torchft's DiLoCo is our rule of that name, which agrees with it (`tests/gossip/compute/test_outer.py`).

PowerSGD, decent-dp and Muon that is shared out among the workers run on real processes only.
"""

from typing import Any

import torch
from hydra.utils import instantiate

from common.quiet_recipe import built, composed
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.loop_settings import LoopSettings
from lightning_decentral.planner.rehearsal.worker import copies_of, data_of
from loss.methods import SHARED
from loss.peers import LOCAL, OUTER_LR, OUTER_MOMENTUM
from network.accuracy import Recipe, scores
from network.accuracy_worker import NO_END, OWN, flat
from network.speed_worker import all_reduce_bytes

TORCHFT = [
    *["strategy=gossip", "strategy/topology=every", f"strategy.topology.steps={LOCAL}", "strategy.delay=0"],
    *["strategy.topology.inner._target_=lightning_decentral.gossip.Complete", "strategy/combine=outer_nesterov"],
    *[f"strategy.combine.lr={OUTER_LR}", f"strategy.combine.momentum={OUTER_MOMENTUM}"],
]


def can_be_rehearsed(words: list[str]) -> bool:
    return not {"hook=powersgd", "peer=decent_dp", SHARED} & {*words}


def rehearsed(recipe: Recipe, words: list[str], hosts: int, seed: int) -> dict[str, Any]:
    """Score of the mean model after each `every` steps, and bytes that a host sends per step."""
    torch.set_num_threads(1)
    own = dict(word.split("=") for word in words if word.startswith(OWN))
    together, updates = int(own.get("accumulate", 1)), recipe.steps // int(own.get("accumulate", 1))
    if recipe.every % together or recipe.steps % recipe.every:
        raise ValueError(f"marks after {recipe.every} of {recipe.steps} batches, of which an update takes {together}")
    cfg = composed([*recipe.words, *_strategy(words), f"trainer.max_steps={updates}", *NO_END], seed)
    cfg.data.batch_size *= together
    data, module, _ = built(cfg)
    batches, loop = copies_of(data_of(data)), LoopSettings(cfg.trainer.gradient_clip_val, 1.0, updates)
    strategy, rows = instantiate(cfg.strategy, _convert_="all"), []
    steps = list(range(recipe.every, recipe.steps + 1, recipe.every))
    with Crew(module, batches, strategy, hosts, updates, loop=loop) as crew:
        for _ in steps:
            crew.train(recipe.every // together)
            rows.append(torch.stack([flat(worker.module) for worker in crew.workers]).mean(0))  # type: ignore[arg-type]
        sent = crew.members[0].sent_bytes / steps[-1]
    numbers = sum(p.numel() for p in module.parameters())
    if "strategy=ddp" in words:
        sent = all_reduce_bytes({"parameters": numbers, "hosts": hosts}) / together
        sent /= (2 if own.get("hook") == "fp16" else 1) * (LOCAL if own.get("peer") == "torchft" else 1)
    reached = scores(recipe.words, seed, torch.stack(rows), recipe.score)
    return {"steps": steps, "scores": reached, "bytes_sent": sent, "bytes": 4 * numbers, "rehearsed": True}


def _strategy(words: list[str]) -> list[str]:
    """Hydra's overrides, torchft's translated to ours."""
    kept = [word for word in words if not word.startswith(OWN)]
    if "peer=torchft" not in words:
        return kept
    return [*TORCHFT, *(word for word in kept if not word.startswith("strategy"))]
