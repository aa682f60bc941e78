"""Pictures of the other guides: optimizers, clusters, trust, waiting, faults, causal models, other loops, plans.

From plans and committed results.

    python docs/scripts/guides.py

Needs matplotlib; neither torch nor Lightning is imported.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap
from pictures import ACCENT, IMAGES, INK, PALE, RESULTS, ROWS, SAME, WORKER, bar, named, new_figure

from lightning_decentral.compressed.plan.forecast import CompressedForecast
from lightning_decentral.gossip.plan.forecast import GossipForecast, step_tasks
from lightning_decentral.gossip.plan.planned_traffic import Round
from lightning_decentral.gossip.plan.topology.combined import Auto
from lightning_decentral.gossip.plan.topology.one_peer import Hypercube
from lightning_decentral.gossip.plan.topology.static import Ring
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import mixing_matrix
from lightning_decentral.pipeline.plan.slicing import equal
from lightning_decentral.planner.plan.placement import RingPlacement, place
from lightning_decentral.pytorch_lightning import mirror
from lightning_decentral.shared.plan.data_parallel import DataParallel
from lightning_decentral.shared.plan.forecast import Cluster, Setting, even
from lightning_decentral.shared.plan.network import LinkCost, Network
from lightning_decentral.shared.plan.profile import BlockCost, Model
from lightning_decentral.shared.plan.timeline import run

OPTIMIZERS = ("ddp", "ddp, Muon", "gossip, int8, AccumAdamW", "gossip, int8, Muon", "compressed, int8, Muon")
TICKS = (20, 50, 100, 200, 500, 1000, 2000)
RACKS = (0, 1, 0, 1, 1, 0, 1, 0)


def optimizers() -> Any:
    """Losses over steps, and over seconds at 50 Mb/s: of the first seed, four hosts."""
    found = json.loads((RESULTS / "loss-per-second-2-cores.json").read_text())
    curves, seconds = found["curves"]["gpt 4 0"], found["seconds"]["gpt 4 50mbit"]
    figure = new_figure(9, 3)
    by_step, by_second = figure.subplots(1, 2, sharey=True)
    for name in OPTIMIZERS:
        steps = np.array(curves[name]["steps"])
        by_step.plot(steps, curves[name]["scores"], label=name, linewidth=1.4)
        by_second.plot(steps * seconds[name], curves[name]["scores"], label=name, linewidth=1.4)
    named(by_step, "A loss by steps", "steps", "nats per byte")
    named(by_second, "The same by seconds at 50 Mb/s", "seconds", "")
    by_second.legend(frameon=False, fontsize=7)
    return figure


def placement() -> Any:
    """Eight hosts in two racks as a ring: in the order of their names, and as `placement` orders them."""
    racks = np.array(RACKS)
    found = place(RingPlacement(), np.where(racks[:, None] == racks, 0.1, 1.0))
    figure = new_figure(7, 3.4)
    titles = ("by name", "by placement")
    for axes, title, order in zip(figure.subplots(1, 2), titles, (tuple(range(8)), found.order), strict=True):
        angles = np.pi / 2 - 2 * np.pi * np.arange(8) / 8
        places = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        slow = [racks[order[rank]] != racks[order[rank - 1]] for rank in range(8)]
        for rank, between in enumerate(slow):
            ends = places[[rank - 1, rank]].T
            axes.plot(*ends, color=ACCENT if between else WORKER, linewidth=2, zorder=1)
        axes.scatter(*places.T, s=420, color=[(WORKER, PALE)[racks[host]] for host in order], zorder=2)
        for rank, (x, y) in enumerate(places):
            axes.text(x, y, f"host{order[rank]}", ha="center", va="center", fontsize=7, color=INK)
        named(axes, f"{title}: {sum(slow)} links between the racks", "", "")
        axes.set_axis_off()
        axes.set_aspect("equal")
        axes.margins(0.15)
    return figure


def spread() -> Any:
    """How much of what one worker sent once is in each worker's parameters, round by round: columns of matrices."""
    graphs: Sequence[Topology] = (Ring(), Auto())
    figure = new_figure(9, 2.8)
    for axes, topology in zip(figure.subplots(1, 2, sharey=True), graphs, strict=True):
        shares = [np.eye(8)[:, 3]]
        for step in range(6):
            shares.append(mixing_matrix(topology, 8, step) @ shares[-1])
        axes.pcolormesh(np.stack(shares, axis=1), cmap="Blues", vmin=0, vmax=1)
        for step, column in enumerate(shares):
            for rank, share in enumerate(column):
                colour = "white" if share > 0.5 else INK
                text = f"{share:.0%}" if share else ""
                axes.text(step + 0.5, rank + 0.5, text, ha="center", va="center", fontsize=6, color=colour)
        named(axes, f"{topology.label(8)}: the share of what worker 3 has at round 0", "round", "")
        axes.set_xticks(np.arange(7) + 0.5, range(7))
        axes.set_yticks(np.arange(8) + 0.5, range(8))
        axes.set_ylim(8, 0)
    figure.axes[0].set_ylabel("worker", fontsize=8)
    return figure


def waiting() -> Any:
    """Seconds of whole runs in which worker 1 raises, is killed or stops; timeout 10 s, the fault tables' rows."""
    rows = json.loads((RESULTS / "faults-2-cores.json").read_text())["rows"]
    kinds = {"raises": WORKER, "killed": INK, "stopped": ACCENT}
    found = [row for row in rows if row["group"] == "a worker ends" and row["fault"].startswith("worker 1")]
    whens = list(dict.fromkeys(when(row["fault"]) for row in found))
    figure = new_figure(9, 3)
    axes = figure.subplots()
    for offset, (kind, colour) in zip((-0.2, 0.0, 0.2), kinds.items(), strict=True):
        of_kind = [row for row in found if f" {kind}" in row["fault"]]
        places = [whens.index(when(row["fault"])) + offset for row in of_kind]
        axes.scatter([row["seconds"] for row in of_kind], places, s=18, color=colour, label=kind)
    axes.axvline(10, color=PALE, linewidth=4, zorder=0)
    named(axes, "Until all had ended, the start included; the others wait 10 s", "seconds of the whole run", "")
    axes.set_yticks(range(len(whens)), whens, fontsize=7)
    axes.set_xlim(0, None)
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=7)
    return figure


def when(fault: str) -> str:
    return fault.removeprefix("worker 1 ").replace(" (SIGSTOP)", "").partition(" ")[2]


def fabric() -> Any:
    """Two workers that accumulate two batches: a round begins at `optimizer.step()` and hides behind both."""
    compute, rounds = np.full((3, 2), 2.0), [Round(np.array([[0, 1], [1, 0]]), ())]
    spans = run(step_tasks(compute, [np.full(2, 1.4)], rounds, 1, [np.full(2, 0.2)]))
    figure = new_figure(9, 2.2)
    axes = figure.subplots()
    for name, span in spans.items():
        kind, step = name.split()[:2]
        row, half = ROWS.index(span.worker), (span.start + span.finish) / 2
        if kind == "compute":
            bar(axes, row, span.start, half, PALE, "no sync")
            bar(axes, row, half, span.finish, WORKER, "backward")
        else:
            bar(axes, row, span.start, span.finish, ACCENT if kind == "mix" else PALE, "" if kind == "mix" else step)
    named(axes, "Every second batch ends with optimizer.step(): land, update, launch (red)", "time", "")
    axes.set_yticks(range(4), ROWS)
    axes.set_ylim(3.5, -0.5)
    return figure


def plan() -> Any:
    """What the forecast says of eight workers over the rate of the links: 16.8 MB, 0.6 s of computation."""
    layers = tuple(BlockCost(f"layer {i}", 0.05, 0.1, 0.0, parameter_bytes=4_200_000) for i in range(4))
    methods = {
        "ddp": DataParallel(),
        "compressed, a quarter of the bytes": CompressedForecast(wire_bytes=lambda size: size / 4),
        "gossip, delay 0": GossipForecast(Hypercube(), delay=0),
        "gossip, delay 1": GossipForecast(Hypercube()),
    }
    megabits = np.geomspace(20, 2000, 30)
    figure = new_figure(7, 3)
    axes = figure.subplots()
    for name, method in methods.items():
        settings = [setting(Model("four layers", "cpu", layers), rate) for rate in megabits]
        axes.plot(megabits, [method.seconds(one, even(8))[0] for one in settings], label=name, linewidth=1.4)
    named(axes, "Forecast: 8 workers, 16.8 MB, 0.6 s of computation", "Mb/s of the links", "seconds per step")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(TICKS, TICKS)
    axes.set_yticks((0.6, 1, 2, 5, 10), ("0.6", "1", "2", "5", "10"))
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=7)
    return figure


def setting(model: Model, megabits: float) -> Setting:
    names = ("all_reduce", "reduce_scatter", "all_gather", "exchange")
    links = tuple(LinkCost(name, "between", 2, 1, 1e-4, megabits * 1e6 / 8) for name in names)
    return Setting(model, Network(links), Cluster(workers=8))


def injected() -> Any:
    """How many of the faults of each kind the others survive, and how many end them with one line."""
    rows = json.loads((RESULTS / "faults-2-cores.json").read_text())["rows"]
    groups = [group for group, _ in Counter(row["group"] for row in rows).most_common()]
    figure = new_figure(7, 2.8)
    axes = figure.subplots()
    left = np.zeros(len(groups))
    for outcome, colour in (("goes on", WORKER), ("one line", INK)):
        counts = [sum(row["group"] == group and row["outcome"] == outcome for row in rows) for group in groups]
        axes.barh(groups, counts, left=left, color=colour, label=outcome)
        left += np.array(counts)
    for row, count in enumerate(left):
        axes.text(count + 0.5, row, f"{count:.0f}", va="center", fontsize=7, color=INK)
    named(axes, "Faults, by kind: the others go on, or end with one line", "faults", "")
    axes.tick_params(labelsize=7)
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=7, loc="lower right")
    return figure


def cache(tokens: int = 12, number: int = 4) -> Any:
    """What each slice of a sequence attends to: its own tokens up to each, and all before them, from the KV cache."""
    figure = new_figure(9, 2)
    begin = 0
    for index, (axes, length) in enumerate(zip(figure.subplots(1, number), equal(tokens, number), strict=True)):
        keys, queries = np.arange(tokens), np.arange(begin, begin + length)[:, None]
        seen = np.where(keys < begin, 1, 2) * (keys <= queries)
        axes.imshow(seen, cmap=ListedColormap(["white", PALE, WORKER]), vmin=0, vmax=2, aspect="auto")
        axes.set_xticks(range(0, tokens, 3))
        axes.set_yticks(range(length), range(begin, begin + length))
        axes.set_xticks(np.arange(tokens + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(length + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="#c8ccd4", linewidth=0.5)
        axes.tick_params(which="minor", length=0)
        named(axes, f"slice {index}: {begin} tokens cached", "key", "" if index else "query")
        begin += length
    return figure


def mirrored() -> Any:
    """Modules of each method that are read once for each Lightning, and those that serve both as they are."""
    figure = new_figure(7, 2.4)
    axes = figure.subplots()
    package = Path(mirror.__file__).parents[1]
    for row, method in enumerate(mirror.METHODS):
        names = [
            ".".join(path.relative_to(package.parent).with_suffix("").parts)
            for path in package.glob(f"{method}/**/*.py")
        ]
        twice = sum(mirror.renamed(name) != name for name in names)
        for label, count, left, colour in (
            ("once for each", twice, 0, ACCENT),
            ("serve both", len(names) - twice, twice, WORKER),
        ):
            axes.barh(row, count, left=left, color=colour, label="" if row else label)
    named(axes, "Modules: which know a Lightning, and are read once for each", "modules", "")
    axes.set_yticks(range(len(mirror.METHODS)), mirror.METHODS, fontsize=7)
    axes.invert_yaxis()
    axes.legend(frameon=False, fontsize=7, loc="upper right")
    return figure


def floors() -> Any:
    """Methods and floors: how many modules stand where."""
    package = Path(mirror.__file__).parents[1]
    methods, below = (*mirror.METHODS, "sweep", "planner"), ("wire", "compute", "plan")
    order = sorted(methods, key=lambda method: method == "shared")
    figure = new_figure(9, 2.8)
    axes = figure.subplots()
    for x, method in enumerate(order):
        files = [path for path in (package / method).glob("**/*.py") if path.name != "__init__.py"]
        for y, floor in enumerate(("top", *below)):
            here = [path for path in files if floor_of(path.relative_to(package / method), below) == floor]
            axes.barh(
                y,
                0.92,
                left=x - 0.46,
                height=0.86,
                color=PALE if not here else WORKER,
                alpha=min(1, 0.3 + len(here) / 30),
            )
            text = f"{len(here)} modules" if here else ""
            axes.text(x, y, text, ha="center", va="center", fontsize=6.5, color=INK)
    named(axes, "Imports go down, and to the right; the top of a folder alone knows Lightning", "", "")
    axes.set_xticks(range(len(order)), order, fontsize=7)
    axes.set_yticks(range(4), ("binds to Lightning", "wire: messages", "compute: tensors", "plan: values"), fontsize=7)
    axes.set_xlim(-0.5, len(order) - 0.5)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    return figure


def floor_of(path: Path, below: Sequence[str]) -> str:
    """Where a module of a method stands."""
    return next((part for part in path.parts if part in below), "top")


PICTURES = (optimizers, placement, spread, waiting, fabric, plan, injected, cache, mirrored, floors)


def draw(folder: Path) -> None:
    """One SVG for each picture."""
    with matplotlib.rc_context(SAME):
        for picture in PICTURES:
            picture().savefig(folder / f"{picture.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(IMAGES)
