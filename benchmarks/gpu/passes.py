"""Costs of a round of gossip on a device, without its messages: passes over the parameters, and kernels.

    python benchmarks/gpu.py passes

Also what averaging gradients costs. One worker receives from one neighbour or two, delay 1. Its device is the simulated
one of the tests, so that the operations are those of a device; a dispatch mode counts them. A pass reads or writes as
many bytes as the parameters have; what an operation reads twice from one place counts once. Views and allocations
launch nothing. After `WARM_UP` rounds, between those in which a codec measures its error; the wire's own copies are
left out.

An operation is in the training's way if it runs on the stream on which the training computes.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_decentral.gossip import Codec, Exponential, Gossip, Int8, Own, Plain
from lightning_decentral.gossip.round_cost import LoopbackTransport
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.overlap import overlapped
from lightning_decentral.gossip.wire.peer import PeerExchange
from lightning_decentral.shared.compute.buckets import LooseBucket
from lightning_decentral.shared.wire.averaging.gradient_average import GradientAverage
from lightning_decentral.shared.wire.compressed_mean import ExactMean
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Message
from tests import simulated
from tests.simulated import CUDA

ELEMENTS, WARM_UP = 2**18, 18
NO_KERNELS = {
    *("view", "_unsafe_view", "slice", "select", "split", "as_strided", "detach", "alias", "expand", "t", "transpose"),
    *("permute", "unsqueeze", "unfold", "squeeze", "unbind", "view_as_real", "lift_fresh", "split_with_sizes"),
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"),
}
UNREAD = {
    **dict.fromkeys(("copy_", "fill_", "zero_", "difference_", "judge_", "int8_decode_"), 1),
    **dict.fromkeys(("state_", "correct_and_state_", "int8_encode_"), 2),
}
"""How many of their first arguments they write to and don't read."""
LAUNCHES = {"state_": 2, "correct_and_state_": 2}
"""Of operators of our own that take more than one: a copy by many programs, and one that puts theirs together."""


class Cost(NamedTuple):
    """Passes over memory that one round takes.

    Attributes:
        passes: over the parameters, in all.
        in_the_way: of them on the training's stream.
        kernels: for each bucket.
        by_operation: passes of each.
    """

    passes: float
    in_the_way: float
    kernels: float
    by_operation: dict[str, float]


class Uncounted(LoopbackTransport):
    """The wire is measured by itself; its waits are the current stream's, as NCCL's are."""

    queued = True

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        with _disable_current_modes():
            return super().exchange(sends, receives)

    def all_reduce(self, tensor: Tensor) -> Pending:
        return self.broadcast(tensor)  # this worker's is the sum


class Counting(TorchDispatchMode):
    """Bytes and launches of all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels, self.moved = Counter[str](), Counter[str]()
        self.in_the_way = 0
        self._training = simulated.current()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not any(t.is_cuda for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)):
            return result  # the host's own
        if name == "copy_" and not args[0].is_cuda:
            return result  # the copy engine's
        if name not in NO_KERNELS:
            out = [t for t in tree_leaves((kwargs or {}).get("out")) if isinstance(t, Tensor)]
            read = _places([args[UNREAD.get(name, 0) :], {**(kwargs or {}), "out": None}])
            written = _places([result, out, _changed(func, args) if result is None else ()])
            if name == "index_select":  # of its source it reads what it writes
                read[args[0].data_ptr(), args[0].numel()] = 0
                moved = sum(read.values()) + 2 * sum(written.values())
            else:
                moved = sum(read.values()) + sum(written.values())
            self.kernels[name] += LAUNCHES.get(name, 1)
            self.moved[name] += moved
            self.in_the_way += moved if simulated.current() is self._training else 0
        return result


def _changed(func: Any, args: Sequence[Any]) -> list[Any]:
    """Arguments that an operator without a result writes to."""
    infos = [argument.alias_info for argument in func._schema.arguments]
    return [arg for arg, info in zip(args, infos, strict=False) if info is not None and info.is_write]


def _places(tree: Any) -> dict[tuple[int, int], int]:
    """{(address, elements): bytes} of its tensors."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors}


def cost(codec: Codec, neighbours: int = 1, buckets: int = 4) -> Cost:
    """Return the cost of a round with this codec, on a device."""
    with ExitStack() as stack:
        stack.enter_context(simulated.device(seed=0))
        flat = torch.randn(ELEMENTS).to(CUDA)
        echo = Uncounted(1 << neighbours)  # on the exponential graph of 2^k workers each receives from k
        exchange = overlapped(PeerExchange(Exponential(), Own(), echo, CUDA, codec), CUDA, 1)
        mixer = Mixer([LooseBucket(part) for part in flat.chunk(buckets)], Gossip(), exchange, 1)
        for _ in range(WARM_UP):
            mixer.step()
        echo.silent = True
        counting = stack.enter_context(Counting())
        mixer.step()
    return summed(counting, buckets)


def summed(counting: Counting, buckets: int) -> Cost:
    """Return the counted passes as multiples of the parameters' bytes, and kernels by bucket."""
    whole = 4 * ELEMENTS
    shares = {name: round(moved / whole, 2) for name, moved in counting.moved.most_common() if moved > whole / 10}
    passes = sum(counting.moved.values()) / whole
    return Cost(passes, counting.in_the_way / whole, sum(counting.kernels.values()) / buckets, shares)


def averaging(buckets: int = 4, parameters: int = 16) -> Cost:
    """Return the cost of a step's `GradientAverage` over an `ExactMean`: packing and dividing, nothing is copied
    back."""
    with ExitStack() as stack:
        stack.enter_context(simulated.device(seed=0))
        own = [nn.Parameter(torch.randn(ELEMENTS // parameters).to(CUDA)) for _ in range(parameters)]
        over = Uncounted(2)
        average = GradientAverage(ExactMean(over), over, lambda call: call(), 4 * ELEMENTS // buckets)
        average.watch(own)
        for p in own:
            p.grad = torch.ones_like(p)
        average.begin()
        counting = stack.enter_context(Counting())
        average.finish()
    return summed(counting, buckets)


def main() -> None:
    print("| codec | neighbours | passes | in the training's way | kernels a bucket | passes by operation |")
    print("| --- | --- | --- | --- | --- | --- |")
    rows = {(f"`{c}`", n): cost(c, n) for c, n in ((Plain(), 1), (Plain(), 2), (Int8(), 1))}
    rows["gradients' mean", 0] = averaging()
    for (name, neighbours), of in rows.items():
        shares = ", ".join(f"{operation} {share:g}" for operation, share in of.by_operation.items())
        numbers = f"{of.passes:.1f} | {of.in_the_way:.1f} | {of.kernels:.0f}"
        print(f"| {name} | {neighbours or ''} | {numbers} | {shares} |")
