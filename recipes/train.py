"""Train one recipe: `python recipes/train.py recipe=vit strategy=gossip trainer.devices=4`.

Every word of the command line is Hydra's: `group=choice`, `node.key=value`; `--help` lists the groups, `--cfg job`
shows the configuration. Installed as `lightning-decentral-train`.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from omegaconf import DictConfig, OmegaConf, open_dict

import lightning_decentral  # noqa: F401  # registers the strategies' names
from lightning_decentral.recipes.loaders import Loaders
from lightning_decentral.shared.checkpoint import runs
from lightning_decentral.shared.errors import mendable, one_line, refuse_missing, refuse_mistyped, refuse_unowned

FULL_ERROR = "HYDRA_FULL_ERROR"
EVERY_DEVICE = -1  # Lightning's word
OBJECTIVE = "val/loss"


def build_model(cfg: DictConfig, sizes: dict[str, int]) -> LightningModule:
    """The module of `cfg.model`; what the data decide yields to what the user wrote."""
    for group in ("optimizer", "scheduler"):
        refuse_unowned(group, cfg[group])
    with open_dict(cfg.model):
        cfg.model.config = {**sizes, **cfg.model.config}
    model: LightningModule = instantiate(cfg.model, optimizer=cfg.optimizer, scheduler=cfg.scheduler, _convert_="all")
    return model


def build_trainer(cfg: DictConfig) -> Trainer:
    """The trainer of `cfg.trainer` with its strategy, callbacks and logger."""
    trainer: Trainer = instantiate(
        cfg.trainer,
        strategy=cfg.strategy,
        callbacks=list(cfg.callbacks.values()),
        logger=cfg.logger,
        _convert_="all",
    )
    return trainer


def name_run(cfg: DictConfig, choices: Mapping[str, Any]) -> None:
    """Name, group and tags of a W&B run, where the user gives none: recipe, strategy, codec and workers."""
    if cfg.logger and cfg.logger.get("_target_", "").endswith(".WandbLogger"):
        chosen = [choices.get(group) for group in ("recipe", "strategy", "strategy/codec")]
        tags = [*(str(one) for one in chosen if one), f"{cfg.trainer.devices} x {cfg.trainer.num_nodes} workers"]
        given = {"name": "-".join([*tags, *job()]).replace(" ", ""), "group": tags[0], "tags": tags}
        with open_dict(cfg.logger):
            cfg.logger.update({key: value for key, value in given.items() if cfg.logger.get(key) is None})


def job() -> list[str]:
    """The job's number, also after a requeue and alike on all hosts: of SLURM, of one of its array, or of torchrun."""
    array = [os.environ.get(f"SLURM_ARRAY_{one}_ID") for one in ("JOB", "TASK")]
    started = "_".join(filter(None, array)) or os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
    return [started] if started and started != "none" else []


def launched_elsewhere() -> bool:
    """Whether torchrun, SLURM or a parent started this process as one of its workers."""
    environment = LightningEnvironment()
    return environment.creates_processes_externally or SLURMEnvironment.detect() or TorchElasticEnvironment.detect()


def spawn_in_sweeps(cfg: DictConfig) -> None:
    """In a sweep, start workers as functions: as scripts, each would run the whole sweep and wait for the others."""
    if "start_method" in cfg.strategy and not launched_elsewhere():
        cfg.strategy.start_method = "spawn"


def refuse_scripts_in_sweeps(trainer: Trainer) -> None:
    """ValueError where the workers of a sweep would still be started as scripts."""
    if isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher) and not launched_elsewhere():
        raise ValueError(
            "--multirun can't start its workers as scripts, each would run the whole sweep: "
            "use strategy=gossip or strategy=ddp, or one device"
        )


def refuse_mistaken(cfg: DictConfig) -> None:
    """ValueError for missing values and those of a wrong type, and for what Lightning would refuse without a remedy."""
    refuse_missing(cfg)
    refuse_mistyped(cfg)
    if not (isinstance(cfg.seed, int) and 0 <= cfg.seed < 2**32):
        raise ValueError(f"seed must be a whole number from 0 up to 2**32 - 1, got {cfg.seed!r}: seed=0")
    devices = cfg.trainer.devices
    if isinstance(devices, str) and not re.fullmatch(r"auto|-1|\d+(,\d+)*,?", devices):
        raise ValueError(f"trainer.devices must be a number or numbers, got {devices!r}: trainer.devices=2, or =auto")
    if isinstance(devices, int) and devices < 1 and devices != EVERY_DEVICE:
        raise ValueError(f"trainer.devices must be at least 1, got {devices}: trainer.devices=1, or =auto for all")


def train(cfg: DictConfig) -> float | None:
    """Fit and test; the last validation loss, which a sweeper minimises."""
    sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if sweep:
        spawn_in_sweeps(cfg)
    refuse_mistaken(cfg)
    seed_everything(cfg.seed, workers=True)
    data: Loaders = instantiate(cfg.data, _convert_="all")
    model = build_model(cfg, data.sizes)
    name_run(cfg, HydraConfig.get().runtime.choices)
    trainer = build_trainer(cfg)
    if sweep:
        refuse_scripts_in_sweeps(trainer)
    choices: Any = OmegaConf.to_container(cfg, resolve=True)
    runs.go_on(trainer, cfg.checkpoint)
    for logger in trainer.loggers:
        logger.log_hyperparams(choices)
    trainer.fit(model, datamodule=data, ckpt_path=cfg.checkpoint)
    objective = trainer.callback_metrics.get(OBJECTIVE)
    trainer.test(model, datamodule=data)
    return None if objective is None else float(objective)


@contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    """The environment variable has this value, or none, until the end of the block."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


@contextmanager
def mistakes_in_one_line(verbose: bool) -> Iterator[None]:
    """A mistake of the user ends the program with one line and code 1, unless the traceback is asked for."""
    try:
        yield
    except Exception as error:
        if verbose or not mendable(error):
            raise
        line = one_line(error)  # a member of a sweep has ended with the whole line
        sys.exit(line if line.startswith("error: ") else f"error: {line} ({FULL_ERROR}=1 shows where)")


def main() -> None:
    # Lightning's own calls of what torch has deprecated, once per worker and stage.
    warnings.filterwarnings("ignore", category=FutureWarning, module="lightning")
    asked = os.environ.get(FULL_ERROR)
    verbose = asked is not None and asked != "0"

    @hydra.main(version_base="1.3", config_path="pkg://lightning_decentral.conf", config_name="train")
    def run(cfg: DictConfig) -> float | None:
        # Workers are started in here and must find the user's environment.
        with environment(FULL_ERROR, asked), mistakes_in_one_line(verbose):
            return train(cfg)

    # Hydra prints errors of the command line itself, in many lines, unless it is told to let them pass.
    with mistakes_in_one_line(verbose), environment(FULL_ERROR, "1"):
        run()


if __name__ == "__main__":
    main()
