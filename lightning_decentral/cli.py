"""`lightning-decentral`: console commands beside training.

lightning-decentral cuts recipe=gpt strategy.cuts=3
lightning-decentral plan profile.json --workers 64 --per-node 8
lightning-decentral topology base_graph --workers 24
lightning-decentral profile recipe=gpt
lightning-decentral placement hosts.json --topology ring
lightning-decentral schedule jobs.yaml --policy lrtf --devices 2
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from lightning_decentral.commands import placement, plan, profile, schedule, topology
from lightning_decentral.partial.forecast import compute_fraction, memory_fraction
from lightning_decentral.partial.search import CutPlan, search
from lightning_decentral.partial.trial import refuse_unserved, run_of


def cut_plan(overrides: Sequence[str]) -> CutPlan:
    """The cuts that a run with these words of the command line would find at its first batch, on this machine's CPU."""
    with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
        cfg = compose("train", ["strategy=partial_backprop", *overrides])
    recipes = importlib.import_module("lightning_decentral.recipes.train")
    data = instantiate(cfg.data, _convert_="all")
    module: LightningModule = recipes.build_model(cfg, data.sizes)
    strategy = instantiate(cfg.strategy, _convert_="all")
    refuse_unserved(module)
    data.prepare_data()
    data.setup("fit")
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    batch = next(iter(data.train_dataloader()))
    return search(module, strategy.cuts, strategy.balance, run_of(trainer, batch, 0))


def depths(plan: CutPlan) -> Table:
    """Predicted costs of every depth as fractions of a full step's."""
    table = Table("depth", "trains from", "compute", "saved activations", "gradients sent", title="predicted")
    starts = ["the inputs", *plan.boundaries]
    sizes = [cost.parameter_bytes for cost in plan.costs]
    for depth in range(plan.segments, 0, -1):
        fractions = (
            compute_fraction(plan.costs, depth),
            memory_fraction(plan.costs, depth),
            sum(sizes[-depth:]) / sum(sizes),
        )
        table.add_row(str(depth), starts[-depth], *(f"{fraction:.3f}" for fraction in fractions))
    return table


def verdicts(plan: CutPlan) -> Table:
    """Every parameter's segment and its verdict at every cut."""
    table = Table("parameter", "segment", *(f"cut {j}" for j in range(len(plan.boundaries))), title="verified")
    for name, segment in plan.segment_of.items():
        table.add_row(name, str(segment), *(judged.verdicts[name].value for judged in plan.judged))
    return table


def cuts(overrides: Sequence[str]) -> None:
    """Print blocks, cuts, verdicts and predictions."""
    found = cut_plan(overrides)
    console = Console()
    console.print(f"chain: {found.chain or 'as named'}")
    for index, boundary in enumerate(found.boundaries):
        console.print(f"cut {index}: before {boundary}")
    console.print(verdicts(found), depths(found))


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Words of the recipes may stand behind options, too: argparse takes them in front only, and its intermixed parsing
    knows no subcommands."""
    options, behind = parser.parse_known_args(arguments)
    unknown = [word for word in behind if word.startswith("-") or "overrides" not in options]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(behind)}")
    if behind:
        options.overrides = [*options.overrides, *behind]
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="lightning-decentral", description=__doc__.partition("\n")[0])
    commands: Any = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("cuts", help="where partial backprop would cut a recipe, and what that saves")
    command.add_argument("overrides", nargs="*", help="words of recipes/train.py: recipe=vit strategy.cuts=3")
    command.set_defaults(run=lambda options: cuts(options.overrides))
    plan.add(commands)
    topology.add(commands)
    profile.add(commands)
    placement.add(commands)
    schedule.add(commands)
    options = parsed(parser, arguments)
    try:
        options.run(options)
    except Exception as error:
        errors = importlib.import_module("lightning_decentral.recipes.errors")
        if not errors.mendable(error):
            raise
        sys.exit(f"error: {errors.one_line(error)}")


if __name__ == "__main__":
    main()
