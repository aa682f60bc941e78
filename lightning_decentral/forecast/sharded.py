"""Sharded data parallelism: parameters are gathered before they are used and gradients scattered after, block by block.

    gather 0  gather 1  gather 2 ... | gather n-1  gather n-2  scatter n-1  gather n-3 ...
              forward 0 forward 1 ...|             backward n-1             backward n-2 ...

One block is gathered ahead of the one in use, so two are whole at a time.

Source: Zhao et al. 2304.11277 (FSDP).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_decentral.forecast.method import Setting, Synchronous, replica_bytes
from lightning_decentral.forecast.network import Price
from lightning_decentral.hardware import Block, Model
from lightning_decentral.timeline import Task


def step(blocks: Sequence[Block], gather: Price, scatter: Price, shards: int, factor: float = 1.0) -> list[Task[str]]:
    """The tasks of the slowest worker, whose computation takes `factor` times as long, and of its network; it updates
    1 / shards of the parameters."""
    tasks: list[Task[str]] = []
    for at, block in enumerate(blocks):
        free = (f"forward {blocks[at - 2].name}",) if at > 1 else ()
        tasks.append(Task(f"gather {block.name}", "network", gather.seconds(block.parameter_bytes), free))
        needs = (f"gather {block.name}",)
        tasks.append(Task(f"forward {block.name}", "compute", factor * block.forward_seconds, needs))
    tasks += _backward(list(reversed(blocks)), gather, scatter, factor)
    scattered = tuple(f"scatter {block.name}" for block in blocks)
    update = factor * sum(b.update_seconds for b in blocks) / shards
    return [*tasks, Task("update", "compute", update, scattered)]


def _backward(blocks: Sequence[Block], gather: Price, scatter: Price, factor: float) -> list[Task[str]]:
    tasks: list[Task[str]] = []
    for at, block in enumerate(blocks):
        free = f"backward {blocks[at - 2].name}" if at > 1 else f"forward {blocks[0].name}"
        tasks.append(Task(f"gather {block.name} again", "network", gather.seconds(block.parameter_bytes), (free,)))
        needs = (f"gather {block.name} again",)
        tasks.append(Task(f"backward {block.name}", "compute", factor * block.backward_seconds, needs))
        if at:
            tasks.append(_scatter(blocks[at - 1], scatter))
    return [*tasks, _scatter(blocks[-1], scatter)]


def _scatter(block: Block, scatter: Price) -> Task[str]:
    return Task(f"scatter {block.name}", "network", scatter.seconds(block.parameter_bytes), (f"backward {block.name}",))


def sharded_bytes(model: Model, shards: int) -> float:
    """1 / shards of parameters, gradients and state; the two largest neighbours whole; saved activations."""
    sizes = [block.parameter_bytes for block in model.blocks]
    whole = max(a + b for a, b in zip(sizes, [*sizes[1:], 0], strict=True))
    saved = sum(block.saved_bytes for block in model.blocks)
    return (replica_bytes(model) - saved) / shards + whole + saved


@dataclass(frozen=True)
class Sharded(Synchronous):
    """Parameters, gradients and optimizer state are spread over all workers; all wait for the slowest."""

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        """Gathering and scattering over all workers."""
        workers, per_node = setting.cluster.workers, setting.cluster.per_node
        reach = setting.cluster.reach(workers)
        price = setting.network.price
        return tuple(price(name, reach, workers, 1, per_node) for name in ("all_gather", "reduce_scatter"))

    def card_bytes(self, setting: Setting) -> float:
        """3 (n - 1) / n of the parameters' bytes: gathered twice, scattered once; nothing on one node."""
        n = setting.cluster.workers
        return 3 * (n - 1) / n * setting.model.parameter_bytes if setting.cluster.nodes > 1 else 0.0

    def memory_bytes(self, setting: Setting) -> float:
        """A shard, and two blocks whole."""
        return sharded_bytes(setting.model, setting.cluster.workers)

    def at(self, setting: Setting, factor: float) -> list[Task[str]]:
        """Of a worker whose computation takes `factor` times as long."""
        gather, scatter = self.prices(setting)
        return step(setting.model.blocks, gather, scatter, setting.cluster.workers, factor)
