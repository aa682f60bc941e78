"""The reducer over worlds of threads: means, bytes, groups, overlap; which gradients share a message."""

import copy
import math
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_decentral.partial import Balanced, DepthAssignment, Full, PerWorker, Staircase, Temporal
from lightning_decentral.partial.plan.depth import contributors
from lightning_decentral.partial.wire.depth_controller import factors
from lightning_decentral.partial.wire.reducer import Packing, Rank, Reducer, sent_bytes
from lightning_decentral.shared.wire.transport import Transport, transport
from tests.world import world

pytestmark = pytest.mark.threads

SEGMENTS, WIDTH = 4, 8
CPU = torch.device("cpu")


CHAIN = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(SEGMENTS)])


def chain() -> nn.ModuleList:
    """The same on every thread."""
    return copy.deepcopy(CHAIN)


class Counted(Transport):
    """Counts what a ring all-reduce, a tree reduce and a tree broadcast send in all, charged to worker 0."""

    def __init__(self, inner: Transport, log: list[tuple[str, int, int]]) -> None:
        super().__init__(inner.group)
        self._inner, self._log = inner, log

    def _note(self, kind: str, tensor: Tensor) -> None:
        if self.rank == 0:
            self._log.append((kind, self.size, tensor.numel() * tensor.element_size()))

    def exchange(self, sends: Any, receives: Any) -> Any:
        return self._inner.exchange(sends, receives)

    def all_reduce(self, tensor: Tensor) -> Any:
        self._note("all_reduce", tensor)
        return self._inner.all_reduce(tensor)

    def reduce(self, tensor: Tensor, target: int) -> Any:
        self._note("reduce", tensor)
        return self._inner.reduce(tensor, target)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Any:
        self._note("broadcast", tensor)
        return self._inner.broadcast(tensor, source)


def total(log: Sequence[tuple[str, int, int]]) -> float:
    """Bytes of all workers."""
    copies = {"all_reduce": lambda k: 2 * (k - 1), "reduce": lambda k: k - 1, "broadcast": lambda k: k - 1}
    return sum(copies[kind](size) * amount for kind, size, amount in log)


def step(group: Any, stores: Any, assignment: DepthAssignment, log: list[Any], bucket_bytes: int) -> Any:
    """One backward of a chain, cut for this worker; (mean gradients, bytes by the reducer's own count)."""
    rank, size = group.rank(), group.size()

    def make(groups: Sequence[Sequence[int]] | None) -> Transport | None:
        (members,) = groups or [list(range(size))]  # one at a time, as groups of contributors overlap
        if rank not in members:
            return None
        store = dist.PrefixStore(f"{members}", stores)
        return Counted(transport(dist.ProcessGroupGloo(store, members.index(rank), len(members)), CPU), log)

    def hosts(groups: None) -> Transport:
        return Counted(transport(dist.ProcessGroupGloo(dist.PrefixStore("hosts", stores), rank, size), CPU), log)

    blocks = chain()
    sent = backward(rank, size, blocks, make, hosts, assignment, bucket_bytes, inputs(rank))
    return [p.grad for p in blocks.parameters()], sent


def backward(
    rank: int,
    size: int,
    blocks: nn.ModuleList,
    make: Any,
    hosts: Any,
    assignment: DepthAssignment,
    bucket_bytes: int,
    x: Tensor,
) -> float:
    """The same, on any device; bytes by the reducer's own count."""
    shares = tuple(assignment.share(r, size) for r in range(size))
    reducer = Reducer([list(b.parameters()) for b in blocks], Rank(rank, shares), make, hosts, bucket_bytes)
    found = contributors(assignment, size, 0, SEGMENTS)
    scales = factors(found, shares)
    lowest = SEGMENTS - assignment.depth(rank, size, 0, SEGMENTS)
    reducer.begin(found)
    for index, block in enumerate(blocks):
        if index == lowest:
            x = x.detach()
        if index and x.requires_grad:
            x.register_hook(lambda g, f=scales[index - 1]: g * f)
        x = block(x).tanh()
    x.square().sum().backward()
    reducer.finish()
    reducer.close()
    return reducer.sent_bytes


def inputs(rank: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(rank))


def reference(assignment: DepthAssignment, size: int) -> list[Tensor | None]:
    rows = []
    for rank in range(size):
        blocks = chain()
        x = inputs(rank)
        for block in blocks:
            x = block(x).tanh()
        x.square().sum().backward()
        rows.append([p.grad for p in blocks.parameters()])
    found = contributors(assignment, size, 0, SEGMENTS)
    weights = [assignment.share(r, size) for r in range(size)]
    return [
        sum(weights[r] * rows[r][i] for r in found[i // 2]) / sum(weights[r] for r in found[i // 2])
        if found[i // 2]
        else None
        for i in range(2 * SEGMENTS)
    ]


class Low(Temporal):
    """Depth 2 on all."""

    def after(self, *_: Any) -> int:
        return 2


@pytest.mark.sampled
@pytest.mark.parametrize("bucket_bytes", [1, 10_000_000])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["full", "staircase", "low", "balanced", "unequal"])
def test_means_and_bytes(kind: str, size: int, bucket_bytes: int) -> None:
    assignment: DepthAssignment = {
        "full": Full(),
        "staircase": Staircase(),
        "low": Low(),
        "balanced": Balanced(),
        "unequal": PerWorker(fractions=(1.0, 0.25, 1.0, 0.5)[:size]),
    }[kind]
    store, log = dist.HashStore(), []
    rows = world(size, lambda group: step(group, store, assignment, log, bucket_bytes))
    expected = reference(assignment, size)
    for gradients, _ in rows:
        for gradient, value, first in zip(gradients, expected, rows[0][0], strict=True):
            assert (gradient is None) == (value is None)
            if value is not None:
                torch.testing.assert_close(gradient, value, rtol=1e-5, atol=1e-7)
                assert torch.equal(gradient, first)
    assert sum(sent for _, sent in rows) == pytest.approx(total(log))


def test_a_staircase_of_threads_sends_three_quarters() -> None:
    sent = {}
    for name, assignment in {"full": Full(), "stairs": Staircase()}.items():
        store = dist.HashStore()
        rows = world(4, lambda group, a=assignment, s=store: step(group, s, a, [], 10**7))
        sent[name] = sum(bytes_sent for _, bytes_sent in rows)
    # Of each parameter the hosts tell each other who used it, and once whether there is news.
    parameters = [*chain().parameters()]
    flags, payload = 2 * 3 * 4 * (len(parameters) + 1), 2 * 3 * 4 * sum(p.numel() for p in parameters)
    assert sent["full"] == payload + flags
    assert sent["stairs"] == pytest.approx(0.75 * payload + flags)


def test_buckets_leave_while_backward_still_runs() -> None:
    """The last block's mean is under way before the first block's backward has begun."""
    order: list[str] = []
    store = dist.HashStore()
    lock = threading.Lock()

    def worker(group: Any) -> None:
        log: list[Any] = []
        blocks = chain()

        class Noted(Counted):
            def all_reduce(self, tensor: Tensor) -> Any:
                if self.rank == 0 and tensor.is_floating_point():
                    with lock:
                        order.append("leaves")
                return self._inner.all_reduce(tensor)

        def make(groups: Any, name: str = "gradients") -> Transport:
            over = dist.ProcessGroupGloo(dist.PrefixStore(name, store), group.rank(), group.size())
            return Noted(transport(over, CPU), log)

        block_bytes = 4 * sum(p.numel() for p in blocks[0].parameters())
        segments, place = [list(b.parameters()) for b in blocks], Rank(group.rank(), (0.5, 0.5))
        reducer = Reducer(segments, place, make, partial(make, name="hosts"), block_bytes)
        reducer.begin([(0, 1)] * SEGMENTS)
        x = inputs(0)
        for index, block in enumerate(blocks):
            x = block(x).tanh()
            if group.rank() == 0:
                x.register_hook(lambda _, i=index: order.append(f"backward of {i}"))
        x.square().sum().backward()
        reducer.finish()

    world(2, worker)
    assert order.index("leaves") < order.index("backward of 1")
    assert order.count("leaves") == SEGMENTS


@given(size=st.integers(2, 40))
def test_a_staircase_sends_three_quarters_of_an_all_reduce(size: int) -> None:
    total = sum(sent_bytes(1 / size, contributors, size) for contributors in range(1, size + 1))
    assert math.isclose(total, 0.75 * 2 * (size - 1) / size)


def test_bytes_of_extremes() -> None:
    assert sent_bytes(100, 0, 4) == 0
    assert sent_bytes(100, 1, 1) == 0
    assert sent_bytes(100, 4, 4) == 150, "2 (n - 1) / n, an all-reduce"
    assert sent_bytes(100, 1, 4) == 75, "one hands it to three: 300 bytes of four workers"


# ---- buckets: neighbours in backward with the same contributors and one type, if there is room ----------------------

BOTH, FIRST = (0, 1), (0,)


def segment(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def test_segments_with_the_same_contributors_share_a_bucket() -> None:
    bottom, middle, top = segments = [segment(4), segment(2, 3), segment(5)]
    (whole,) = Packing(segments, None).buckets([BOTH] * 3)
    assert [id(p) for p in whole.parameters] == [id(p) for p in (*top, *reversed(middle), *bottom)], "as in backward"
    assert whole.bytes == 4 * 14
    upper, lower = Packing(segments, None).buckets([FIRST, BOTH, BOTH])
    assert (upper.ranks, lower.ranks) == (BOTH, FIRST)
    assert len(lower.parameters) == 1


def test_a_bucket_holds_what_it_has_room_for() -> None:
    segments = [segment(10), segment(10), segment(10)]
    sizes = [len(b.parameters) for b in Packing(segments, 2 * 4 * 10).buckets([BOTH] * 3)]
    assert sizes == [2, 1]


def test_types_travel_apart_in_the_order_in_which_backward_completes_them() -> None:
    """float64 lies in the top and in the bottom segment: its bucket is complete last."""
    wide = torch.float64
    segments = [segment(2, dtype=wide), segment(3), segment(4, dtype=wide)]
    kinds = [b.flat.dtype for b in Packing(segments, None).buckets([BOTH] * 3)]
    assert kinds == [torch.float32, wide]


def test_another_step_with_other_depths_uses_the_same_memory() -> None:
    packing = Packing([segment(4), segment(6)], None)
    (whole,) = packing.buckets([BOTH, BOTH])
    upper, lower = packing.buckets([FIRST, BOTH])
    whole.flat.fill_(1.0)
    assert float(upper.flat.sum() + lower.flat.sum()) == 4 + 6


def test_what_nobody_trains_takes_no_memory() -> None:
    packing = Packing([segment(1000), segment(6)], None)
    (upper,) = packing.buckets([(), BOTH])
    assert upper.flat.untyped_storage().nbytes() == 4 * 6
    assert sum(b.flat.numel() for b in packing.buckets([BOTH, BOTH])) == 1006
