"""AccumAdam's quality at fixed iterations: 16 rehearsed workers, all methods at one rate and each at its best of three.

    python benchmarks/papers.py accumadam               # the row, from what was measured
    python benchmarks/papers.py accumadam --measure     # some 20 minutes: what isn't in the results yet

Workers are those of a run on as many processes (`docs/rehearse.md`), four to a node. Every method takes the same
batches from the same first values under the same schedule; only optimizer, strategy and learning rate differ.
Losses are those of the mean of the workers' models on the same held-out batches.

Source: Wang et al. 2410.11998, tables of BLEU and of top-1; betas and windows are its.
"""

import json
import statistics
import sys
from itertools import combinations
from typing import Any

import torch
from hydra.utils import instantiate
from torch.utils.data import DataLoader, Subset

from common.hardware import description
from common.paths import RESULTS
from common.quiet_recipe import built, composed
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.evaluation import HeldOutEvaluation
from lightning_decentral.planner.rehearsal.loop_settings import LoopSettings
from lightning_decentral.planner.rehearsal.worker import copies_of, data_of
from network.accuracy import EXAMPLES
from papers.row import Row, write

WORKERS, PER_NODE, STEPS = 16, 4, 100
SHORT = 5  # steps of a run that a test repeats: one behind an AccumAdam window
RECIPE_RATE, RATES = 3e-3, (1.0, 3.0, 1 / 3)
"""The recipe's learning rate, and what it is multiplied by; the first is the one that nobody tuned."""
RING = ["strategy/topology=alternating_exponential_ring", f"strategy.topology.workers_per_node={PER_NODE}"]
ACCUMULATED = ["strategy=gossip", "optimizer=accum_adam", "optimizer.betas=[0.9,0.999]", "optimizer.window=4"]
METHODS = {
    "all-reduce, Adam": ["strategy=ddp", "optimizer=adam", "optimizer.betas=[0.9,0.98]"],
    "ring, Adam": ["strategy=gossip", "optimizer=adam", "optimizer.betas=[0.974,0.999]", *RING],
    "ring, AccumAdam": [*ACCUMULATED, *RING],
    "complete, AccumAdam": [*ACCUMULATED, "strategy/topology=complete"],
}
MEASURED = RESULTS / "accumadam-16-workers-2-cores.json"


def loss(words: list[str], rate: float, steps: int = STEPS) -> float:
    """The mean model's held-out loss after so many steps."""
    cfg = composed(["recipe=gpt", *words, f"trainer.max_steps={steps}", "trainer.max_epochs=-1"], seed=0)
    data, module, _ = built(cfg)
    strategy, batches = instantiate(cfg.strategy, _convert_="all"), copies_of(data_of(data))
    loop = LoopSettings(cfg.trainer.gradient_clip_val, rate, steps)
    with Crew(module, batches, strategy, WORKERS, steps, per_node=PER_NODE, loop=loop) as crew:
        crew.train(steps)
        crew.release()
        data.setup("test")
        tests = DataLoader(Subset(data.splits["test"], range(EXAMPLES)), batch_size=EXAMPLES // 4)
        return HeldOutEvaluation(module, list(tests)).loss([worker.module for worker in crew.workers])


def measure() -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(MEASURED.read_text()) if MEASURED.exists() else {"losses": {}}
    for rate in RATES:
        for method, words in METHODS.items():
            losses = found["losses"].setdefault(method, {})
            if f"{rate:.3g}" not in losses:
                losses[f"{rate:.3g}"] = round(loss(words, rate), 4)
                print(method, rate, losses[f"{rate:.3g}"], flush=True)
                MEASURED.write_text(json.dumps(found | {"hardware": description()}, indent=1) + "\n")
    found["short"] = {method: round(loss(words, 1.0, SHORT), 4) for method, words in METHODS.items()}
    MEASURED.write_text(json.dumps(found | {"hardware": description()}, indent=1) + "\n")


THEIRS = {
    "BLEU En-De": dict(zip(METHODS, (27.79, 27.58, 27.71, 27.80), strict=True)),
    "top-1 ResNet-50": dict(zip(METHODS, (76.01, 75.31, 76.54, 76.34), strict=True)),
}
LONG = {"all-reduce, AdamW": "ddp", "all-reduce, AccumAdamW": "ddp, AccumAdamW"} | {
    "hypercube, int8, AccumAdamW": "gossip, int8, AccumAdamW"
}
"""{label: method} of the committed runs of 1,080 steps on four hosts."""


def pairs_in_order(losses: dict[str, float], scores: dict[str, float]) -> int:
    """Number of pairs of methods, of six, in which the lower loss has the higher score."""
    return sum((losses[a] < losses[b]) == (scores[a] > scores[b]) for a, b in combinations(METHODS, 2))


def longer(method: str) -> float:
    """Last loss of the committed runs, the mean of three seeds."""
    curves = json.loads((RESULTS / "loss-per-second-2-cores.json").read_text())["curves"]
    return float(statistics.mean(curves[f"gpt 4 {seed}"][method]["scores"][-1] for seed in range(3)))


def row() -> Row:
    losses: dict[str, dict[str, float]] = json.loads(MEASURED.read_text())["losses"]
    untuned, low = ({method: of[times] for method, of in losses.items()} for times in ("1", "0.333"))
    tuned = {method: min(of.values()) for method, of in losses.items()}
    reduced, *others = METHODS
    gossiped = min(tuned[method] for method in others)
    compared = [
        (f"pairs of methods in the order of {what}{how}", 6.0, float(pairs_in_order(found, scores)))
        for what, scores in THEIRS.items()
        for how, found in ((", one rate", untuned), (", best of three rates", tuned), (", rate 0.001", low))
    ]
    return Row(
        name="accumadam",
        paper="2410.11998",
        title="AccumAdam: quality",
        headline="AccumAdam on the alternating ring: BLEU -0.08, top-1 +0.53 against all-reduce at one rate (tables)",
        compared=tuple(compared),
        kind="measured",
        assumptions=(
            "16 workers of four nodes in one process, as many as behind their BLEU; a small GPT on bytes, 100 steps, "
            "one seed.",
            "Window 4 and betas (0.9, 0.999) of AccumAdam, Adam's (0.974, 0.999) on the ring and (0.9, 0.98) under "
            "all-reduce are the authors', those of Adam for 16 workers.",
            "Rates 0.001, 0.003 and 0.009, with the recipe's warm-up and cosine. The recipe's own, 0.003, was the best "
            "of the three for each method.",
            "Our score is the held-out loss of the workers' mean; only signs and orders are compared with theirs.",
        ),
        cannot_compare="BLEU and top-1 themselves: Transformer and ResNet-50 take days of 16 to 32 GPUs. "
        "100 steps are 25 windows of AccumAdam; gains of long training can't show.",
        contradicts="All-reduce leads by 0.26 at the best rate. Where its own is 3 x off, 0.09 to 0.17 are left: one "
        "rate can hide most of a gap, but none of the three puts the ring ahead. There AccumAdam is ahead of Adam "
        "by 0.10 at 0.001, and behind at 0.003 and 0.009: the authors' gain is one at their rate. Over 1,080 steps "
        "AccumAdam helps all-reduce, too.",
        further=(
            *((f"{method}, rate {RECIPE_RATE * rate:.3g}: loss", losses[method][f"{rate:.3g}"])
              for method in METHODS for rate in sorted(RATES)),
            ("lead of all-reduce, each at its best rate", gossiped - tuned[reduced]),
            *((f"lead of AccumAdam over Adam on the ring, rate {RECIPE_RATE * rate:.3g}",
               losses["ring, Adam"][f"{rate:.3g}"] - losses["ring, AccumAdam"][f"{rate:.3g}"])
              for rate in sorted(RATES)),
            *((f"lead of all-reduce at rate {RECIPE_RATE * rate:.3g} over the others at their best",
               gossiped - losses[reduced][f"{rate:.3g}"]) for rate in sorted(RATES)),
            *((f"1,080 steps, 4 hosts: {label}, loss", longer(method)) for label, method in LONG.items()),
            *((f"theirs, {what}: AccumAdam on the ring less all-reduce", of["ring, AccumAdam"] - of[reduced])
              for what, of in THEIRS.items()),
        ),
    )  # fmt: skip


def main() -> None:
    if sys.argv[1:] == ["--measure"]:
        measure()
    write(row())
