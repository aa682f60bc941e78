"""Forecasts of plain and sharded data parallelism (DDP, FSDP): buckets overlapped with the backward.

    forward -> backward, last block first -> update
                  bucket 0 -> all-reduce
                         bucket 1 -> all-reduce ...

Source: Li et al. 2006.15704 (PyTorch DistributedDataParallel)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_decentral.shared.plan.forecast import (
    WARM_STEPS,
    Floats,
    Method,
    Setting,
    Synchronous,
    passing_bytes,
    replica_bytes,
)
from lightning_decentral.shared.plan.network import Price
from lightning_decentral.shared.plan.profile import BlockCost, Model
from lightning_decentral.shared.plan.timeline import Task, makespan, run

FIRST_BUCKET_BYTES = 2**20
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class BackwardPiece:
    """Part of a block's backward that yields the gradients of one bucket."""

    block: str
    seconds: float
    bytes: float
    bucket: int


def pieces(blocks: Sequence[BlockCost], bucket_bytes: int = BUCKET_BYTES) -> Iterator[BackwardPiece]:
    """Yield pieces of the backward pass from the last block on, split where a bucket is full, filled evenly."""
    # As in torch the first bucket is small, so that the network has something to do early.
    bucket, room = 0, float(min(FIRST_BUCKET_BYTES, bucket_bytes))
    for block in reversed(blocks):
        left = float(block.parameter_bytes)
        if not left:
            yield BackwardPiece(block.name, block.backward_seconds, 0.0, bucket)
        while left > 0:
            taken = min(left, room)
            yield BackwardPiece(block.name, block.backward_seconds * taken / block.parameter_bytes, taken, bucket)
            left, room = left - taken, room - taken
            if room <= 0:
                bucket, room = bucket + 1, float(bucket_bytes)


Travel = Callable[[int, float, str], list[list[Task[str]]]]
"""Function (bucket number, bytes, name of the task that completes its gradients) -> tasks that send it, in phases."""


def step(
    blocks: Sequence[BlockCost],
    all_reduce: Price,
    factor: float = 1.0,
    bucket_bytes: int = BUCKET_BYTES,
    sent: float = 1.0,
) -> list[Task[str]]:
    """Return the tasks of a step with one all-reduce for each bucket, as `step_by`."""

    def travel(number: int, size: float, last: str) -> list[list[Task[str]]]:
        return [[Task(f"all-reduce {number}", "network", all_reduce.seconds(sent * size), (last,))]]

    return step_by(blocks, travel, factor, bucket_bytes)


def step_by(blocks: Sequence[BlockCost], travel: Travel, factor: float, bucket_bytes: int) -> list[Task[str]]:
    """Return the tasks of the slowest worker, whose computation takes `factor` times as long, and of its network."""
    tasks = [Task(f"forward {b.name}", "compute", factor * b.forward_seconds) for b in blocks]
    filled: dict[int, tuple[str, float]] = {}
    for number, piece in enumerate(pieces(blocks, bucket_bytes)):
        name = f"backward {piece.block} {number}"
        tasks.append(Task(name, "compute", factor * piece.seconds))
        if piece.bytes:
            filled[piece.bucket] = name, filled.get(piece.bucket, ("", 0.0))[1] + piece.bytes
    sent = {last: travel(number, size, last) for number, (last, size) in filled.items()}
    needs = tuple(phases[-1][-1].name for phases in sent.values())
    update = Task("update", "compute", factor * sum(b.update_seconds for b in blocks), needs)
    lags = {0}
    if any(len(phases) > 1 for phases in sent.values()):  # 0, 1, 2, 4, ... up to all buckets
        lags |= {*(2**power for power in range(len(sent).bit_length())), len(sent)}
    orders = [[*behind(tasks, sent, lag), update] for lag in sorted(lags)]
    return min(orders, key=lambda order: makespan(run(order))) if len(orders) > 1 else orders[0]


def behind(tasks: Sequence[Task[str]], sent: dict[str, list[list[Task[str]]]], lag: int) -> list[Task[str]]:
    """Insert a bucket's first phase behind the task that completes the bucket, further phases `lag` buckets later.

    Threads begin a phase when its messages have arrived; a fixed order only approximates that."""
    buckets, most = list(sent.values()), max(map(len, sent.values()), default=0)

    def due(at: int) -> list[Task[str]]:
        places = [(phase, at - phase * lag) for phase in range(most)]
        return [task for phase, number in places if 0 <= number < len(buckets) for task in buckets[number][phase]]

    order, complete = [], 0
    for task in tasks:
        order.append(task)
        if task.name in sent:
            order += due(complete)
            complete += 1
    return [*order, *(task for at in range(complete, complete + most * lag) for task in due(at))]


@dataclass(frozen=True)
class DataParallel(Synchronous):
    """Forecast of ddp: a step of the slowest worker, with the part of the all-reduce after the backward pass.

    Args:
        bucket_bytes: bytes of the gradients in one message.
        sent: bytes of a message for each byte of gradients: 0.5 with a hook that sends half precision.
    """

    bucket_bytes: int = BUCKET_BYTES
    sent: float = 1.0

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        cluster, n = setting.cluster, setting.cluster.workers
        return (setting.network.price("all_reduce", cluster.reach(n), n, 1, cluster.per_node),)

    def card_bytes(self, setting: Setting) -> float:
        """Return 2 (n - 1) / n of the parameters' bytes, as they are sent; 0 on one node."""
        n = setting.cluster.workers
        return 2 * (n - 1) / n * self.sent * setting.model.parameter_bytes if setting.cluster.nodes > 1 else 0.0

    def memory_bytes(self, setting: Setting) -> float:
        return replica_bytes(setting.model) + setting.model.parameter_bytes  # buckets lie next to the gradients

    def at(self, setting: Setting, factor: float) -> list[Task[str]]:
        return step(setting.model.step_blocks, self.prices(setting)[0], factor, self.bucket_bytes, self.sent)


@dataclass(frozen=True)
class Accumulated(Method):
    """Forecast with gradient accumulation: gradients are averaged, and parameters updated, every few batches.

    seconds of a batch = ((batches - 1) (forward + backward) + seconds of a step) / batches"""

    method: Method
    batches: int

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        return self.method.prices(setting)

    def seconds(self, setting: Setting, factors: Floats) -> Floats:
        own = sum(block.pass_seconds for block in setting.model.step_blocks)
        # No worker waits between the batches of a step: slow and fast batches even out.
        passes = own * factors[:, WARM_STEPS:].mean(axis=(1, 2))
        step: Floats = ((self.batches - 1) * passes + self.method.seconds(setting, factors)) / self.batches
        return step

    def tasks(self, setting: Setting) -> list[Task[str]]:
        return self.method.tasks(setting)

    def card_bytes(self, setting: Setting) -> float:
        return self.method.card_bytes(setting) / self.batches

    def memory_bytes(self, setting: Setting) -> float:
        return self.method.memory_bytes(setting)


def sharded_step(
    blocks: Sequence[BlockCost], gather: Price, scatter: Price, shards: int, factor: float = 1.0, whole: float = 0.0
) -> list[Task[str]]:
    """Return the tasks of the slowest worker, whose computation takes `factor` times as long, and of its network, under
    FSDP. It updates 1 / shards of the parameters; whole matrices are shared out evenly. `whole`: seconds to send shards
    to their matrices' owners, and as many to send them back (`whole_matrices`)."""
    tasks: list[Task[str]] = []
    for at, block in enumerate(blocks):
        # One block is gathered ahead, so two blocks are whole at a time.
        free = (f"forward {blocks[at - 2].name}",) if at > 1 else ()
        tasks.append(Task(f"gather {block.name}", "network", gather.seconds(block.parameter_bytes), free))
        needs = (f"gather {block.name}",)
        tasks.append(Task(f"forward {block.name}", "compute", factor * block.forward_seconds, needs))
    back = list(reversed(blocks))

    def scattering(block: BlockCost) -> Task[str]:
        seconds = scatter.seconds(block.parameter_bytes)
        return Task(f"scatter {block.name}", "network", seconds, (f"backward {block.name}",))

    for at, block in enumerate(back):
        before = f"backward {back[at - 2].name}" if at > 1 else f"forward {back[0].name}"
        tasks.append(Task(f"gather {block.name} again", "network", gather.seconds(block.parameter_bytes), (before,)))
        needs = (f"gather {block.name} again",)
        tasks.append(Task(f"backward {block.name}", "compute", factor * block.backward_seconds, needs))
        if at:  # scattered after the next gather, for which the backward pass would wait
            tasks.append(scattering(back[at - 1]))
    tasks.append(scattering(back[-1]))
    scattered = tuple(f"scatter {block.name}" for block in blocks)
    update = factor * sum(b.update_seconds for b in blocks) / shards
    if not whole:
        return [*tasks, Task("update", "compute", update, scattered)]
    return [
        *tasks,
        Task("matrices to owners", "network", whole, scattered),
        Task("update", "compute", update, ("matrices to owners",)),
        Task("matrices back", "network", whole, ("update",)),
    ]


def whole_matrices(setting: Setting, shards: int) -> float:
    """Return the seconds to gather `Model.whole_bytes` at the matrices' owners: a device sends (L - 1) / L of its part
    and receives as much, all devices of a node at once."""
    cluster, part = setting.cluster, setting.model.whole_bytes / shards
    flows = min(shards, cluster.per_node)
    price = setting.network.price("exchange", cluster.reach(shards), shards, flows, flows)
    return price.seconds((shards - 1) / shards * part)


def sharded_bytes(model: Model, shards: int) -> float:
    """Return the bytes on a device: 1 / shards of parameters, gradients, state; two whole blocks; saved activations."""
    sizes = [block.parameter_bytes for block in model.blocks]
    whole = max(a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True))
    passing = passing_bytes(model)
    return (replica_bytes(model) - passing) / shards + whole + passing


@dataclass(frozen=True)
class ShardedForecast(Synchronous):
    """Forecast of FSDP: parameters, gradients and optimizer state are sharded; all workers wait for the slowest."""

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        workers, per_node = setting.cluster.workers, setting.cluster.per_node
        reach = setting.cluster.reach(workers)
        price = setting.network.price
        return tuple(price(name, reach, workers, 1, per_node) for name in ("all_gather", "reduce_scatter"))

    def card_bytes(self, setting: Setting) -> float:
        """Return 3 (n - 1) / n of the parameters' bytes: gathered twice, scattered once. Whole matrices add what a
        node sends to owners on other nodes and gets back; 0 on one node."""
        n, nodes = setting.cluster.workers, setting.cluster.nodes
        there = setting.model.whole_bytes / nodes * (nodes - 1) / nodes
        return 3 * (n - 1) / n * setting.model.parameter_bytes + 2 * there if nodes > 1 else 0.0

    def memory_bytes(self, setting: Setting) -> float:
        return sharded_bytes(setting.model, setting.cluster.workers)

    def at(self, setting: Setting, factor: float) -> list[Task[str]]:
        gather, scatter = self.prices(setting)
        shards = setting.cluster.workers
        whole = whole_matrices(setting, shards)
        return sharded_step(setting.model.step_blocks, gather, scatter, shards, factor, whole)
