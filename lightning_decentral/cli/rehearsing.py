"""`lightning-decentral rehearse recipe=gpt workers=4,8 --profile profile.json --target 1.45`: seconds to a loss."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from lightning.pytorch import LightningModule, seed_everything
from omegaconf import DictConfig, open_dict
from rich.console import Console
from rich.table import Table

from lightning_decentral.cli.console import Command, answer, filled, number, refuse_below, say, whole, write_text
from lightning_decentral.cli.profile import alone, without_strategy
from lightning_decentral.cli.quantities import RATE, SPAN
from lightning_decentral.planner import rehearsal
from lightning_decentral.planner.candidates import Candidate, in_full
from lightning_decentral.planner.compare import BASES, plan
from lightning_decentral.planner.rehearsal.answer import HEADINGS, cells, page, title
from lightning_decentral.planner.rehearsal.methods import methods_of
from lightning_decentral.planner.rehearsal.rehearse import refuse_unpriced
from lightning_decentral.shared.application import Application
from lightning_decentral.shared.plan.forecast import Cluster, Setting
from lightning_decentral.shared.plan.known_losses import kind_of, nearest
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import Profile, read

LATENCY = "100us"
AT_LEAST_1 = ("per_node", "seeds", "run_steps", "threads")
LEFT_OUT: dict[str, tuple[Any, ...]] = {
    "precision": ("32-true", 32, "32"),
    "accumulate_grad_batches": (1,),
    "gradient_clip_algorithm": ("norm", None),
    "limit_train_batches": (None, 1.0),
    "overfit_batches": (0.0,),
    "use_distributed_sampler": (True,),
    "reload_dataloaders_every_n_epochs": (0,),
    "sync_batchnorm": (False,),
    "fast_dev_run": (False,),
    "plugins": (None,),
}
"""{what of a Trainer's changes the training: values that a rehearsal serves, the first one to give}."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", help="overrides of recipes/train.py, and workers=4,8: recipe=gpt workers=4"
    )
    parser.add_argument(
        "--target", type=number, help="validation loss that the mean of the workers' models should reach"
    )
    parser.add_argument("--profile", help="file that `lightning-decentral profile` wrote, for seconds of a step")
    parser.add_argument("--bandwidth", type=RATE, help="node bandwidth, used instead of a measured network: 200mbit")
    message = "latency of a message, with --bandwidth (default %(default)s)"
    parser.add_argument("--latency", type=SPAN, default=LATENCY, help=message)
    parser.add_argument("--per-node", type=whole, default=1, help="devices in a node (default 1)")
    parser.add_argument("--steps", type=whole, default=300, help="most steps of each method (default %(default)s)")
    parser.add_argument(
        "--seeds", type=whole, default=2, help="number of seeds for batch order and dropout (default %(default)s)"
    )
    parser.add_argument("--run-steps", type=whole, help="length of the real run, for schedules (default: --steps)")
    parser.add_argument("--device", default="cpu", help="where workers are computed, cpu or cuda (default %(default)s)")
    parser.add_argument(
        "--minutes", type=number, default=10, help="most minutes that the command takes (default %(default)s)"
    )
    parser.add_argument(
        "--threads", type=whole, help="most workers computed at the same time (default: torch's number of threads)"
    )
    parser.add_argument("--method", action="append", help="overrides of a method, in addition to ddp; may be repeated")
    parser.add_argument("--report", type=Path, help="page to write: rehearsal.html")
    parser.set_defaults(run=run, outputs=("report",))


def run(options: argparse.Namespace) -> None:
    overrides, workers = split(options.overrides)
    if options.target is None or not workers:
        raise ValueError("rehearse needs workers and a target: lightning-decentral rehearse workers=4,8 --target 1.45")
    least = {f"--{name.replace('_', '-')}": getattr(options, name) for name in AT_LEAST_1}
    refuse_below(1, least)
    profile = None if options.profile is None else read(options.profile)
    network = network_of(options, profile, overrides)
    refuse_unpriced(workers, profile, network, options.per_node)
    cfg = alone(options.application, overrides)
    refuse_left_out(cfg)
    seed_everything(cfg.seed, workers=True, verbose=False)
    data = instantiate(cfg.data, _convert_="all")
    errors = Console(stderr=True, highlight=False)
    chosen, kept = without_strategy(overrides)
    for one in chosen:
        say(errors, f"{one} is left out: --method {one} rehearses it in addition to ddp")
    module = options.application.build_model(cfg, data.sizes)
    methods = options.method or candidates_of(options, kept, workers, cfg, module, profile, network)
    asked = [method if isinstance(method, str) else method.overrides for method in methods]
    configurations = {one: trained_by(options.application, cfg, one, kept) for one in asked}
    found = rehearsal.rehearse(
        module,
        data,
        workers=workers,
        target=options.target,
        methods=methods,
        modules=modules_of(options.application, cfg, configurations, data.sizes),
        steps=options.steps,
        seeds=options.seeds,
        run_steps=options.run_steps,
        profile=profile,
        network=network,
        per_node=options.per_node,
        clip=cfg.trainer.gradient_clip_val,
        minutes=options.minutes,
        begun=options.begun,
        threads=options.threads,
        device=options.device,
        say=lambda text: say(errors, text),
    )
    if not found.rows:
        why = "; ".join(dict.fromkeys(found.refused.values()))
        raise ValueError(f"none of {len(found.refused)} methods was rehearsed: {why}")
    if options.report:
        write_text("--report", options.report, page(found))
    *sentences, last = found.sentences()
    best = found.best and configurations.get(found.best.overrides, cfg)
    command = command_of(found.best, kept, best or cfg, options.per_node)
    table = Table(*HEADINGS, title=title(found))
    for row in found.rows:
        table.add_row(*cells(found, row))
    reached = any(row.steps for row in found.rows)
    answer(options, rehearsed(found, command), table, *sentences, *[Command(command) if command else last] * reached)
    if not reached:
        raise ValueError(f"{last}: give a higher --target, or more --steps and --minutes")


def refuse_left_out(cfg: DictConfig) -> None:
    """Raise ValueError for Trainer options of the recipe that change training and that no rehearsal supports."""
    for key, value in cfg.trainer.items():
        served = LEFT_OUT.get(key, (value,))
        if value not in served:
            remedy = "leave it out" if served[0] is None else f"give trainer.{key}={served[0]}"
            raise ValueError(f"trainer.{key}={value} can't be rehearsed: {remedy}")


def split(overrides: list[str]) -> tuple[list[str], list[int]]:
    """Split the command line into (overrides of the recipe, numbers of workers)."""
    numbers = [one.partition("=")[2] for one in overrides if one.startswith("workers=")]
    try:
        workers = [int(text) for text in ",".join(numbers).split(",") if text]
    except ValueError:
        raise ValueError(f"workers must be whole numbers, got {','.join(numbers)}: workers=4,8") from None
    return [one for one in overrides if not one.startswith("workers=")], workers


def command_of(best: rehearsal.Reached | None, overrides: Sequence[str], cfg: DictConfig, per_node: int) -> str | None:
    """Overrides for `recipes/train.py` that train with the best method at its learning rate; `cfg` is its own."""
    if best is None:
        return None
    rate = cfg.optimizer.get("lr") if best.rate != 1 else None
    rates = [] if rate is None else [f"optimizer.lr={rate * best.rate:g}"]
    chosen = [one for one in in_full(best.overrides) if not (rates and one.startswith("optimizer.lr="))]
    where = [f"trainer.num_nodes={best.workers // per_node}", f"trainer.devices={per_node}"]
    return shlex.join([*without_optimizer(overrides, best.overrides), *chosen, *rates, *where])


def trains(method: str) -> bool:
    """Return whether a method's overrides choose, or set up, an optimizer."""
    return any(one.lstrip("+~").startswith(("optimizer", "experiment=")) for one in method.split())


def without_optimizer(overrides: Sequence[str], method: str) -> list[str]:
    """Overrides of a recipe, without overrides of the optimizer if a method chooses an optimizer."""
    return [one for one in overrides if not (trains(method) and one.lstrip("+~").startswith("optimizer"))]


def trained_by(application: Application, cfg: DictConfig, method: str, overrides: Sequence[str]) -> DictConfig:
    """Configuration with the optimizer that a method chooses; `cfg` itself if the method chooses none."""
    if not trains(method):
        return cfg
    found = deepcopy(cfg)
    with open_dict(found):
        found.optimizer = application.compose([*without_optimizer(overrides, method), *method.split()]).optimizer
    return found


def modules_of(
    application: Application, cfg: DictConfig, configurations: Mapping[str, DictConfig], sizes: dict[str, int]
) -> dict[str, LightningModule]:
    """Make the modules of methods with a configuration of their own, one for each optimizer, with equal initial
    values."""
    found: dict[str, LightningModule] = {}
    for one, own in configurations.items():
        if own is not cfg:
            seed_everything(cfg.seed, workers=True, verbose=False)
            alike = (found[other] for other in found if configurations[other].optimizer == own.optimizer)
            found[one] = next(alike, None) or application.build_model(own, sizes)
    return found


def network_of(options: argparse.Namespace, profile: Profile | None, overrides: Sequence[str]) -> Network | None:
    """Network of the profile with the given links; None without a network."""
    if options.bandwidth is None:
        return None
    if profile is None:
        raise ValueError(
            "--bandwidth needs --profile, which has the seconds of a step's computation: "
            f"`{shlex.join(['lightning-decentral', 'profile', *overrides])}` writes one, or leave --bandwidth out"
        )
    return Network(profile.network).linked("between", options.latency, options.bandwidth)


def candidates_of(
    options: argparse.Namespace,
    overrides: Sequence[str],
    workers: Sequence[int],
    cfg: DictConfig,
    module: LightningModule,
    profile: Profile | None,
    network: Network | None,
) -> tuple[Candidate, ...]:
    """Methods to rehearse by default: the first ones of `plan`, on the fewest workers."""
    kind, known, planned = kind_of(overrides), None, None
    if kind is not None and profile is not None:
        at = Setting(profile.model, network or Network(profile.network), Cluster(min(workers), options.per_node))
        planned = plan(at, profile.variation, like=kind)
        known = planned.known
    elif kind is not None and options.application.choice(overrides, "optimizer") in BASES:
        size = sum(one.numel() * one.element_size() for one in module.parameters())
        known = nearest(kind, min(workers), cfg.data.batch_size, size)
    return methods_of(known, planned)


@dataclass(frozen=True)
class Rehearsed:
    """JSON row of a method; unknown values are null. `seeds`: steps to the target of each seed; `trained`: all steps of
    the first; `step_seconds_at`: by a card's bytes per second; `noise`: in batches; `rates`: number of rates tried."""

    title: str
    words: str
    workers: int
    rate: float
    steps: int | None
    seeds: list[int | None]
    trained: int
    extrapolated: bool
    loss: float
    apart: float
    apart_foretold: float | None
    rates: int
    noise: float | None
    step_seconds: float | None
    step_seconds_at: dict[float, float]
    seconds: float | None
    interval_seconds: list[float] | None
    sent_bytes: float | None
    speedup: float | None


@dataclass(frozen=True)
class Rehearsal:
    """JSON answer of `rehearse`: methods, the fastest first; `best` is a title, or null without seconds."""

    target: float
    steps: int
    methods: list[Rehearsed]
    refused: dict[str, str]
    best: str | None
    command: str | None


def rehearsed(found: rehearsal.Answer, command: str | None) -> Rehearsal:
    rows = [
        filled(
            Rehearsed,
            row,
            words=row.overrides,
            apart=row.excess,
            apart_foretold=row.excess_predicted,
            speedup=found.speedup(row),
        )
        for row in found.rows
    ]
    return Rehearsal(found.target, found.steps, rows, found.refused, found.best.title if found.best else None, command)
