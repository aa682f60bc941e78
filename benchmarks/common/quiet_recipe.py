"""A recipe of the command line, built for a benchmark: nothing is logged, validated or saved while it trains."""

from collections.abc import Iterator
from itertools import count
from typing import Any

from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.utilities.data import _update_dataloader
from omegaconf import DictConfig
from torch.utils.data import DistributedSampler

from lightning_decentral.recipes.learner import Learner
from lightning_decentral.recipes.loaders import Loaders
from lightning_decentral.recipes.train import build_model, build_trainer

QUIET = [
    "trainer=cpu",
    "callbacks=none",
    "logger=none",
    "+trainer.enable_progress_bar=false",
    "+trainer.enable_checkpointing=false",
    "+trainer.enable_model_summary=false",
]


def composed(words: list[str], seed: int) -> DictConfig:
    """The configuration of `python recipes/train.py WORDS`."""
    with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
        return compose("train", [*words, *QUIET, f"seed={seed}", "trainer.default_root_dir=null"])


def built(cfg: DictConfig) -> tuple[Loaders, Learner, Trainer]:
    """Data, model and trainer; the model's first values are the seed's."""
    seed_everything(cfg.seed, workers=True, verbose=False)
    data = instantiate(cfg.data, _convert_="all")
    return data, build_model(cfg, data.sizes), build_trainer(cfg)


def own_batches(data: Loaders, workers: int, rank: int) -> Iterator[Any]:
    """Yield batches of one of the workers, without an end, as Lightning shares them out."""
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    sampler = DistributedSampler(loader.dataset, workers, rank)
    loader = _update_dataloader(loader, sampler)
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader
