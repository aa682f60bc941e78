"""Every rule of gossip on a transformer, with the better of two optimizers: the mean model's loss at equal steps.

    python benchmarks/quality_rules.py

Each run is `python recipes/train.py recipe=gpt strategy=gossip ...` with four CPU workers, as in `quality.py`: the same
steps and batches. Each rule is run with Muon and with AccumAdamW, at the rates tuned for plain gossip (`ddp`: at its
own); the better one by the first seed is run with the others, too. Some 50 runs of a minute or two. Writes
`results/quality-rules-<hardware>.json` and `.md`; finished runs are kept in the first, so that a broken-off benchmark
goes on where it was.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hardware import description, sentence, slug
from quality import train
from rich.progress import track

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
OPTIMIZERS = {
    "Muon": ["optimizer=muon", "optimizer.lr=2e-2", "optimizer.momentum=0.95"],
    "AccumAdamW": ["optimizer=accum_adamw", "optimizer.lr=6e-3"],
}
# The rule's momentum takes the place of the optimizer's.
WITHOUT_MOMENTUM = {"Muon": ["optimizer.momentum=0"], "AccumAdamW": ["optimizer.betas=[0,0.996]"]}
OF_DDP = {"Muon": ["optimizer.lr=1.2e-2"], "AccumAdamW": []}


def words(rule: str, optimizer: str) -> list[str]:
    """For recipes/train.py."""
    said = [*OPTIMIZERS[optimizer], *RULES[rule]]
    if rule == "ddp":
        return said + OF_DDP[optimizer]
    return ["strategy=gossip", *said, *(WITHOUT_MOMENTUM[optimizer] if rule == "QuasiGlobalMomentum" else [])]


def better(runs: dict[str, float], rule: str) -> str:
    """The optimizer that ends lower with the first seed, of those that have run."""
    ran = [optimizer for optimizer in OPTIMIZERS if f"{rule}, {optimizer}, {SEEDS[0]}" in runs]
    return min(ran, key=lambda optimizer: runs[f"{rule}, {optimizer}, {SEEDS[0]}"])


def todo(runs: dict[str, float]) -> Iterator[tuple[str, str, int]]:
    """(rule, optimizer, seed) of what hasn't run."""
    first = [(rule, optimizer, SEEDS[0]) for optimizer in OPTIMIZERS for rule in RULES]
    yield from (run for run in first if "{}, {}, {}".format(*run) not in runs)
    for seed in SEEDS[1:]:
        for rule in RULES:
            if f"{rule}, {better(runs, rule)}, {seed}" not in runs:
                yield rule, better(runs, rule), seed


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
    """With the better optimizer, by seed, as far as they have run."""
    keys = [f"{rule}, {better(runs, rule)}, {seed}" for seed in SEEDS]
    return [runs[key] for key in keys if key in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="write the table of what has run, and run nothing")
    options = parser.parse_args()
    path = Path(__file__).parent / "results" / f"quality-rules-{slug()}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    runs = results.setdefault("runs", {})
    results["hardware"] = description()
    total = len(RULES) * (len(OPTIMIZERS) + len(SEEDS) - 1)
    for rule, optimizer, seed in () if options.table else track(todo(runs), "runs", total - len(runs)):
        runs[f"{rule}, {optimizer}, {seed}"] = train("gpt", seed, words(rule, optimizer))
        path.write_text(json.dumps(results, indent=1))
    text = (
        f"`python benchmarks/quality_rules.py`, four CPU workers, seeds {list(SEEDS)}: {sentence()}.\n\n{table(runs)}\n"
    )
    path.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
