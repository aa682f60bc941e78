"""Trainings in Ray's workers and, the same, in torchrun's: what tests/processes/test_ray.py compares.

python -m tests.processes.ray_training FOLDER                             # all of them under a Ray of its own
torchrun --nproc-per-node=2 tests/processes/ray_training.py FOLDER        # every strategy for two epochs
"""

import os
import signal
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_decentral import CompressedStrategy, GossipStrategy, PartialBackpropStrategy, TokenPipelineStrategy
from lightning_decentral.pipeline import Uniform
from tests.pipeline.training import Language, Losses
from tests.tiny import QUIET

EPOCHS, SIZE = 2, 2
STRATEGIES: dict[str, Any] = {
    "gossip": GossipStrategy,
    "compressed": CompressedStrategy,
    "partial_backprop": PartialBackpropStrategy,
    "token_pipeline": partial(TokenPipelineStrategy, stages=2, slicing=Uniform(2)),
}


def keep(folder: str, name: str, rank: int, losses: list[float], module: Language) -> None:
    torch.save({"losses": losses, "state": module.model.state_dict()}, Path(folder) / f"{name}-{rank}.pt")


def straight(folder: str, names: Any = STRATEGIES, **options: Any) -> None:
    """Each strategy for all epochs in one go."""
    for name in names:
        seed_everything(1, workers=True)
        module, losses = Language(ordered=False), Losses()
        strategy = STRATEGIES[name]() if name in STRATEGIES else name
        trainer = Trainer(**QUIET, strategy=strategy, max_epochs=EPOCHS, callbacks=[losses], **options)
        trainer.fit(module)
        keep(folder, name, trainer.global_rank, losses.values, module)


class Stops(Callback):
    """Ends a training of known length early, after an epoch: what a strategy plans for its end stays as it was."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.current_epoch == self._epoch


def stored(config: dict[str, Any]) -> None:
    """Each strategy for one epoch, then, by another Trainer, on from what Ray's storage has of that."""
    import ray.train
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    for name in config["names"]:
        seed_everything(1, workers=True)
        values: list[float] = []
        for epoch in range(EPOCHS):
            module, losses = Language(ordered=False), Losses()
            trainer = Trainer(
                **{**QUIET, "accelerator": "auto"},
                strategy=STRATEGIES[name]() if name in STRATEGIES else name,
                plugins=[RayLightningEnvironment()],
                callbacks=[losses, Stops(epoch), RayTrainReportCallback()],
                max_epochs=EPOCHS,
            )
            if name in STRATEGIES:
                prepare_trainer(trainer)
            saved = ray.train.get_checkpoint() if epoch else None
            with saved.as_directory() if saved else nullcontext() as folder:
                trainer.fit(module, ckpt_path=folder and f"{folder}/checkpoint.ckpt")
            values += losses.values
            assert len(losses.values) == len(values) // (epoch + 1), "it began anew"
        keep(config["folder"], name, ray.train.get_context().get_world_rank(), values, module)


class Killed(Callback):
    """Ends worker 1 with SIGKILL in the second epoch, once."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1 and trainer.global_rank == 1 and not self._mark.exists():
            import ray.train

            ray.train.get_all_reported_checkpoints()  # until Ray, which asks now and then, has this epoch
            self._mark.write_text(str(trainer.global_step))
            os.kill(os.getpid(), signal.SIGKILL)


def restarted(config: dict[str, Any]) -> None:
    import ray.train
    from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer

    seed_everything(1, workers=True)
    module, losses = Language(ordered=False), Losses()
    refused(config["folder"])
    callbacks = [losses, Killed(Path(config["folder"]) / "killed"), RayTrainReportCallback()]
    own = {"strategy": "gossip", "plugins": [RayLightningEnvironment()], "callbacks": callbacks}
    trainer = prepare_trainer(Trainer(**QUIET, **own, max_epochs=EPOCHS))
    saved = ray.train.get_checkpoint()
    with saved.as_directory() if saved else nullcontext() as folder:
        trainer.fit(module, ckpt_path=folder and f"{folder}/checkpoint.ckpt")
    keep(config["folder"], "restarted", trainer.global_rank, losses.values, module)


def refused(folder: str) -> None:
    """Elastic workers, of whom Ray Train would restart all."""
    import ray.train
    from ray.train.lightning import RayLightningEnvironment

    from lightning_decentral.gossip import Elastic

    try:
        strategy: Any = GossipStrategy(elastic=Elastic(lobby="127.0.0.1:1"))
        Trainer(**QUIET, strategy=strategy, devices=1, plugins=[RayLightningEnvironment()])
    except ValueError as error:
        (Path(folder) / f"elastic-{ray.train.get_context().get_world_rank()}").write_text(str(error))


def on_ray(folder: str) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def run(function: Any, workers: int, names: Any = (), failures: int = 0) -> Any:
        return TorchTrainer(
            function,
            train_loop_config={"folder": folder, "names": list(names)},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(storage_path=f"{folder}/storage", failure_config=FailureConfig(max_failures=failures)),
        ).fit()

    ray.init(num_cpus=4, include_dashboard=False)
    try:
        run(stored, SIZE, STRATEGIES)
        run(stored, 1, ["spilled"])
        result = run(restarted, SIZE, failures=1)
        print("metrics", sorted(result.metrics), "in", result.checkpoint.path, flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    if "RANK" in os.environ:
        straight(sys.argv[1], devices=SIZE)
    else:
        from tests.processes import ray_training  # under its own name, for Ray's workers

        ray_training.on_ray(sys.argv[1])
        straight(f"{sys.argv[1]}/alone", ["spilled"], devices=1)
