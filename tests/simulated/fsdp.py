"""FSDP2 on the simulated device: torch's own code, with this device's streams where it asks for torch.cuda's.

Its tensors, hooks, waits and the order of its collectives are torch's. They go over communicators with NCCL's order
between threads, and by gloo, staged, between processes.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state
from torch.distributed.tensor import DTensor

from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import GlooTransport, StagedTransport, Transport
from tests.simulated.memory import Block
from tests.simulated.streams import CUDA, Event, Stream, current, on, the
from tests.simulated.tensors import PUT_TOGETHER, Simulated
from tests.simulated.wire import Group


class OwnStream(Stream):
    """One of FSDP's, on which nobody else takes memory. As the allocator does, it has back what it gave when it takes
    some again: FSDP relies on that, and has the stream wait before. Elsewhere the memory might be anybody's at once."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self._free: list[Callable[[], object]] = []

    def takes(self) -> None:
        again, self._free = self._free, []
        for run in again:
            self.then(run)

    def reuses(self, run: Callable[[], object]) -> None:
        self._free.append(run)


HANDLE = SimpleNamespace(
    Stream=OwnStream,
    Event=Event,
    stream=on,
    current_stream=lambda *_: current(),
    current_device=lambda: CUDA.index,
    device_count=lambda: 1,
)
"""What FSDP asks of torch.cuda."""
ASKING = (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state, device_mesh)
GATHERS = ("all_gather_single", "all_gather_into_tensor")
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")
"""The same function under its new and its old name."""
from_group = DeviceMesh.from_group


class Mesh(DeviceMesh):
    """Of the devices of one communicator."""

    def __init__(self, group: Group, names: tuple[str, ...] | None) -> None:
        ranks = list(range(group.size()))
        super().__init__("cuda", ranks, mesh_dim_names=names, _init_backend=False, _rank=group.rank())
        self._group, self._dim_group_names = group, [group.group_name]
        self._thread_id = threading.get_ident()  # DTensor takes equal ones for the same, with the same rank
        _groups()[group.group_name] = group

    def get_group(self, mesh_dim: Any = None) -> Any:
        return self._group

    def get_local_rank(self, mesh_dim: Any = None) -> int:
        return self._group.rank()


def _groups() -> dict[str, Group]:
    """Of this worker, by name."""
    found: dict[str, Group] = the().once("groups", dict)
    return found


def _from_group(group: Any, device_type: str, *args: Any, mesh_dim_names: Any = None) -> DeviceMesh:
    if not isinstance(group, Group):
        return from_group(group, device_type, *args, mesh_dim_names=mesh_dim_names)
    return Mesh(group, mesh_dim_names)


def _named(name: str) -> Any:
    return _groups().get(name) or distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _over(group: Any) -> Transport:
    return group.over if isinstance(group, Group) else StagedTransport(GlooTransport(group))


def _gather(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> None:
    assert not async_op
    _over(group).all_gather_into(output_tensor, input_tensor).wait()


def _scatter(output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> None:
    assert not async_op
    _over(group).reduce_scatter(output, input).wait()
    if op == dist.ReduceOp.AVG:
        output.div_(group.size())


# ---- functional collectives, by which DTensor puts a whole together ------------------------------------------------


def _gathered(part: Tensor, size: int, name: Any) -> Tensor:
    whole = part.new_empty((size * part.shape[0], *part.shape[1:]))
    pending = _over(_named(name)).all_gather_into(whole.view(-1), part.contiguous().view(-1))
    _under_way()[whole.untyped_storage()] = pending  # type: ignore[index]
    return whole


def _under_way() -> dict[Block, Pending]:
    found: dict[Block, Pending] = the().once("under way", dict)
    return found


def _waited(tensor: Simulated) -> Tensor:
    pending = _under_way().pop(tensor.untyped_storage(), None)
    if pending is not None:
        pending.wait()
    return tensor


PUT_TOGETHER.update(
    {
        "fsdp::all_gather_copy_in": _fsdp_collectives.all_gather_copy_in_cuda,
        "fsdp::split_with_sizes_copy": _fsdp_collectives.split_with_sizes_copy,
        "fsdp::chunk_cat": _fsdp_collectives.chunk_cat,
        "_c10d_functional::all_gather_into_tensor": _gathered,
        "_c10d_functional::wait_tensor": _waited,
        "_c10d_functional::_wrap_tensor_autograd": _waited,
    }
)


@contextmanager
def door() -> Iterator[None]:
    """Within, `fully_shard` shards over simulated devices."""
    with ExitStack() as stack:
        gc.disable()  # FSDP's objects hold each other: what they hold would go back when and where a collector comes by
        stack.callback(gc.enable)
        for module in ASKING:
            stack.enter_context(mock.patch.object(module, "_get_device_handle", return_value=HANDLE))
        for function, names in ((_gather, GATHERS), (_scatter, SCATTERS)):
            for name in names:
                if hasattr(dist, name):
                    stack.enter_context(mock.patch.object(dist, name, function))
        size_of = lambda name: _named(name).size()  # noqa: E731
        stack.enter_context(mock.patch.object(distributed_c10d, "_get_group_size_by_name", size_of))
        stack.enter_context(mock.patch.object(DeviceMesh, "from_group", staticmethod(_from_group)))
        for name in ("device", "is_cuda", "is_cpu"):  # to C++ it's the host's
            of_shard = property(lambda self, name=name: getattr(self._local_tensor, name))
            stack.enter_context(mock.patch.object(DTensor, name, of_shard, create=True))
        yield
