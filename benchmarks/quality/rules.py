"""Every rule of gossip on a transformer, with the better of two optimizers: the mean model's loss at equal steps.

    nice python benchmarks/quality.py rules --jobs 2          # about 40 minutes on two cores; a busy machine will do

Each run is a rehearsal (`loss/rehearsed.py`) of 1,080 steps of the `gpt` recipe on four workers, whose bits are those
of so many processes. Each rule is run with Muon and with AccumAdamW, at the rates and momenta of the configurations:
tuned for plain gossip and for `ddp` (`loss/tuning.py`), not for each rule. The better one by the first seed is run with
the others, too. The loss is that of the mean of the workers' models on the test examples. Writes
`results/quality-rules-<hardware>.json`; finished runs are kept in it, so that a broken-off benchmark
goes on where it was.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from rich.progress import track

from common.hardware import description, sentence, slug
from common.paths import RESULTS
from loss.rehearsed import rehearsed
from network.accuracy import RECIPES

WORKERS, STEPS = 4, 1080
SEEDS = (0, 1, 2)
LOCAL = 8
EVERY = ["strategy/topology=every", f"strategy.topology.steps={LOCAL}"]
ALL = "strategy.topology.inner._target_=lightning_decentral.gossip.Complete"
PAIRS = "strategy.topology.inner._target_=lightning_decentral.gossip.RandomMatching"
RULES = {
    "ddp": ["strategy=ddp"],
    "Gossip": [],
    "Gossip, delay 0": ["strategy.delay=0"],
    "Gossip(rate=LearningRatePower())": ["+strategy/combine/rate=learning_rate_power"],
    "ConsensusControl": ["strategy/combine=consensus_control"],
    "PushSum": ["strategy/combine=push_sum", "strategy/topology=exponential"],
    "QuasiGlobalMomentum": ["strategy/combine=quasi_global_momentum"],
    "ExactDiffusion": ["strategy/combine=exact_diffusion", "strategy/topology=ring"],
    "GradientTracking": ["strategy/combine=gradient_tracking"],
    "RelaySum": ["strategy/combine=relay_sum", "strategy/topology=tree", "strategy/weights=dyadic"],
    f"Outer, Every({LOCAL}, RandomMatching())": [*EVERY, PAIRS, "strategy/combine=outer"],
    f"OuterNesterov, Every({LOCAL}, Complete())": [
        *[*EVERY, ALL, "strategy/combine=outer_nesterov", "strategy.delay=0"],
        *["strategy.combine.lr=0.7", "strategy.combine.momentum=0.5"],
    ],
}
OPTIMIZERS = {"Muon": ["optimizer=muon", "optimizer.momentum=0.9"], "AccumAdamW": ["optimizer=accum_adamw"]}
OF_DDP = {"Muon": ["optimizer.momentum=0.8"], "AccumAdamW": []}
# The rule's momentum takes the place of the optimizer's.
WITHOUT_MOMENTUM = {"Muon": ["optimizer.momentum=0"], "AccumAdamW": ["optimizer.betas=[0,0.996]"]}


def words(rule: str, optimizer: str) -> list[str]:
    """Return the overrides of the recipe."""
    if rule == "ddp":
        return [*RULES[rule], *OPTIMIZERS[optimizer], *OF_DDP[optimizer]]
    own = WITHOUT_MOMENTUM[optimizer] if rule == "QuasiGlobalMomentum" else []
    return ["strategy=gossip", *OPTIMIZERS[optimizer], *RULES[rule], *own]


def run(rule: str, optimizer: str, seed: int) -> float:
    """Loss at the end, nats per byte."""
    recipe = RECIPES["gpt"]._replace(steps=STEPS, every=STEPS)
    return float(rehearsed(recipe, words(rule, optimizer), WORKERS, seed)["scores"][-1])


def better(runs: dict[str, float], rule: str) -> str:
    """The optimizer that ends lower with the first seed, of those that have run."""
    ran = [optimizer for optimizer in OPTIMIZERS if f"{rule}, {optimizer}, {SEEDS[0]}" in runs]
    return min(ran, key=lambda optimizer: runs[f"{rule}, {optimizer}, {SEEDS[0]}"])


def first(runs: dict[str, float]) -> list[tuple[str, str, int]]:
    """(rule, optimizer, seed) with the first seed that haven't run."""
    every = [(rule, optimizer, SEEDS[0]) for optimizer in OPTIMIZERS for rule in RULES]
    return [one for one in every if "{}, {}, {}".format(*one) not in runs]


def further(runs: dict[str, float]) -> list[tuple[str, str, int]]:
    """Return further runs with the other rules' better optimizer, when all of the first have run."""
    every = [(rule, better(runs, rule), seed) for seed in SEEDS[1:] for rule in RULES]
    return [one for one in every if "{}, {}, {}".format(*one) not in runs]


def table(runs: dict[str, float]) -> str:
    """Markdown: mean over the seeds that have run, and their standard deviation, against `ddp` with the same seeds."""
    lines = ["| rule | optimizer | seeds | test loss | against ddp | with the other optimizer |", "| --- " * 6 + "|"]
    of_ddp = losses(runs, "ddp")
    for rule in RULES:
        own = losses(runs, rule)
        mean = statistics.mean(own)
        spread = f" ± {statistics.stdev(own):.4f}" if len(own) > 1 else ""
        against = "" if rule == "ddp" else f"{mean - statistics.mean(of_ddp[: len(own)]):+.4f}"
        other = next(optimizer for optimizer in OPTIMIZERS if optimizer != better(runs, rule))
        beside = runs.get(f"{rule}, {other}, {SEEDS[0]}")
        cells = [
            rule,
            better(runs, rule),
            str(len(own)),
            f"{mean:.4f}{spread}",
            against,
            f"{beside:.4f}" if beside else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def losses(runs: dict[str, float], rule: str) -> list[float]:
    """Return the losses with the better optimizer, by seed, as far as they have run."""
    keys = [f"{rule}, {better(runs, rule)}, {seed}" for seed in SEEDS]
    return [runs[key] for key in keys if key in runs]


def page(results: dict[str, Any]) -> str:
    """Markdown of what has run."""
    command = f"`python benchmarks/quality.py rules`, {WORKERS} workers, seeds {list(SEEDS)}"
    return f"{command}: {sentence(results['hardware'])}.\n\n{table(results['runs'])}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, of one thread each")
    options = parser.parse_args()
    path = RESULTS / f"quality-rules-{slug()}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    runs = results.setdefault("runs", {})
    results["hardware"] = description()
    ways: tuple[Callable[[dict[str, float]], list[tuple[str, str, int]]], ...] = (first, further)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for way in ways:
            running = {pool.submit(run, *one): "{}, {}, {}".format(*one) for one in way(runs)}
            for done in track(as_completed(running), way.__name__, total=len(running)):
                runs[running[done]] = done.result()
                path.write_text(json.dumps(results, indent=1) + "\n")
    print(page(results))
