"""`lightning-decentral profile recipe=vit`: what one training step costs on one device, block by block, and what rounds
of gossip add to it.

variation(step) = seconds of the step / mean seconds of a step: how unequal steps are, which is what makes workers wait
loop            = mean seconds from batch to batch - seconds of the blocks: Lightning's own work, and the data's"""

import argparse
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import Any

from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_decentral.cli.console import answer, whole
from lightning_decentral.gossip.round_cost import ROUNDS, round_works
from lightning_decentral.partial.agreed import run_of, step_of
from lightning_decentral.partial.compute.search import joints
from lightning_decentral.planner.block_profile import (
    REPEATS,
    WARM_UP,
    hidden_of,
    measure_blocks,
    products_per_second,
    states_of,
)
from lightning_decentral.planner.plan.optimizer_cost import MUON, hidden_bytes, stepping_bytes
from lightning_decentral.shared.application import Application
from lightning_decentral.shared.compute.hardware import DeviceLaps, HostLaps, ProcessorTime, device_name, laps
from lightning_decentral.shared.plan.profile import BlockCost, Model, Profile, write

STRATEGY = "strategy="
ALONE = [f"{STRATEGY}auto", "callbacks=none", "logger=none", "trainer.devices=1", "trainer.num_nodes=1"]
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class StepProfile(Callback):
    """Measures the blocks in one step of a real run, then whole steps until the run ends."""

    def __init__(self, done: Callable[[], None]) -> None:
        self.processors = ProcessorTime()  # that whole steps took, without their data
        self.blocks: tuple[BlockCost, ...] = ()  # from the inputs to the loss
        self.batch, self.state_bytes = 1, 0  # samples of the first batch; of the optimizers after the last step
        self.states: tuple[tuple[str, int], ...] = ()  # the same by name, as in `Model`
        self.products_per_second = 0.0  # as in `Model`
        self._done = done
        self._laps: HostLaps | DeviceLaps | None = None

    def steps(self) -> list[float]:
        """Seconds of each step after the measured step, from batch to batch."""
        begins = self._laps.seconds() if self._laps else []
        return [after - before for before, after in pairwise(begins)]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise ValueError(
                f"{type(pl_module).__name__} optimizes manually, so nobody knows what belongs to a step: "
                "profile a module with automatic optimization"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step < WARM_UP:
            return
        if self._laps is None:
            self.batch = extract_batch_size(batch)
            self._measure(trainer, pl_module, batch)
            self._laps = laps(pl_module.device)
        self._laps.lap()
        self.processors.start()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._laps is not None:
            self.processors.stop()
            self._done()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not before the last step: state may grow with steps.
        leaves = tree_leaves([list(optimizer.state.values()) for optimizer in trainer.optimizers])
        self.state_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        self.states = states_of(trainer.optimizers)

    def _measure(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        names = joints(module, run_of(trainer, batch, 0))
        run = step_of(trainer, module, batch, 0)
        try:
            self.blocks = measure_blocks(module, names, run, trainer.optimizers, module.device, self._done)
        finally:
            del module.__dict__["log"]  # `step_of` has silenced it
        self.products_per_second = products_per_second(hidden_of(module), module.device)


def alone(application: Application, overrides: Sequence[str]) -> DictConfig:
    """Compose these overrides for one device, without the strategy that they may name. ValueError: they, or an
    experiment, set more of a strategy than which one it is."""
    try:
        return application.compose([*overrides, *ALONE, "trainer.default_root_dir=null"])
    except HydraException as error:
        chosen = application.choice(overrides, "strategy")  # raises what is wrong with the overrides by themselves
        if "strategy" not in str(error):
            raise
        optimizer = application.choice(overrides, "optimizer")
        raise ValueError(
            f"{' '.join(overrides)!r} sets up strategy={chosen}, and one device trains without it: leave out "
            f"overrides of the strategy, and an experiment but for what else it chooses, such as optimizer={optimizer}"
        ) from None


def without_strategy(overrides: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split overrides into (overrides that choose a strategy, other overrides), which a printed command repeats."""
    chosen = [one for one in overrides if one.startswith(STRATEGY)]
    return chosen, tuple(one for one in overrides if one not in chosen)


def profile(
    application: Application, overrides: Sequence[str], steps: int, done: Callable[[], None] = lambda: None
) -> tuple[Profile, float]:
    """(the profile of one device for these overrides of the command line, mean seconds from batch to batch). `steps`:
    whole steps that the distribution is taken from."""
    if steps < 2:
        raise ValueError(f"steps must be at least 2, got {steps}: 30 show how unequal steps are")
    cfg = alone(application, overrides)
    if (batches := cfg.trainer.accumulate_grad_batches) != 1:
        raise ValueError(
            f"trainer.accumulate_grad_batches={batches}: a profile, and a plan from it, is of steps of one batch; "
            "leave the override out"
        )
    data = instantiate(cfg.data, _convert_="all")
    module = application.build_model(cfg, data.sizes)
    measured = StepProfile(done)
    length = {"max_steps": WARM_UP + steps + 1, "max_epochs": -1, "max_time": None, "accumulate_grad_batches": 1}
    nothing_else = {"num_sanity_val_steps": 0, "limit_val_batches": 0, **QUIET}
    trainer: Trainer = instantiate(cfg.trainer, callbacks=[measured], **length, **nothing_else, _convert_="all")
    trainer.fit(module, datamodule=data)
    seconds = measured.steps()
    mean = sum(seconds) / len(seconds)
    device = device_name(trainer.strategy.root_device)
    _, kept = without_strategy(overrides)
    if not any(word.lstrip("+").startswith("recipe=") for word in kept):
        kept = (f"recipe={application.choice(overrides, 'recipe')}", *kept)  # which others know the model by
    name = " ".join(kept)
    works = round_works(sum(b.parameter_bytes for b in measured.blocks), trainer.strategy.root_device, done)
    # Of a host it is processor time, for which others may come in between, as in the steps.
    crowding = measured.processors.crowding if trainer.strategy.root_device.type == "cpu" else 1.0
    rounds = tuple(work.times(crowding) for work in works)
    optimizer = application.choice(overrides, "optimizer")
    hidden = [sides for block in measured.blocks for sides in block.hidden]
    model = Model(
        name,
        device,
        measured.blocks,
        measured.batch,
        measured.state_bytes,
        kept,
        rounds,
        optimizer=optimizer,
        states=measured.states,
        stepping_bytes=stepping_bytes(hidden) if optimizer == MUON else 0,
        whole_bytes=hidden_bytes(hidden) if optimizer == MUON else 0,
        products_per_second=measured.products_per_second,
    )
    model = replace(model, loop_seconds=max(0.0, mean - model.seconds))
    return Profile(model, (), tuple(round(s / mean, 4) for s in seconds), {platform.node(): device}), mean


def shown(model: Model) -> Table:
    table = Table("block", "forward ms", "backward ms", "update ms", "parameters kB", "saved kB", "output kB")
    table.title = f"{model.name} on {model.device}, {model.batch} samples a step"
    # Without the modules that all blocks lie in; a name without a dot is no module's path.
    paths = [block.name.split(".") for block in model.blocks]
    same = takewhile(lambda parts: len(set(parts)) == 1, zip(*(path[:-1] for path in paths if path[1:]), strict=False))
    depth = len(list(same))
    for path, block in zip(paths, model.blocks, strict=True):
        seconds = (block.forward_seconds, block.backward_seconds, block.update_seconds)
        sizes = (block.parameter_bytes, block.saved_bytes, block.output_bytes)
        name = ".".join(path[depth:] or path)
        table.add_row(name, *(f"{1e3 * s:.3f}" for s in seconds), *(f"{size / 1e3:,.1f}" for size in sizes))
    return table


def mixing(model: Model) -> str:
    """Describe a gossip round's milliseconds on the device, without the network, and percent of a step, by codec."""
    seconds = {work.codec: work.seconds(model.parameter_bytes, 1) for work in model.rounds}
    each = ", ".join(
        f"{codec.removesuffix('()')} {1e3 * of_round:.3f} ms ({100 * of_round / model.seconds:.2g} %)"
        for codec, of_round in seconds.items()
    )
    what = "a round of gossip with one neighbour, without the network, and its part of a step"
    return f"{what}: {each or 'not measured on this device'}"


def run(options: argparse.Namespace) -> None:
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=WARM_UP + REPEATS + options.steps + ROUNDS)
        found, seconds = profile(options.application, options.overrides, options.steps, lambda: progress.advance(task))
    write(found, options.out)
    model = found.model
    whole_steps = (
        f"sum of the blocks {1e3 * (model.seconds - model.loop_seconds):.2f} ms; from batch to batch "
        f"{1e3 * seconds:.2f} ms, the slowest {max(found.variation):.2f} times the mean"
    )
    wrote = f"wrote {options.out}; its network: torchrun ... -m lightning_decentral.cli.network --model {options.out}"
    without = [f"one device trains without {one}" for one in without_strategy(options.overrides)[0]]
    lines = mixing(model), whole_steps, *without, wrote
    answer(options, Profiled(model, found.variation, seconds), shown(model), *lines)


@dataclass(frozen=True)
class Profiled:
    """JSON answer of `profile`: the model as in the file, variation of steps, seconds from batch to batch."""

    model: Model
    variation: tuple[float, ...]
    step_seconds: float


def add(command: argparse.ArgumentParser) -> None:
    example = "recipe=vit model.config.hidden_size=64"
    command.add_argument("overrides", nargs="*", help=f"overrides of recipes/train.py: {example}")
    command.add_argument("--out", default="profile.json", help="the file to write (default: %(default)s)")
    command.add_argument("--steps", type=whole, default=30, help="whole steps to take the distribution from")
    command.set_defaults(run=run, outputs=("out",))
