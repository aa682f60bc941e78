"""Transports over gloo and NCCL with one interface: process groups, messages, sums; all torch.distributed calls."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.wire.pending import Pending, StagedCopy, Together, raise_lost

STORES: Any = dist  # torch.distributed, untyped: its type stubs lack some names
Disjoint = Sequence[Sequence[int]]


class Message(NamedTuple):
    """One tensor to or from one peer; `tag` distinguishes the messages of one pair."""

    peer: int  # the peer's rank in the group
    tensor: Tensor  # the tensor to send, or to receive into
    tag: int


@dataclass
class Work:
    """A torch work handle whose errors name the peer."""

    work: Any
    peer: str
    rank: int

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise_lost(error, self.peer, self.rank)
            raise

    def done(self) -> bool:
        return bool(self.work.is_completed())


class Transport(ABC):
    """Point-to-point and collective transfers over one process group, of complex numbers as pairs."""

    queued: ClassVar[bool] = False  # true where the current stream waits, not the host

    def __init__(self, group: Any) -> None:
        self.group = group  # registered or not; the global one is never used
        self.rank: int = group.rank()
        self.size: int = group.size()
        # Errors name workers by their global ranks. Groups between threads aren't registered.
        self._workers = list(STORES.distributed_c10d._world.pg_group_ranks.get(group, range(self.size)))
        self._own: int = self._workers[self.rank]

    def close(self) -> None:
        """Destroy the process group, although other objects may refer to this transport."""
        dist.destroy_process_group(self.group)
        self.group = None

    @abstractmethod
    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        """Start a round's messages; return (handles of the sends, of the receives). Both sides list a pair's alike."""

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Start an all-reduce: tensor <- sum over workers of tensor, in place."""
        return Work(self.group.allreduce(_pairs(tensor)), "the others", self._own)

    @property
    def store(self) -> Any:
        return STORES.distributed_c10d._get_process_group_store(self.group)

    def reduce(self, tensor: Tensor, target: int) -> Pending:
        """Start a reduce: the target's tensor <- sum over workers of tensor, in place; the others' become undefined."""
        return Work(self.group.reduce(_pairs(tensor), _root(dist.ReduceOptions(), target)), "the others", self._own)

    def all_gather(self, tensor: Tensor) -> tuple[Pending, list[Tensor]]:
        """Start an all-gather: one tensor from every worker, in order of rank, valid after the wait."""
        rows = [torch.empty_like(tensor) for _ in range(self.size)]  # by rank
        return Work(self.group.allgather([_pairs(*rows)], _pairs(tensor)), "the others", self._own), rows

    def all_gather_into(self, whole: Tensor, part: Tensor) -> Pending:  # (workers * elements,), (elements,)
        """Start an all-gather: whole <- the parts of all workers, one behind the other in order of rank."""
        return Work(self.group._allgather_base(*_pairs(whole, part)), "the others", self._own)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Pending:  # (elements,), (workers * elements,)
        """Start a reduce-scatter: part <- this worker's part of the sum over workers of whole, parts in rank order."""
        return Work(self.group._reduce_scatter_base(*_pairs(part, whole)), "the others", self._own)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        """Start a broadcast: tensor <- the source's tensor, in place."""
        peer = "the others" if source == self.rank else f"worker {self._workers[source]}"
        return Work(self.group.broadcast(_pairs(tensor), _root(dist.BroadcastOptions(), source)), peer, self._own)

    def greet(self, timeout: timedelta) -> bool:
        """Return whether this worker receives from all others of a new group. Collective; it may fail on some alone."""
        return True  # NCCL connects in its first call, as it decides


class GlooTransport(Transport):
    """Transport of CPU tensors by gloo: plain sends and receives on the group object."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        # On the group object: `batch_isend_irecv` refuses groups that aren't registered, as a world of threads is.
        incoming = [self._post(self.group.recv, m) for m in receives]
        return [self._post(self.group.send, m) for m in sends], incoming

    def greet(self, timeout: timedelta) -> bool:
        # Gloo takes any program that sends a pair's number, a small integer, for that peer; the real peer then waits.
        greetings, options = torch.empty(self.size, dtype=torch.int64), dist.AllToAllOptions()
        options.timeout = timeout
        with suppress(RuntimeError):
            self.group.alltoall_base(greetings, torch.full_like(greetings, self.rank), [], [], options).wait()
            return greetings.equal(torch.arange(self.size))
        return False

    def _post(self, start: Callable[..., Any], message: Message) -> Pending:
        peer = f"neighbour {self._workers[message.peer]}"
        try:
            return Work(start([message.tensor], message.peer, message.tag), peer, self._own)
        except RuntimeError as error:  # a broken connection may raise here already
            raise_lost(error, peer, self._own)
            raise


class NcclTransport(Transport):
    """Transport by NCCL: all messages of a round in one launch; the current stream waits, not the host."""

    queued = True

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        # NCCL wants all of a round coalesced into one launch, and pairs sends and receives by order.
        operations = [dist.P2POp(dist.irecv, m.tensor, group=self.group, group_peer=m.peer) for m in receives]
        operations += [dist.P2POp(dist.isend, m.tensor, group=self.group, group_peer=m.peer) for m in sends]
        works = dist.batch_isend_irecv(operations) if operations else []
        launch = Together([Work(work, "a neighbour", self._own) for work in works])
        return [launch for _ in sends], [launch for _ in receives]


class StagedTransport(Transport):
    """Transport of device tensors over one for CPU tensors: copies them through pinned host memory."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.group)
        self._inner = inner

    def close(self) -> None:
        self._inner.close()
        self.group = None

    def greet(self, timeout: timedelta) -> bool:
        return self._inner.greet(timeout)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        # The host waits for every copy from the device: the inner transport reads it at once.
        leaving = [m._replace(tensor=cuda.host_like(m.tensor).copy_(m.tensor)) for m in sends]
        coming = [m._replace(tensor=cuda.host_like(m.tensor)) for m in receives]
        outgoing, incoming = self._inner.exchange(leaving, coming)
        return (
            [StagedCopy(p, m.tensor, None) for p, m in zip(outgoing, leaving, strict=True)],
            [StagedCopy(p, m.tensor, own.tensor) for p, m, own in zip(incoming, coming, receives, strict=True)],
        )

    def all_reduce(self, tensor: Tensor) -> Pending:
        host = cuda.host_like(tensor).copy_(tensor)  # pinned
        return StagedCopy(self._inner.all_reduce(host), host, tensor)

    def reduce(self, tensor: Tensor, target: int) -> Pending:
        host = cuda.host_like(tensor).copy_(tensor)
        return StagedCopy(self._inner.reduce(host, target), host, tensor)

    def all_gather(self, tensor: Tensor) -> tuple[Pending, list[Tensor]]:
        pending, hosts = self._inner.all_gather(cuda.host_like(tensor).copy_(tensor))
        rows = [torch.empty_like(tensor) for _ in hosts]  # on the device
        return Together([StagedCopy(pending, host, row) for host, row in zip(hosts, rows, strict=True)]), rows

    def all_gather_into(self, whole: Tensor, part: Tensor) -> Pending:
        host = cuda.host_like(whole)
        return StagedCopy(self._inner.all_gather_into(host, cuda.host_like(part).copy_(part)), host, whole)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Pending:
        host = cuda.host_like(part)
        return StagedCopy(self._inner.reduce_scatter(host, cuda.host_like(whole).copy_(whole)), host, part)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        host = cuda.host_like(tensor).copy_(tensor)
        return StagedCopy(self._inner.broadcast(host, source), host, tensor)


def _pairs(*tensors: Tensor) -> list[Tensor]:  # views: not every backend knows complex numbers
    return [torch.view_as_real(t).view(-1) if t.is_complex() else t for t in tensors]


def _root(options: Any, rank: int) -> Any:
    options.rootRank, options.rootTensor = rank, 0
    return options


def transport(group: Any, device: torch.device) -> Transport:
    """Return the transport of `group` for tensors on `device`. ValueError: the group's backend is neither gloo nor
    NCCL, or its NCCL can't send and receive at once."""
    if (name := group.name()) == "nccl":
        if not group._get_backend(torch.device("cuda")).supports_coalescing:  # all would receive before they send
            one_by_one = "NCCL does a round's sends and receives one by one here, and workers would wait for each other"
            raise ValueError(f"{one_by_one}: unset TORCH_DISTRIBUTED_DEBUG=DETAIL (INFO is fine)")
        return NcclTransport(group)
    if name != "gloo":
        raise ValueError(f"workers communicate by gloo or nccl, got {name}: set process_group_backend to one of them")
    return GlooTransport(group) if device.type == "cpu" else StagedTransport(GlooTransport(group))


def of_all(make: Callable[[Disjoint | None], Transport | None]) -> Transport:
    """Make a new group of all workers, by `Wire.group` or `Wire.hosts`. Collective."""
    made = make(None)
    assert made is not None
    return made


@contextmanager
def world(timeout: timedelta) -> Iterator[None]:
    """Context with the process group that torchrun's variables describe, for programs without Lightning."""
    dist.init_process_group("gloo", timeout=timeout)  # workers communicate before they agree on devices
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Wire:
    """Process groups of one worker, as transports."""

    world: Transport  # transport of means over all workers
    flags: Transport  # for a few numbers exchanged between rounds; CPU tensors
    roll: Transport  # for the roll call at the end of an epoch; CPU tensors
    store: Any  # the key-value store of the group
    group: Callable[[Disjoint | None], Transport | None]
    """Make new groups, which share no worker (None: one group of all), and return this worker's, or None without one.
    Collective: every worker calls it, once for all groups."""
    hosts: Callable[[Disjoint | None], Transport | None]  # the same for CPU tensors, by gloo
    close: Callable[[], None]
    """Close the groups, their threads and connections. On every worker, with no message in flight."""
    abandon: Callable[[], None]
    """Close the groups on this worker alone, also with messages in flight. NCCL groups stay until the process ends."""


def new_group(groups: Disjoint | None, backend: str | None, timeout: timedelta | None) -> Any:
    """Make groups that share no worker (None: one of all), and return this worker's or None. Collective."""
    each = [None] if groups is None else [list(ranks) for ranks in groups]
    try:
        whole = STORES.group.WORLD
        over = whole._get_backend(whole.bound_device_id) if groups and whole.bound_device_id else None
        if over and over.name() != "nccl":
            whole.bound_device_id = None  # gloo claims to support splits, so torch would try one, and fail
        elif over and backend in (None, "nccl") and over.supports_splitting:
            return STORES.split_group(None, each, timeout)  # NCCL would split for each
        made = [dist.new_group(ranks, timeout, backend) for ranks in each]  # outsiders needn't take part
    except RuntimeError as error:
        raise_lost(error, "the others", dist.get_rank())
        raise
    return next((group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER), None)


def own_connection(name: str) -> Any:
    """Return a connection to the key-value store with its own keys, for one thread: if it blocks, no other does."""
    store = STORES.distributed_c10d._get_default_store()
    return STORES.PrefixStore(name, store.clone() if hasattr(store, "clone") else store)  # an older torch can't


def abort_nccl() -> None:
    """Abort all NCCL communicators of this process, so that waiting kernels end; no communicator works afterwards."""
    groups = STORES.distributed_c10d._world.pg_backend_config.items()
    found = [group._get_backend(torch.device("cuda")) for group, backends in [*groups] if "nccl" in backends]
    if found:
        found[0]._group_start()  # together: one communicator's end may wait for another's (pytorch#119797)
        for backend in found:
            backend.abort()
        found[0]._group_end()


def connected() -> bool:
    """Return whether this process belongs to a process group of more than one worker right now."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def everyone() -> Transport:
    """Return the transport of the default process group, for use before this package's groups exist."""
    return transport(dist.group.WORLD, torch.device("cpu"))  # tensors on the host, or on the device for NCCL
