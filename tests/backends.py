"""The places where wire and trainer tests run: written once, run wherever the hardware is.

cpu        threads, gloo
simulated  threads, a simulated device each, communicators with NCCL's order
staged     threads on one CUDA device, gloo through pinned host memory      (marker gpu)
nccl       processes, one CUDA device each                                   (marker multigpu)
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from lightning_decentral.shared.wire.transport import Transport, transport
from tests import ports
from tests.simulated.wire import device_world
from tests.world import world

T = TypeVar("T")


@dataclass(frozen=True)
class Backend:
    """How a world of workers is made, and on which device each computes."""

    name: str
    accelerator: str

    def device(self, rank: int) -> torch.device:
        """Of one worker."""
        return {"cpu": torch.device("cpu"), "nccl": torch.device("cuda", rank)}.get(self.name, torch.device("cuda", 0))

    def largest_world(self) -> int:
        """Workers that this machine can hold."""
        return torch.cuda.device_count() if self.name == "nccl" else 64

    def world(self, size: int, worker: Callable[[Transport], T], seconds: float = 20.0) -> list[T]:
        """[worker(transport of rank 0), ...]; NCCL's processes need a module-level function or a partial of one."""
        if size > self.largest_world():
            pytest.skip(f"needs {size} CUDA devices, this machine has {self.largest_world()}")
        if self.name == "nccl":
            return _processes(size, worker)
        if self.name == "simulated":
            return device_world(size, lambda make, _: worker(make()))
        return world(size, lambda group: worker(transport(group, self.device(group.rank()))), seconds)


BACKENDS = [
    Backend("cpu", "cpu"),
    Backend("simulated", "cuda"),
    pytest.param(Backend("staged", "cuda"), marks=pytest.mark.gpu),
    pytest.param(Backend("nccl", "cuda"), marks=pytest.mark.multigpu),
]
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


def everywhere(names: str, cases: Sequence[Any], elsewhere: Callable[..., bool]) -> pytest.MarkDecorator:
    """`backend` and these names: all cases on the CPU, on devices those in which one may differ from it."""
    chosen = [case for case in cases if elsewhere(*case)]
    assert chosen
    pairs = [(backend, case) for backend in BACKENDS for case in (cases if backend is BACKENDS[0] else chosen)]
    found = [
        pytest.param(*backend.values, *case, marks=backend.marks) if hasattr(backend, "marks") else (backend, *case)
        for backend, case in pairs
    ]
    return pytest.mark.parametrize(f"backend,{names}", found, ids=lambda of: getattr(of, "name", str(of)))


trainer_backends = pytest.mark.parametrize("accelerator", ["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])


def _processes(size: int, worker: Callable[[Transport], Any]) -> list[Any]:
    port = ports.free()
    results = torch.multiprocessing.get_context("spawn").Manager().dict()
    torch.multiprocessing.spawn(_process, args=(size, port, worker, results), nprocs=size)
    return [results[rank] for rank in range(size)]


def _process(rank: int, size: int, port: int, worker: Callable[[Transport], Any], results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device)
    results[rank] = worker(transport(dist.new_group(), device))
    dist.destroy_process_group()
