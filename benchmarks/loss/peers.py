"""Other packages as methods of `loss/per_second.py`, in the same processes: torchft's DiLoCo, decent-dp.

An argument of a method names the peer: `peer=torchft` with `strategy._target_=loss.peers.Apart`, or `peer=decent_dp`.
The rest of its arguments are Hydra's: optimizer, rate, schedule and clipping are those of every other method.
"""

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from common.quiet_recipe import own_batches
from lightning_decentral.optim import muon_groups
from lightning_decentral.planner.rehearsal.worker import quiet
from lightning_decentral.recipes.learner import Learner
from lightning_decentral.recipes.loaders import Loaders

LOCAL, OUTER_LR, OUTER_MOMENTUM = 8, 0.7, 0.5
"""Steps of a worker by itself between two outer steps of torchft's, and their rate and Nesterov's momentum: those of
our own outer rounds."""
LIGHTHOUSE = 29700
WAIT = timedelta(minutes=3)


class Apart(DDPStrategy):
    """Lightning's processes and sampler, without torch's wrapper: every worker keeps its gradients."""

    def configure_ddp(self) -> None:
        """Leave the module as it is, without DDP's wrapper."""


class DiLoCo(Callback):
    """torchft's `DiLoCo` around the optimizer, for one fragment in one bucket; host 0 runs its lighthouse.

    Quantized, it would need a GPU: the ways travel in float32.
    """

    def __init__(self, hosts: int, turn: int) -> None:
        self._hosts, self._port = hosts, LIGHTHOUSE + turn
        self._open = ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        os.environ.setdefault("RUST_LOG", "error")  # read when torchft is imported
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo as TorchftDiLoCo

        if trainer.global_rank == 0:
            bind = f"{os.environ['MASTER_ADDR']}:{self._port}"
            server = LighthouseServer(bind=bind, min_replicas=self._hosts, join_timeout_ms=10_000)
            self._open.callback(server.shutdown)
        self._open.callback(trainer.strategy.barrier)
        trainer.strategy.barrier()
        network = pl_module.network
        outer = torch.optim.SGD(network.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        inner, manager = trainer.optimizers[0], self._manager(trainer.global_rank)
        self._open.enter_context(TorchftDiLoCo(manager, [network], inner, outer, LOCAL, use_bucketization=True))

    def _manager(self, rank: int) -> Any:
        from torchft import Manager, ProcessGroupGloo

        own = address_of(os.environ["MASTER_ADDR"])
        socket.gethostname = lambda: own  # where others look for it
        store = torch.distributed.TCPStore(own, 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=WAIT),
            load_state_dict=lambda state: None,  # all begin equal, and none comes back
            state_dict=dict,
            min_replica_size=self._hosts,
            use_async_quorum=False,
            timeout=WAIT,
            quorum_timeout=WAIT,
            connect_timeout=WAIT,
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=store.port,
            lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{self._port}",
            replica_id=f"host{rank}",
            hostname=own,
        )
        self._open.callback(lambda: (manager.shutdown(), store))
        return manager

    def on_train_end(self, *_: Any) -> None:
        """Close in reverse order: the optimizer, the manager, then, when all are here, the lighthouse."""
        self._open.close()


def address_of(peer: str) -> str:
    """This host's own, on its way to a peer."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 1))
        return str(probe.getsockname()[0])


class _Loss(nn.Module):
    """Module that decent-dp wraps: its output is the loss of a batch."""

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self.learner = learner

    def forward(self, batch: Any) -> Tensor:
        return self.learner.training_step(batch, 0)


def with_decent_dp(
    cfg: DictConfig, data: Loaders, learner: Learner, hosts: int, steps: int, each: Callable[[], None]
) -> None:
    """The seed paper's own package in its own loop, one-peer exponential graph; `each` is called after every step."""
    from decent_dp.ddp import DecentralizedDataParallel
    from loguru import logger

    logger.remove()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", rank=int(os.environ["NODE_RANK"]), world_size=hosts)
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    groups = muon_groups(learner.network)

    def optimizer(named: list[tuple[str, Tensor]]) -> Optimizer:
        bucket = {id(parameter) for _, parameter in named}
        own = [{**group, "params": [p for p in group["params"] if id(p) in bucket]} for group in groups]
        return learner.make_optimizer([group for group in own if group["params"]])

    model = DecentralizedDataParallel(
        _Loss(quiet(learner)).train(),
        optim_fn=optimizer,
        lr_scheduler_fn=lambda of: learner.make_scheduler(of, total_steps=steps),
        topology="one-peer-exp",
        grad_clip_norm=cfg.trainer.gradient_clip_val or 0.0,
    )
    batches = own_batches(data, hosts, torch.distributed.get_rank())
    for _ in range(steps):
        model(next(batches)).backward()
        each()
