"""torch.distributed for workers in threads of one process: each worker's thread has a default process group of its own.

    get_rank, get_world_size, is_initialized, get_backend        as the thread's worker has them
    all_reduce, all_gather, broadcast, barrier, and objects      through mailboxes between the threads

It serves code that calls torch.distributed itself: sharded data streams, metrics, Lightning's own collectives. It
replaces torch.distributed's process group, and opens no connection."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from threading import local
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import ReduceOp, distributed_c10d
from torch.futures import Future

from lightning_decentral.shared.wire.in_process import InProcessTransport

BACKEND = "gloo"
SERVED = "all_reduce, all_gather, broadcast, barrier"
OPERATIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}
"""Reductions of an all-reduce, in addition to the sum."""


def _done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return _create_work_from_future(future)


class InProcessGroup(dist.ProcessGroup):
    """Default process group of one worker's thread. Every call has finished when it returns."""

    def __init__(self, over: InProcessTransport) -> None:
        super().__init__(over.rank, over.size)  # type: ignore[call-arg]
        self._over = over

    def rank(self) -> int:
        return self._over.rank

    def size(self) -> int:
        return self._over.size

    def getBackendName(self) -> str:  # noqa: N802 (torch's)
        return BACKEND

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        operation = ReduceOp.SUM if opts is None else opts.reduceOp
        for tensor in tensors:
            if operation == ReduceOp.SUM:
                self._over.all_reduce(tensor).wait()
                continue
            # Found by ==: a `ReduceOp` equals its kind, but has another type and hash.
            combine = next((call for known, call in OPERATIONS.items() if operation == known), None)
            if combine is None:
                raise ValueError(
                    f"workers of one process reduce by sum, product, min and max, not by {operation}: take a sum"
                )
            tensor.copy_(reduce(combine, self._gathered(tensor)))
        return _done(tensors)

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        pending, rows = self._over.all_gather(tensor.contiguous())
        pending.wait()
        return rows

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        for rows, tensor in zip(outputs, inputs, strict=True):
            torch._foreach_copy_(list(rows), self._gathered(tensor))
        return _done(outputs)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        output.copy_(torch.cat([row.reshape(-1) for row in self._gathered(tensor)]).view_as(output))
        return _done(output)

    all_gather_single = _allgather_base  # type: ignore[assignment]

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        for tensor in tensors:
            self._over.broadcast(tensor, 0 if opts is None else opts.rootRank).wait()
        return _done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        return self.allreduce([torch.zeros(1)])


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError(
            f"workers of one process don't serve torch.distributed's {name}: {SERVED}, or run it on processes"
        )

    return refuse


for _name in (
    *("reduce", "gather", "scatter", "send", "recv", "recv_anysource", "alltoall", "alltoall_base"),
    *("all_to_all_single", "reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
    *("allreduce_coalesced", "monitored_barrier"),
):
    setattr(InProcessGroup, _name, _refused(_name))


class ThreadsWorld:
    """Stands in for torch.distributed's registry of groups: a thread's own default group, else the process's."""

    def __init__(self) -> None:
        self._of_process, self._own = distributed_c10d._world, local()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which threads may have default groups of their own."""
        self._of_process = distributed_c10d._world
        distributed_c10d._world = self  # type: ignore[assignment]
        try:
            yield
        finally:
            distributed_c10d._world = self._of_process

    def join(self, group: InProcessGroup) -> None:
        self._own.group = group

    @property
    def _group(self) -> InProcessGroup | None:
        return getattr(self._own, "group", None)

    @property
    def default_pg(self) -> Any:
        return self._group or self._of_process.default_pg

    @property
    def pg_map(self) -> Any:
        return self._of_process.pg_map if self._group is None else {self._group: (BACKEND, None)}

    @property
    def pg_group_ranks(self) -> Any:
        group = self._group
        ranks = self._of_process.pg_group_ranks
        return ranks if group is None else {group: {rank: rank for rank in range(group.size())}}

    @property
    def group_count(self) -> int:
        if self._group is not None:
            _refused("new_group")()
        return self._of_process.group_count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._of_process.group_count = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of_process, name)
