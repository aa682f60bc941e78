"""A Hydra application that trains a tiny network, as a user might have written it; nothing in it knows of sweeps."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import DictConfig

from tests.tiny import QUIET, Net, SizedBatches

CONFIG = {
    "lr": 0.1,
    "dropout": 0.2,
    "fails": "never",
    "checkpoint": None,
    "together": 1,
    "trainer": {"max_epochs": 2, "devices": 1},
    "hydra": {"sweep": {"dir": "sweep", "subdir": "${hydra:job.num}"}, "job": {"name": "application"}},
}
ConfigStore.instance().store(name="application", node=CONFIG)


class Tuned(Net):
    """The tiny network with another step size for each member."""

    def __init__(self, lr: float, dropout: float) -> None:
        super().__init__("adamw", dropout=dropout)
        self.lr = lr

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def train(cfg: DictConfig) -> float:
    """Trains, tests, leaves the weights in its output folder; fails after its fit where it is told to."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    with (folder / "starts").open("a") as starts:
        starts.write(f"{cfg.checkpoint}\n")
    while len(list(folder.parent.glob("*/starts"))) < cfg.together:
        time.sleep(0.01)
    seed_everything(0)
    module = Tuned(cfg.lr, cfg.dropout)
    last = ModelCheckpoint(folder, save_last=True)
    options: dict[str, Any] = {**QUIET, "enable_checkpointing": True, "num_sanity_val_steps": 1, **cfg.trainer}
    trainer = Trainer(**options, callbacks=[last])
    trainer.fit(module, SizedBatches(6), SizedBatches(2), ckpt_path=cfg.checkpoint)
    if cfg.fails == "always" or (cfg.fails == "once" and cfg.checkpoint is None):
        raise ArithmeticError(f"lr={cfg.lr} is unlucky")
    trainer.test(module, SizedBatches(2), verbose=False)
    torch.save(module.state_dict(), folder / "weights.pt")
    return float(trainer.callback_metrics["test_loss"])


def sleep(cfg: DictConfig) -> None:
    """Waits for its end, with a process of its own; both write down who they are."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    Path(HydraConfig.get().runtime.output_dir, "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(60)


def run(folder: Path, *words: str, task: Any = train) -> Any:
    """The application's command line, in this process."""
    os.chdir(folder)
    sys.argv = ["application", *words]
    return hydra.main(version_base="1.3", config_path=None, config_name="application")(task)()
