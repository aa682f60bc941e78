"""The same runs by torchft: its lighthouse, its DistributedDataParallel or its LocalSGD, in `elastic.py`'s processes.

Workers print the lines that `elastic.worker` prints. A round is a step of DDP, and of LocalSGD every `LOCAL` steps.

torchft's times are tuned for this: gloo sees an ended process at once, and the next quorum waits until the lost one's
heartbeats are `heartbeat_timeout` old, or `join_timeout` is over. Shorter ones lose workers that only stall.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import LocalSGD

from elastic.worker import BATCH, EXAMPLES, HELD_OUT, Job, Student, Tell, begin, examples

os.environ.setdefault("RUST_LOG", "error")
LOCAL = 8
"""Steps of LocalSGD between two averages."""
HEARTBEAT, JOIN = 1.0, 1.0
"""Seconds: `heartbeat_timeout` and `join_timeout`."""


def lighthouse(job: Job, host: str, says: Callable[[int], None]) -> None:
    """Serve torchft's lighthouse until it is killed."""
    server = LighthouseServer(
        bind=f"{host}:0",
        min_replicas=max(1, job.workers // 2),
        join_timeout_ms=int(JOIN * 1000),
        quorum_tick_ms=50,
        heartbeat_timeout_ms=int(HEARTBEAT * 1000),
    )
    says(int(server.address().rpartition(":")[2]))
    while True:
        time.sleep(1)


class Group:
    """One worker: a replica group of one process."""

    def __init__(self, job: Job, name: str, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        socket.gethostname = lambda: job.host  # where others fetch its checkpoint
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if job.host.startswith("127.") else "eth0"
        store = torch.distributed.TCPStore(job.host, 0, is_master=True, wait_for_workers=False)
        wait = timedelta(seconds=job.dead_after)

        def load(state: dict[str, Any]) -> None:
            net.load_state_dict(state["net"])
            optimizer.load_state_dict(state["optimizer"])

        self.store = store
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=wait),
            load_state_dict=load,
            state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
            min_replica_size=max(1, job.workers // 2),
            use_async_quorum=job.peer == "torchft-ddp",  # LocalSGD asks for the other
            timeout=wait,
            quorum_timeout=timedelta(seconds=60),
            connect_timeout=wait,
            rank=0,
            world_size=1,
            store_addr=job.host,
            store_port=store.port,
            lighthouse_addr=f"http://{job.lobby}",
            replica_id=name,
            hostname=job.host,
        )


def average(manager: Manager, net: nn.Module) -> None:
    """One bucket, managed. torchft's own DistributedDataParallel raises in 0.2.0 where an all-reduce fails."""
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    flat = torch.cat([gradient.view(-1) for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def train(parent: int, job: Job, name: str) -> None:
    """Train until the run or the parent process ends."""
    begin(parent, job, name)
    module, tell = Student(), Tell(job, name)
    plain = torch.optim.SGD(module.net.parameters(), lr=0.05, momentum=0.9)
    group = Group(job, name, module.net, plain)
    manager = group.manager
    ddp = job.peer == "torchft-ddp"
    optimizer: Any = Optimizer(manager, plain) if ddp else plain
    every, taken = 1 if ddp else LOCAL, 0
    loader = DataLoader(TensorDataset(examples(2, EXAMPLES)), BATCH, shuffle=True)
    torch.manual_seed(hash(name))  # each goes through the examples in an order of its own
    with nullcontext() if ddp else LocalSGD(manager, module.net, plain, every):
        while job.steps < 0 or manager.current_step() * every < job.steps:
            for (x,) in loader:
                optimizer.zero_grad()
                with torch.no_grad():
                    y = module.teacher(x)
                (module.net(x) - y).square().mean().backward()
                if ddp:
                    average(manager, module.net)
                optimizer.step()
                time.sleep(job.sleep * (job.slow if name == "w0" else 1.0))
                taken += 1
                if manager.current_step():  # before, it takes no part
                    tell.tell("step", step=manager.current_step() * every + (0 if ddp else taken % every))
                if 0 <= job.steps <= manager.current_step() * every:
                    break
    with torch.no_grad():
        tell.tell("end", loss=float(module.loss(examples(3, HELD_OUT))))
    os._exit(0)  # its threads would wait for others
