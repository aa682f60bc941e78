"""The pictures of docs/images, drawn from the plans that run and from committed results.

    python docs/scripts/pictures.py

Needs matplotlib; neither torch nor Lightning is imported.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from lightning_decentral import gossip
from lightning_decentral.compressed.plan.forecast import CompressedForecast
from lightning_decentral.gossip.plan.forecast import step_tasks
from lightning_decentral.gossip.plan.planned_traffic import Round, all_reduce_copies, mean_copies
from lightning_decentral.gossip.plan.topology.combined import AlternatingExponentialRing, Auto
from lightning_decentral.gossip.plan.topology.one_peer import Hypercube, OnePeerExponential
from lightning_decentral.gossip.plan.topology.static import Ring
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Own
from lightning_decentral.partial.plan.depth import DepthAssignment, Staircase, Temporal
from lightning_decentral.pipeline.plan.schedule import Action, Kind, OneForwardOneBackward, TeraPipe, forecast
from lightning_decentral.shared.plan.data_parallel import DataParallel
from lightning_decentral.shared.plan.figure import ACCENT, INK, WORKER, new_figure
from lightning_decentral.shared.plan.forecast import Cluster, Setting
from lightning_decentral.shared.plan.network import LinkCost, Network
from lightning_decentral.shared.plan.profile import BlockCost, Model
from lightning_decentral.shared.plan.timeline import Task, makespan, run
from lightning_decentral.spilled.plan.shards import double_buffered
from lightning_decentral.sweep.plan.dispatch import Queue, WorkPiece, devices
from lightning_decentral.sweep.plan.policy import FIFO, LRTF
from lightning_decentral.sweep.plan.simulation import simulate

ROOT = Path(__file__).parents[2]
IMAGES, RESULTS = ROOT / "docs" / "images", ROOT / "benchmarks" / "results"
PALE = "#d8e2ec"
SAME = {"svg.hashsalt": "lightning-decentral", "svg.fonttype": "none"}
"""The same bytes in every run."""


def neighbours() -> Any:
    """Which worker receives from which: eight workers, a column for each step; lines lead to receivers."""
    graphs: Sequence[Topology] = (Ring(), OnePeerExponential(), Auto())
    figure = new_figure(9, 3)
    for axes, topology in zip(figure.subplots(1, 3, sharey=True), graphs, strict=True):
        for step in range(4):
            for rank in range(8):
                for source in topology.sources(rank, 8, step):
                    axes.plot((step, step + 1), (source, rank), color=WORKER, linewidth=1.2, zorder=1)
        for step in range(5):
            axes.scatter([step] * 8, range(8), s=22, color=INK, zorder=2)
        named(axes, topology.label(8), "step", "worker" if topology is graphs[0] else "")
        axes.set_xticks(range(5))
    return figure


def overlap() -> Any:
    """Two workers and their links, by the tasks that the forecast runs: delay 0 and delay 1."""
    compute, rounds = np.ones((4, 2)), [Round(np.array([[0, 1], [1, 0]]), ())]
    figure = new_figure(9, 3)
    for axes, delay in zip(figure.subplots(2, 1, sharex=True), (0, 1), strict=True):
        spans = run(step_tasks(compute, [np.full(2, 0.8)], rounds, delay, [np.full(2, 0.1)]))
        for name, span in spans.items():
            kind, step = name.split()[:2]
            row = ROWS.index(span.worker)
            look = {"compute": (WORKER, f"forward, backward {step}"), "mix": (ACCENT, ""), "exchange": (PALE, step)}
            bar(axes, row, span.start, span.finish, *look[kind])
        named(axes, f"delay={delay}: a round {'is waited for' if delay == 0 else 'hides behind the next step'}", "", "")
        axes.set_yticks(range(4), ROWS)
        axes.set_ylim(3.5, -0.5)
    axes.set_xlabel("time; red: land the round before, update, launch the next")
    return figure


ROWS = ("worker 0", "link 0", "worker 1", "link 1")


def pipeline() -> Any:
    """One sequence over four stages, whole and in slices, then four micro-batches; backward twice the forward."""
    cases = (
        ("1 sequence, whole", TeraPipe(), 1, 1),
        ("1 sequence, 4 slices", TeraPipe(), 1, 4),
        ("2 sequences, 4 slices, one forward one backward", OneForwardOneBackward(), 2, 4),
    )
    figure = new_figure(9, 5.5)
    for axes, (title, schedule, microbatches, slices) in zip(figure.subplots(3, 1, sharex=True), cases, strict=True):
        found = forecast(schedule, 4, microbatches, slices, _seconds(4 / slices))
        for stage in schedule.actions(4, microbatches, slices):
            for action in stage:
                span = found.spans[str(action)]
                colour = WORKER if action.kind is Kind.FORWARD else ACCENT
                bar(axes, action.stage, span.start, span.finish, colour, str(action.slice))
        named(axes, f"{title}: {found.bubble:.0%} idle", "", "")
        axes.set_yticks(range(4), [f"stage {stage}" for stage in range(4)])
        axes.set_ylim(3.5, -0.5)
    axes.set_xlabel("time; blue: forward, red: backward; the number is the slice's")
    return figure


def _seconds(forward: float) -> Callable[[Action], float]:
    return lambda action: forward if action.kind is Kind.FORWARD else 2 * forward


def depths() -> Any:
    """How many of four segments, from the top, each of four workers trains in each step."""
    plans: Sequence[tuple[str, DepthAssignment]] = (
        ("Temporal(): the same on all workers", Temporal(warm_up=0)),
        ("Staircase(): by worker", Staircase()),
    )
    figure = new_figure(9, 2.6)
    for axes, (title, plan) in zip(figure.subplots(1, 2, sharey=True), plans, strict=True):
        for step in range(6):
            for rank in range(4):
                depth = plan.depth(rank, 4, step, 4)
                for segment in range(4):
                    colour = ACCENT if segment >= 4 - depth else PALE
                    axes.bar(5 * step + rank, 0.9, width=0.9, bottom=segment, color=colour)
        named(axes, title, "step, in it workers 0 to 3", "segment" if axes.get_subplotspec().is_first_col() else "")
        axes.set_xticks([5 * step + 1.5 for step in range(6)], range(6))
    return figure


def sweep() -> Any:
    """Four members on two devices, the last one three times as long: two policies."""
    queues = [Queue(name, pieces=(WorkPiece(1.0),) * count) for name, count in zip("ABCD", (4, 4, 4, 12), strict=True)]
    figure = new_figure(9, 2.8)
    for axes, policy in zip(figure.subplots(2, 1, sharex=True), (FIFO(), LRTF()), strict=True):
        spans = simulate(queues, devices(2), policy)
        for ran, span in spans.items():
            colour = {"D": ACCENT}.get(ran.job, WORKER)
            bar(axes, int(span.worker.split()[1]), span.start, span.finish, colour, ran.job)
        named(axes, f"{type(policy).__name__}: {makespan(spans):g} seconds", "", "")
        axes.set_yticks(range(2), ["device 0", "device 1"])
        axes.set_ylim(1.5, -0.5)
    axes.set_xlabel("seconds")
    return figure


def compressed() -> Any:
    """A step of eight workers at 200 Mb/s, 16.8 MB of gradients: `ddp`, and codes of a quarter of the bytes."""
    layers = tuple(BlockCost(f"layer {i}", 0.03, 0.06, 0.0, parameter_bytes=2_100_000) for i in range(8))
    links = tuple(
        LinkCost(name, "between", 2, 1, 1e-4, 25e6) for name in ("all_reduce", "reduce_scatter", "all_gather")
    )
    setting = Setting(Model("eight layers", "cpu", layers), Network(links), Cluster(workers=8))
    methods = {
        "ddp, 4 MB buckets": DataParallel(4_000_000),
        "a quarter of the bytes, coding left out": CompressedForecast(wire_bytes=_quarter),
    }
    figure = new_figure(9, 2.8)
    for axes, (title, method) in zip(figure.subplots(2, 1, sharex=True), methods.items(), strict=True):
        spans = run(method.tasks(setting))
        rows = list(dict.fromkeys(span.worker for span in spans.values()))
        for span in spans.values():
            bar(
                axes, rows.index(span.worker), span.start, span.finish, WORKER if "compute" in span.worker else PALE, ""
            )
        named(axes, f"{title}: {makespan(spans):.2f} seconds", "", "")
        axes.set_yticks(range(2), ["compute", "network"])
        axes.set_ylim(1.5, -0.5)
    axes.set_xlabel("seconds")
    return figure


def _quarter(size: float) -> float:
    return size / 4


def island_bytes() -> Any:
    """What the busiest node of eight devices sends through its card in a step, as a mean over a period."""
    nodes = (2, 4, 8, 16)
    flat: dict[str, Topology] = {
        "Hypercube, each device for itself": Hypercube(),
        "AlternatingExponentialRing(8)": AlternatingExponentialRing(8),
    }
    lines = {name: [mean_copies(graph, Own(), 8 * n, 8) for n in nodes] for name, graph in flat.items()}
    lines["ring all-reduce"] = [all_reduce_copies(8 * n, 8) for n in nodes]
    lines["islands of 8, one peer a step"] = [mean_copies(Hypercube(), Own(), n, 1) for n in nodes]
    figure = new_figure(7, 3)
    axes = figure.subplots()
    for name, copies in lines.items():
        axes.plot(nodes, copies, marker="o", markersize=4, linewidth=1.4, label=name)
    named(axes, "Bytes through a node's network card", "nodes of 8 devices", "copies of the parameters")
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, nodes)
    axes.legend(frameon=False, fontsize=7)
    return figure


def codec_seconds() -> Any:
    """What one round with one neighbour takes where nothing overlaps: travelling, encoding, decoding."""
    rates = np.geomspace(0.05, 20, 60)
    figure = new_figure(8, 3)
    axes = figure.subplots()
    axes.plot(rates, 8 / rates, color=INK, linewidth=1.4, label="Plain()")
    found = json.loads((RESULTS / "codec-2-cores.json").read_text())["summary"]
    for row in (row for row in found if set(re.findall(r"(\w+)\(", row["codec"])) <= set(gossip.__all__)):
        work = row["send ms per MB"] + row["hear ms per MB"]
        label = row["codec"].replace("inner=", "")
        axes.plot(rates, 8 / rates / row["times smaller"] + work, linewidth=1.2, label=label)
    named(axes, "A round of 1 MB, one thread", "Gb/s of the link", "milliseconds")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))  # lines cross the whole picture
    return figure


def spilled() -> Any:
    """Four shards, loaded while the one before computes: `double_buffered` is where the last one ends."""
    loads, computes = (2.0, 1.0, 2.0, 1.0), (1.5, 2.0, 1.5, 2.0)
    found: list[Task[str]] = []
    for shard, (load, compute) in enumerate(zip(loads, computes, strict=True)):
        found.append(Task(f"load {shard}", "link", load, (f"compute {shard - 2}",) if shard > 1 else ()))
        found.append(Task(f"compute {shard}", "device", compute, (f"load {shard}",)))
    spans = run(found)
    assert makespan(spans) == double_buffered(loads, computes)
    figure = new_figure(7, 1.8)
    axes = figure.subplots()
    for name, span in spans.items():
        row = ("link", "device").index(span.worker)
        bar(axes, row, span.start, span.finish, (PALE, WORKER)[row], name)
    named(axes, "A forward of four shards", "time", "")
    axes.set_yticks(range(2), ["link", "device"])
    axes.set_ylim(1.5, -0.5)
    return figure


def seconds_to_a_score() -> Any:
    """Scores over seconds on four hosts at 200 Mb/s, of the first seed."""
    runs = json.loads((RESULTS / "cluster-accuracy-2-cores.json").read_text())["runs"]
    figure = new_figure(9, 3)
    for axes, (recipe, says) in zip(figure.subplots(1, 3), SCORES.items(), strict=True):
        for name, one in runs[f"{recipe} 0"]["methods"].items():
            axes.plot(one["seconds"], one["scores"], label=name, linewidth=1.4)
        named(axes, recipe, "seconds", says)
        axes.legend(frameon=False, fontsize=7)
    return figure


SCORES = {"resnet": "test accuracy", "gpt": "nats per byte", "larger-gpt": "nats per byte"}


def bar(axes: Any, row: int, start: float, finish: float, colour: str, text: str) -> None:
    axes.barh(row, finish - start, left=start, height=0.8, color=colour, edgecolor="white", linewidth=0.6)
    axes.text((start + finish) / 2, row, text, ha="center", va="center", fontsize=7, color=INK)


def named(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=8, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)


PICTURES = (
    neighbours,
    overlap,
    pipeline,
    depths,
    sweep,
    compressed,
    island_bytes,
    codec_seconds,
    spilled,
    seconds_to_a_score,
)


def draw(folder: Path) -> None:
    """One SVG for each picture."""
    with matplotlib.rc_context(SAME):
        for picture in PICTURES:
            picture().savefig(folder / f"{picture.__name__.replace('_', '-')}.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(IMAGES)
