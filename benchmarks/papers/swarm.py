"""SWARM's model on preemptible T4: elastic pipelines under a public trace of preemptions, on a virtual clock.

    sent = 2 (width + 4) bytes a token * 0.4 * 65 TFLOPS / (3 * 24 width^2 * layers of a stage)

Lobby and workers run the elastic protocol's own code, in the tests' virtual time and network. A worker is a pipeline of
four T4; nodes that are free form a pipeline as soon as they are four. Source: Ryabinin et al. 2301.11913; the trace of
T4 is AWS's g4dn, `t4_preemptions.json`.
"""

import json
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from lightning_decentral.elastic.plan.view import Bounds
from papers.row import Row, write
from tests.elastic.plan.virtual import World

STAGES, STAGE_LAYERS, WIDTH = 4, 16, 4096
SCRIPTED_LAYERS = 12
"""Of a stage in the authors' scripts, by which their model would have 10 billion parameters before sharing, not 13."""
STAGE_PARAMETERS = 0.25e9
T4_FLOPS, REACHED = 65e12, 0.4
NETWORK = 200e6  # bits a second
DEAD_AFTER = 30.0  # seconds of the trace for a second of the tests' clock, where a silence of 1 is a death
BOOT = 60.0  # until torchrun's processes stand
SAMPLE = 15.0


def sent_megabits(layers: int = STAGE_LAYERS) -> float:
    """Megabits in a second that a stage sends on, forward and backward, with `Int8Activations`."""
    tokens = REACHED * T4_FLOPS / (3 * 24 * WIDTH**2 * layers)
    return 2 * (WIDTH + 4) * 8 * tokens / 1e6


def fetch_seconds() -> float:
    """Seconds until a stage has its parameters and Adam's two moments from another pipeline."""
    return 3 * 4 * STAGE_PARAMETERS * 8 / NETWORK


@cache
def events() -> tuple[tuple[float, str, int], ...]:
    found = json.loads(Path(__file__).with_name("t4_preemptions.json").read_text())
    return tuple((second, sign, node) for second, sign, node in found["events"])


@dataclass
class Pipeline:
    """Four nodes, and the name of their worker once its processes stand and have the model."""

    nodes: list[int]
    name: str = ""


class Fleet(World):
    """Nodes that come and are taken away; four free ones start a pipeline, which trains until it loses one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed, Bounds(1, 8), size=0, strict=False)
        self.free: list[int] = []
        self.pipelines: list[Pipeline] = []
        self.losses = self.restarts = 0

    @property
    def nodes(self) -> int:
        return len(self.free) + STAGES * len(self.pipelines)

    def change(self, sign: str, node: int) -> None:
        if sign == "+":
            self.free.append(node)
        elif node in self.free:
            self.free.remove(node)
        else:
            self._lose(next(pipeline for pipeline in self.pipelines if node in pipeline.nodes), node)
        while len(self.free) >= STAGES:
            formed, self.free = Pipeline(self.free[:STAGES]), self.free[STAGES:]
            self.pipelines.append(formed)
            self.net.at(self._until_ready(), partial(self._begin, formed))

    def _until_ready(self) -> float:
        trains = any(worker.alive for worker in self.workers.values())
        return (BOOT + (fetch_seconds() if trains else 0.0)) / DEAD_AFTER

    def _begin(self, pipeline: Pipeline) -> None:
        if any(pipeline is one for one in self.pipelines):
            self.start()
            pipeline.name = next(reversed(self.workers))
            self.workers[pipeline.name].pace = 0.5

    def _lose(self, pipeline: Pipeline, node: int) -> None:
        self.pipelines = [one for one in self.pipelines if one is not pipeline]
        self.free += [other for other in pipeline.nodes if other != node]
        if pipeline.name:
            self.losses += 1
            self.end(pipeline.name, notice=True)
            if not any(worker.alive for worker in self.workers.values()):
                self.restarts += 1  # nobody has the run any more: a new lobby begins it again, from a checkpoint
                self.kill_lobby()
                self.start_lobby()

    def training(self) -> int:
        """Pipelines that train now: in a view, waiting for nobody, their last round not long ago."""
        now = self.net.now
        return sum(
            w.alive and w.state.mine.view is not None and not w.state.waits(now) and now - w.landed_at < 1.0
            for w in self.workers.values()
        )


@dataclass(frozen=True)
class Course:
    """Sums over the samples of a trace."""

    training: float
    whole: float  # pipelines that so many nodes make
    nodes: float  # over the stages: where every node works
    losses: int
    restarts: int


@cache
def course(until: float = float("inf")) -> Course:
    """The fleet under the trace's events, from its first node on."""
    fleet, rows = Fleet(), []
    steps = [event for event in events() if event[0] <= until]
    begin, end = steps[0][0], steps[-1][0]
    for second, sign, node in steps:
        fleet.net.at((second - begin) / DEAD_AFTER, partial(fleet.change, sign, node))
    for sample in range(int((end - begin) / SAMPLE)):
        fleet.net.run(sample * SAMPLE / DEAD_AFTER)
        rows.append((fleet.training(), fleet.nodes // STAGES, fleet.nodes / STAGES))
    training, whole, nodes = (float(sum(column)) for column in zip(*rows, strict=True))
    return Course(training, whole, nodes, fleet.losses, fleet.restarts)


def by_stages(period: float = 300.0) -> tuple[float, int]:
    """(share of the nodes' throughput, how often a stage lost its last peer) where peers are routed by stage.

    A node joins the stage with the fewest peers, and each `period` peers move from the largest to the smallest one; who
    comes or moves first starts or fetches a stage. The smallest stage bounds the throughput. Source: SWARM's section 3.
    """
    steps = list(events())
    stages: list[dict[int, float]] = [{} for _ in range(STAGES)]  # {node: from when on it works}
    done = possible = 0.0
    emptied = 0
    now, last = steps[0][0], steps[-1][0]
    while now < last:
        while steps and steps[0][0] <= now:
            _, sign, node = steps.pop(0)
            if sign == "+":
                min(stages, key=len)[node] = now + BOOT + fetch_seconds()
            else:
                left = next(stage for stage in stages if node in stage)
                left.pop(node)
                emptied += not left
        few, many = min(stages, key=len), max(stages, key=len)
        while now % period < SAMPLE and len(many) > len(few) + 1:
            few[many.popitem()[0]] = now + fetch_seconds()
            few, many = min(stages, key=len), max(stages, key=len)
        done += min(sum(ready <= now for ready in stage.values()) for stage in stages)
        possible += sum(map(len, stages)) / STAGES
        now += SAMPLE
    return done / possible, emptied


def row() -> Row:
    found = course()
    return Row(
        name="swarm",
        paper="2301.11913",
        title="SWARM",
        headline="1 B shared parameters (13 B before sharing) on preemptible T4 with less than 200 Mb/s (abstract)",
        compared=(
            ("Mb/s that a stage sends at most", NETWORK / 1e6, sent_megabits()),
            ("the same, with the 12 layers of their scripts", NETWORK / 1e6, sent_megabits(SCRIPTED_LAYERS)),
        ),
        kind="virtual clock",
        assumptions=(
            "Four stages, width 4,096 and 8-bit codes are those of the authors' repository. 16 layers a stage make the "
            "13 B of the abstract; its scripts have 12. A T4 reaches 40 % of its 65 TFLOPS; activations and their "
            "gradients travel as `Int8Activations`.",
            "A worker is a pipeline of four nodes; four free nodes form one; it starts in 60 s and fetches parameters "
            "and two moments of each stage at 200 Mb/s in 120 s; a silence of 30 s is a death.",
            "Every pipeline of the trace takes as long for a round; nothing else fails, and the trace is that of 11 "
            "hours of AWS's T4, as theirs isn't in their repository.",
            "Routing by stage is charged for starting and fetching, and not for its messages or its averaging.",
        ),
        cannot_compare="Their throughput under their own trace and their model's loss: the trace isn't in their "
        "repository, and they trained on hundreds of T4.",
        contradicts="A worker here is a whole pipeline: one lost node stops three others. "
        f"{found.restarts} times in 11 hours all pipelines had lost a node, and the run began again "
        "from a checkpoint. Routing by stage, as SWARM does, keeps the run where each stage has one peer left.",
        further=(
            ("share of the nodes' throughput under the trace, elastic pipelines", found.training / found.nodes),
            ("share of that of whole pipelines, elastic pipelines", found.training / found.whole),
            ("share of the nodes' throughput, routed by stage, rebalanced every 300 s", by_stages()[0]),
            ("the same, rebalanced every 60 s", by_stages(60.0)[0]),
            ("the same, never rebalanced", by_stages(1e9)[0]),
            ("pipelines that lost a node", float(found.losses)),
            ("times that the run began again from a checkpoint, elastic pipelines", float(found.restarts)),
            ("times that a stage lost its last peer, rebalanced every 300 s", float(by_stages()[1])),
        ),
    )


def main() -> None:
    write(row())
