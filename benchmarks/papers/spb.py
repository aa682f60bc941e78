"""Structured partial backpropagation: bandwidth, compute and memory by depth from the package's plan, and its quality.

Costs are `partial.plan.cost`'s for equal blocks and for measured profiles of a ResNet and a GPT, compared with what one
run measured by depth. Quality comes from committed trainings (`partial.py accuracy`): three seeds, two workers, depth
for depth the same batches. Source: Kumar et al. 2111.10672.
"""

import json
from collections.abc import Sequence
from functools import cache
from statistics import mean
from typing import Any

from common.paths import RESULTS
from lightning_decentral.partial.plan.cost import compute_fraction, memory_fraction
from lightning_decentral.partial.plan.depth import Staircase
from lightning_decentral.shared.plan.profile import BlockCost, read
from papers.row import Row, write

BLOCKS, DEPTHS, WORKERS = 12, (9, 6, 3, 1), (2, 4, 8)
EQUAL = (BlockCost("", 1.0, 2.0, parameter_bytes=1, saved_bytes=1),) * BLOCKS
METRICS = {"resnet": "accuracy", "vit": "accuracy", "gpt": "loss"}
STAIRS = "staircase, equal steps"
TURNS = "full and half in turn, warm-up of a quarter, equal"


def committed(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"partial-{name}-2-cores.json").read_text())
    return found


def traffic_fraction(costs: Sequence[BlockCost], depth: int) -> float:
    """Gradients of the top `depth` blocks against all."""
    return sum(c.parameter_bytes for c in costs[-depth:]) / sum(c.parameter_bytes for c in costs)


def profiled(name: str) -> tuple[BlockCost, ...]:
    return tuple(read(RESULTS / f"profile-{name}-2-cores.json").model.blocks)


def stairs(workers: int) -> dict[str, float]:
    """Means over workers of a staircase on equal blocks, one a worker."""
    depths = [Staircase().depth(rank, workers, 0, workers) for rank in range(workers)]
    costs = EQUAL[:1] * workers
    return {
        "compute": mean(compute_fraction(costs, depth) for depth in depths),
        "activations": mean(memory_fraction(costs, depth) for depth in depths),
    }


def measured(depth: int) -> dict[str, float]:
    """{what: of a step at this depth of the twelve blocks against `ddp`}, least over turns."""
    rows = committed("cost")["rows"]
    least = {key: {what: min(turn[what] for turn in turns) for what in turns[0]} for key, turns in rows.items()}
    return {what: least[str(depth)][what] / value for what, value in least["ddp"].items()}


@cache
def quality(recipe: str, run: str) -> tuple[float, float]:
    """Mean metric of a run over that of `ddp`, and the largest of `ddp`'s seeds' distances from its mean, of it."""
    runs = committed("accuracy")["runs"]
    values, full = ([v for k, v in runs.items() if k.startswith(f"{recipe} | {name} | ")] for name in (run, "ddp"))
    return mean(values) / mean(full), max(abs(v / mean(full) - 1) for v in full)


def row() -> Row:
    half = {"ResNet, top 2 of 5 blocks": (profiled("resnet"), 2), "GPT, top 2 of 4 blocks": (profiled("gpt"), 2)}
    fractions = {"compute": compute_fraction, "activations": memory_fraction, "gradients": traffic_fraction}
    return Row(
        name="spb",
        paper="2111.10672",
        title="SPB",
        headline="less bandwidth, compute and memory while preserving model quality (abstract)",
        compared=(
            *(
                (f"{recipe}, test {metric} of the staircase over full depth's", 1.0, quality(recipe, STAIRS)[0])
                for recipe, metric in METRICS.items()
            ),
            *(
                (f"{recipe}, test {metric}, half the steps at half depth, equal {kind}", 1.0,
                 quality(recipe, f"{TURNS} {kind}")[0])
                for recipe, metric in METRICS.items()
                for kind in ("steps", "compute")
            ),
        ),
        kind="measured",
        assumptions=(
            "Preserved quality is taken as a ratio of 1 to `ddp` with the same batches, optimizer and steps; equal "
            "compute trains longer, as long as the saving allows.",
            "Trainings are small: three recipes of the package on two workers, means of three seeds; the staircase has "
            "depths 1/2 and 1.",
            "Turns of full and half depth begin after a quarter of the run at full depth.",
            "Costs by depth are the plan's: a backward of two forwards, activations and gradients of the top blocks; "
            "measured ones are a chain of twelve equal blocks against `ddp`.",
        ),
        cannot_compare="Their models, data and numbers by depth: only the abstract was at hand, and there is no public "
        "code.",
        contradicts="Quality isn't preserved on GPT: its loss is 2.6 % higher under the staircase, nine times what "
        "seeds of full depth differ. On the ResNet the top has 76 % of the gradients: it saves compute and memory.",
        further=(
            *((f"{name}, seeds of full depth from their mean, at most", quality(name, STAIRS)[1]) for name in METRICS),
            *((f"equal blocks, top {d} of 12: {what}", of(EQUAL, d)) for d in DEPTHS for what, of in fractions.items()),
            *((f"measured, top {d} of 12: {what}", value) for d in DEPTHS for what, value in measured(d).items()),
            *((f"{name}: {what}", of(*at)) for name, at in half.items() for what, of in fractions.items()),
            *((f"staircase of {n}: mean {what}", value) for n in WORKERS for what, value in stairs(n).items()),
        ),
    )  # fmt: skip


def main() -> None:
    write(row())
