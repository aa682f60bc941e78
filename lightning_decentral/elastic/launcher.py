"""Launcher of `Trainer(devices=4)` without a lobby: this process starts this machine's workers and doesn't train."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hydra.core.hydra_config import HydraConfig
from lightning.fabric.plugins.environments import ClusterEnvironment, TorchElasticEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _basic_subprocess_cmd, _hydra_subprocess_cmd
from lightning.pytorch.trainer.states import TrainerFn

from lightning_decentral.elastic.plan.view import Bounds, ElasticSettings, Times
from lightning_decentral.elastic.wire.sockets.keys import key_of
from lightning_decentral.elastic.wire.starter import LOBBY, Starter, follow, own_lobby
from lightning_decentral.shared.checkpoint import runs
from lightning_decentral.shared.wire.transport import connected


class ElasticLauncher(_SubprocessScriptLauncher):
    """Starts this script once for each worker, restarts a lost worker, and exits when all workers have ended.

    Calls other than `fit` run in this process: a `Trainer.test` needs no other workers."""

    def __init__(self, environment: ClusterEnvironment, workers: int, nodes: int, elastic: ElasticSettings) -> None:
        super().__init__(environment, workers, nodes)
        self._elastic = elastic

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        assert trainer is not None
        if trainer.state.fn != TrainerFn.FITTING:
            return function(*args, **kwargs)
        _set_num_threads_if_needed(self.num_processes)  # the workers inherit it
        times, bounds = Times(self._elastic.dead_after), Bounds(self._elastic.workers[0], self.num_processes)
        say = partial(print, flush=True)
        place, members = own_lobby(bounds, times, say, key_of(self._elastic.key))
        starter = Starter(self.num_processes, command, members, {LOBBY: place}, say)
        sys.exit(starter.run())


class FollowingLauncher(_SubprocessScriptLauncher):
    """Launcher of a worker that a starter process has started; the worker ends when its starter ends."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        follow(os.environ)
        runs.launched(trainer, args)
        return function(*args, **kwargs)


def command(number: int) -> tuple[Sequence[str], str | None]:
    """Return (the command line that runs this script again, its working directory)."""
    return _hydra_subprocess_cmd(number) if HydraConfig.initialized() else (_basic_subprocess_cmd(), None)


def refuse_unstarted(
    elastic: ElasticSettings, devices: int, cluster: ClusterEnvironment, workers: int, nodes: int, method: str
) -> None:
    """Raise a ValueError if this process can't start the workers of a run without a lobby."""
    least, most = elastic.workers
    if devices > 1:
        raise ValueError(
            f"workers of {devices} devices need a lobby: run `lightning-decentral lobby --workers 2:16`, and for each "
            f"worker a torchrun --nnodes=1 --nproc-per-node={devices} with Elastic(lobby='HOST:29400')"
        )
    if cluster.creates_processes_externally or nodes > 1:
        raise ValueError(
            "Elastic() without a lobby is for one machine, whose workers this process starts: run `lightning-decentral "
            "lobby --workers 2:16` and give all workers its address, Elastic(lobby='HOST:29400')"
        )
    if not least <= workers <= most:
        raise ValueError(f"devices={workers} workers would start, outside of workers={elastic.workers}: change one")
    if method != "popen":
        raise ValueError(
            f"start_method={method!r} isn't compatible with elastic, which starts scripts: use start_method='popen'"
        )


def refuse_restarting_all(cluster: ClusterEnvironment, devices: int) -> None:
    """Raise a ValueError under torchrun or Ray Train with several workers: when one is lost, all are restarted."""
    if (TorchElasticEnvironment.detect() or connected()) and cluster.world_size() > devices:
        starter = "torchrun" if TorchElasticEnvironment.detect() else "process group"
        raise ValueError(
            f"this {starter} has {cluster.world_size()} workers and restarts all when one is lost: start each elastic "
            f"worker by its own torchrun --nnodes=1 --nproc-per-node={devices} --max-restarts=100, or as an actor"
        )
