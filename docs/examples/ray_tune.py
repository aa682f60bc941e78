"""Ray Tune over trainings of several workers: the script of docs/ray.md at several learning rates.

python docs/examples/ray_tune.py
"""

import argparse
import tempfile

import ray
from ray import tune
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from ray_train import train

FOLDER = tempfile.mkdtemp()  # where all hosts read and write: a bucket, NFS


def trial(config):
    TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=tune.get_context().get_trial_id(), storage_path=FOLDER, callbacks=[TuneReportCallback()]
        ),
    ).fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-cpus", type=int, help="of a Ray on this machine alone: by default its processors")
    ray.init(num_cpus=parser.parse_args().num_cpus)
    tuner = tune.Tuner(
        trial,  # takes one CPU, its workers ask for their own
        param_space={"strategy": "gossip", "lr": tune.grid_search([0.1, 0.001])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),
        run_config=tune.RunConfig(storage_path=FOLDER),
    )
    best = tuner.fit().get_best_result()
    print(f"best lr {best.config['lr']}: loss {best.metrics['loss']:.3f}")
