"""`lightning-decentral cuts recipe=gpt`: where partial backprop would cut a model, and what that would save."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.utils import instantiate
from lightning.pytorch import Trainer
from rich.console import Console
from rich.table import Table

from lightning_decentral.cli.console import answer
from lightning_decentral.partial.agreed import refuse_unserved, run_of
from lightning_decentral.partial.compute.search import CutPlan, search
from lightning_decentral.partial.plan.cost import compute_fraction, memory_fraction
from lightning_decentral.partial.strategy import PartialBackpropStrategy
from lightning_decentral.shared.application import Application


def cut_plan(application: Application, overrides: Sequence[str]) -> CutPlan:
    """Find the cuts that a run with these overrides would find at its first batch, on this machine's CPU."""
    cfg = application.compose(["strategy=partial_backprop", *overrides])
    strategy = instantiate(cfg.strategy, _convert_="all")
    if not isinstance(strategy, PartialBackpropStrategy):
        other = application.choice(overrides, "strategy")
        raise ValueError(f"cuts are those of strategy=partial_backprop: leave out strategy={other}")
    data = instantiate(cfg.data, _convert_="all")
    module = application.build_model(cfg, data.sizes)
    refuse_unserved(module)
    data.prepare_data()
    data.setup("fit")
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_model_summary=False
    )
    batch = next(iter(data.train_dataloader()))
    return search(module, strategy.cuts, strategy.balance, run_of(trainer, batch, 0))


@dataclass(frozen=True)
class Depth:
    """JSON row: predicted costs of a depth as fractions of a full step's costs."""

    depth: int
    trains_from: str
    compute: float
    saved_activations: float
    gradients_sent: float


@dataclass(frozen=True)
class CutsAnswer:
    """JSON answer of `cuts`: segments by parameter, and verdicts by parameter with one for each cut."""

    chain: str
    boundaries: tuple[str, ...]
    segment_of: dict[str, int]
    verdicts: dict[str, list[str]]
    depths: list[Depth]


def depths(plan: CutPlan) -> list[Depth]:
    """Depths of a cut plan with their costs, the full depth first."""
    starts, sizes = ["the inputs", *plan.boundaries], [cost.parameter_bytes for cost in plan.costs]
    found = []
    for depth in range(plan.segments, 0, -1):
        fractions = compute_fraction(plan.costs, depth), memory_fraction(plan.costs, depth)
        found.append(Depth(depth, starts[-depth], *fractions, sum(sizes[-depth:]) / sum(sizes)))
    return found


def run(options: argparse.Namespace) -> None:
    with Console(stderr=True).status("searching and verifying cuts"):
        plan = cut_plan(options.application, options.overrides)
    judged = {name: [j.verdicts[name].value for j in plan.judged] for name in plan.segment_of}
    found = CutsAnswer(str(plan.chain or "as named"), plan.boundaries, plan.segment_of, judged, depths(plan))
    names = [f"cut {index}: before {boundary}" for index, boundary in enumerate(plan.boundaries)]
    verified = Table("parameter", "segment", *(f"cut {j}" for j in range(len(names))), title="verified")
    for name, segment in plan.segment_of.items():
        verified.add_row(name, str(segment), *judged[name])
    predicted = Table("depth", "trains from", "compute", "saved activations", "gradients sent", title="predicted")
    for row in found.depths:
        fractions = row.compute, row.saved_activations, row.gradients_sent
        predicted.add_row(str(row.depth), row.trains_from, *(f"{fraction:.3f}" for fraction in fractions))
    answer(options, found, f"chain: {found.chain}", *names, verified, predicted)


def add(command: argparse.ArgumentParser) -> None:
    command.add_argument("overrides", nargs="*", help="overrides of recipes/train.py: recipe=vit strategy.cuts=3")
    command.set_defaults(run=run)
