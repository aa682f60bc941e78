"""Step time forecast of a token pipeline from a measured profile: its schedule, then the mean over equal stages.

Every pipeline of P stages takes the batches of its P devices, so a step uses as many samples as under data
parallelism."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import lcm

from lightning_decentral.pipeline.plan.partition import Even, Partition
from lightning_decentral.pipeline.plan.schedule import (
    Costs,
    Kind,
    OneForwardOneBackward,
    Schedule,
    ScheduleForecast,
    always,
    forecast,
    halved,
    tasks,
)
from lightning_decentral.shared.plan.arguments import at_least, checked
from lightning_decentral.shared.plan.forecast import Floats, Method, Setting, synchronous
from lightning_decentral.shared.plan.network import Price
from lightning_decentral.shared.plan.profile import BlockCost
from lightning_decentral.shared.plan.timeline import Task


@checked
@dataclass(frozen=True)
class Pipelining(Method):
    """Forecast of a pipeline's step: makespan of M micro-batches in S slices + largest stage's all-reduce + its update.

    Every stage is assumed to have the slowest of all devices: an upper bound if stragglers are few.

    Args:
        stages: P; None: all devices are one pipeline.
        microbatches: M, equal parts of the P devices' batches; None: P.
        slices: S of each micro-batch; 1 for a model without a token axis.

    Raises:
        ValueError: in a setting whose number of devices P doesn't divide, or whose model has fewer than P blocks.
    """

    stages: int | None = None
    microbatches: int | None = None
    slices: int = 1
    schedule: Schedule = field(default_factory=OneForwardOneBackward)
    partition: Partition = field(default_factory=Even)

    def __post_init__(self) -> None:
        numbers = {"microbatches": self.microbatches, "slices": self.slices}
        at_least(1, "leave it out for the default", stages=self.stages, **numbers)

    def prices(self, setting: Setting) -> tuple[Price, ...]:
        """Return the prices of (hidden states to the next stage, gradients between equal stages)."""
        stages, cluster = self._stages(setting), setting.cluster
        flows = min(stages, cluster.per_node) if cluster.nodes > 1 else 1  # the stages on a node share its network card
        equal, per_node = cluster.workers // stages, max(1, cluster.per_node // stages)
        price, everywhere = setting.network.price, cluster.reach(cluster.workers)
        sent = price("exchange", cluster.reach(stages), 2 if stages > 1 else 1)
        return sent, price("all_reduce", everywhere, equal, flows, per_node)

    def seconds(self, setting: Setting, factors: Floats) -> Floats:
        parts = self._parts(setting)
        reduced = self.prices(setting)[1].seconds(max(map(_bytes, parts)))
        update = max(sum(block.update_seconds for block in part) for part in parts)
        fixed = update + setting.model.loop_seconds
        return synchronous(lambda f: self._run(setting, f).seconds + f * fixed, factors) + reduced

    def tasks(self, setting: Setting) -> list[Task[str]]:
        """Tasks of one step of one pipeline, without the update."""
        stages = self._stages(setting)
        actions = self.schedule.actions(stages, self.microbatches or stages, self.slices)
        seconds, link = self._costs(setting, 1.0)
        return tasks(actions, self.slices, halved(seconds) if self.schedule.splits else seconds, link)

    def card_bytes(self, setting: Setting) -> float:
        """Bytes through a node's network card: 2 (r - 1) / r of the node's parameters, in r pipelines. Hidden states go
        to the next node and equally large gradients come back."""
        stages, cluster = self._stages(setting), setting.cluster
        replicas, held = cluster.workers // stages, min(1.0, cluster.per_node / stages)
        gradients = 2 * (replicas - 1) / replicas * held * setting.model.parameter_bytes if cluster.nodes > 1 else 0.0
        hidden = stages * max(part[-1].output_bytes for part in self._parts(setting))
        shown = min(cluster.workers, 2 * lcm(stages, cluster.per_node))  # beyond which places repeat
        pairs = [(w, w + 1) for w in range(shown - 1) if w // stages == (w + 1) // stages]
        cut = [{w // cluster.per_node for w in pair} for pair in pairs]
        # The maximum number of a node's stages whose neighbours are on other nodes.
        crossings = max(Counter(node for nodes in cut if len(nodes) > 1 for node in nodes).values(), default=0)
        return gradients + crossings * hidden

    def memory_bytes(self, setting: Setting) -> float:
        """Bytes on the fullest stage, including its chunks in flight."""
        model, parts = setting.model, self._parts(setting)
        state = model.state_bytes / max(1, model.parameter_bytes)
        held = self._run(setting, 1.0).chunks_in_flight
        saved = [sum(block.saved_bytes for block in part) * self._chunk(setting) for part in parts]
        # Factor 2: parameters and equally large gradients.
        return max((2 + state) * _bytes(p) + chunks * s for p, chunks, s in zip(parts, held, saved, strict=True))

    def _run(self, setting: Setting, factor: float) -> ScheduleForecast:
        stages = self._stages(setting)
        counts = stages, self.microbatches or stages, self.slices
        return forecast(self.schedule, *counts, *self._costs(setting, factor))

    def _costs(self, setting: Setting, factor: float) -> tuple[Costs, Costs]:
        """Return (seconds of an action: its stage's blocks, in its direction; seconds of a message)."""
        parts, chunk = self._parts(setting), self._chunk(setting)
        hidden = max(part[-1].output_bytes for part in parts) * chunk
        forward = [factor * chunk * sum(block.forward_seconds for block in part) for part in parts]
        backward = [factor * chunk * sum(block.backward_seconds for block in part) for part in parts]
        seconds = lambda action: {Kind.FORWARD: forward, Kind.BACKWARD: backward}[action.kind][action.stage]  # noqa: E731
        return seconds, always(self.prices(setting)[0].seconds(hidden))

    def _chunk(self, setting: Setting) -> float:
        """A micro-batch's slice as a fraction of a profiled batch."""
        stages = self._stages(setting)
        # All slices cost the same here; `Balanced` and `Planned` come close to that.
        return stages / (self.microbatches or stages) / self.slices

    def _stages(self, setting: Setting) -> int:
        workers = setting.cluster.workers
        stages = self.stages or workers
        if workers % stages:
            raise ValueError(f"{stages} stages don't divide {workers} workers: make --workers a multiple")
        return stages

    def _parts(self, setting: Setting) -> list[tuple[BlockCost, ...]]:
        """List the blocks of each stage. What is before and after the numbered ones of a profile, such as `h.0`, is
        embedding and head, which no stage has for itself."""
        blocks = setting.model.blocks
        numbered = [at for at, block in enumerate(blocks) if block.name.rpartition(".")[2].isdigit()]
        first, end = (numbered[0], numbered[-1] + 1) if numbered else (0, len(blocks))
        embedding, head = _joined(blocks[:first]), _joined(blocks[end:])
        counts = self.partition.counts(blocks[first:end], embedding, head, self._stages(setting))
        at = [0, *(first + done for done in accumulate(counts[:-1])), len(blocks)]
        return [blocks[a:b] for a, b in pairwise(at)]


def _joined(part: Sequence[BlockCost]) -> BlockCost:
    return BlockCost(forward_seconds=sum(block.pass_seconds for block in part), parameter_bytes=_bytes(part))


def _bytes(part: Sequence[BlockCost]) -> int:
    return sum(block.parameter_bytes for block in part)
