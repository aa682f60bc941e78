"""Showing a plan: its table, its conclusions as text, units such as 200mbit; and its report, a page (HTML).

The page has speed-up curves, where each method wins, timelines. It needs matplotlib (extra `plot`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from io import StringIO
from typing import Any

from rich.table import Table

from lightning_decentral.gossip.plan.forecast import GossipForecast
from lightning_decentral.gossip.plan.warm_start import WarmStarted
from lightning_decentral.planner.compare import BASES, RATES, Cell, ComparedMethod, Comparison, grid, sizes
from lightning_decentral.planner.plan.optimizer_cost import ALIKE, MUON, products_seconds
from lightning_decentral.shared.plan.figure import ACCENT, INK, WORKER, new_figure
from lightning_decentral.shared.plan.profile import Model
from lightning_decentral.shared.plan.timeline import Task, run
from lightning_decentral.shared.plan.units import shown_bytes

HEADINGS = ("method", "ms/step", "p95", "exposed", "card", "memory", "x ddp", "to loss", "")
NEVER, UNKNOWN = "never", "-"
GIVEN = {"between": "--bandwidth", "inside": "--inside-bandwidth"}
EXTRAPOLATED, REMARK, TOO_LARGE = "~", "*", "!"


def cells(plan: Comparison, row: ComparedMethod) -> tuple[str, ...]:
    """Table cells of one method, as text."""
    found = row.forecast
    spans = (found.seconds, found.p95_seconds, found.exposed_seconds)
    milliseconds = (f"{1e3 * seconds:.4g}" for seconds in spans)
    sizes = shown_bytes(found.card_bytes), shown_bytes(found.memory_bytes)
    marks = EXTRAPOLATED * found.extrapolated + REMARK * bool(row.candidate.remark) + TOO_LARGE * (not plan.fits(row))
    return row.candidate.title, *milliseconds, *sizes, f"{plan.speedup(row):.2f}", sooner(plan, row), marks


def sooner(plan: Comparison, row: ComparedMethod) -> str:
    """Times sooner than the row `ddp` at the loss that `ddp` with AdamW ends at, as text."""
    if row.share is None or not plan.baseline.to_loss < math.inf:
        return UNKNOWN
    return f"{plan.baseline.to_loss / row.to_loss:.2f}" if row.share < math.inf else NEVER


def table(plan: Comparison) -> Table:
    """The soonest at the loss first, then the fastest."""
    cluster = plan.setting.cluster
    title = f"predicted for {cluster.workers} workers on {cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"
    found = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in HEADINGS:
        found.add_column(heading, justify="left" if heading in ("method", "") else "right", no_wrap=True)
    for row in plan.rows:
        found.add_row(*cells(plan, row), style="bold" if row is plan.best else None)
    return found


def sentences(plan: Comparison) -> Iterator[str]:
    """Sentences about the columns, about what was left out, and what to do."""
    yield (
        "milliseconds per step: mean with stragglers; p95: 19 of 20 runs of 64 steps take less; exposed: what a "
        "network that takes no time would save; card: bytes that a node sends in a step"
    )
    if plan.known is not None:
        yield (
            f"to loss: times sooner than the row ddp at the loss that ddp with AdamW at its best rate ends at, "
            f"{plan.known.loss:g}; batches as measured with {plan.known}, seconds as predicted; {NEVER}: not in as "
            f"many batches; {UNKNOWN}: not measured, so not recommended"
        )
        if plan.known.is_far(plan.setting.cluster.workers, plan.setting.model.parameter_bytes):
            yield (
                "that is far from your setting: with more workers gossip and outer rounds end higher, so rehearse "
                "before a long run (lightning-decentral rehearse)"
            )
    if any(row.forecast.extrapolated for row in plan.rows):
        network, extrapolated = plan.setting.network, "extrapolated: not measured on groups of this size"
        options = " and ".join(GIVEN[reach] for reach in network.given)
        also = f", or {extrapolated}" if any(cost.reach not in network.given for cost in network.costs) else ""
        why = f"priced from {options}, not measured{also}" if options else extrapolated
        yield f"{EXTRAPOLATED} {why}"
    if plan.setting.cluster.per_node > 1 and not plan.setting.network.knows("inside"):
        yield "inside a node priced like the network card, which is too dear: give --inside-bandwidth 200gbit"
    yield from _rounds(plan)
    for remark in dict.fromkeys(row.candidate.remark for row in plan.rows if row.candidate.remark):
        titles = [row.candidate.title for row in plan.rows if row.candidate.remark == remark]
        yield f"{REMARK} {'; '.join(titles)}: {remark}"
    if not all(plan.fits(row) for row in plan.rows):
        yield f"{TOO_LARGE} needs more memory than there is"
    yield from (f"not possible: {title}: {reason}" for title, reason in plan.refused.items())
    yield from verdict(plan)


def _rounds(plan: Comparison) -> Iterator[str]:
    """Seconds that a round takes the device, as text: the recommended method's, else the fastest's that gossips."""
    gossips = [row for row in plan.rows if isinstance(row.method, GossipForecast)]
    for row in sorted(gossips, key=lambda row: row is not plan.best)[:1]:
        assert isinstance(row.method, GossipForecast)
        if seconds := row.method.round_seconds(row.setting):
            share = f"{1e3 * seconds:.3g} ms, {100 * seconds / row.forecast.seconds:.2g} % of a step"
            yield f"a round takes the device itself (copy, encode, decode, mix): {row.candidate.title} {share}, counted"


def verdict(plan: Comparison) -> Iterator[str]:
    if plan.best is None:
        yield "nothing fits into this memory: more workers, a smaller batch, or smaller pieces of the model"
        return
    yield from _gain(plan, plan.best)
    if (nodes := plan.setting.cluster.nodes) > 1:
        yield (
            f"the same line on each of {nodes} hosts, with NODE_RANK, MASTER_ADDR, MASTER_PORT (docs/cluster.md): "
            f"they meet at MASTER_ADDR, and one alone waits for the other {nodes - 1}"
        )
    yield f"python recipes/train.py {plan.command}"


def _gain(plan: Comparison, best: ComparedMethod) -> Iterator[str]:
    """Sentences on what the best method gains, at a loss where that is known, and on what isn't known."""
    if best.to_loss < math.inf:
        if plan.stay:
            others = (row for row in plan.rows if row.method.equal and plan.fits(row))
            soonest = max(best.to_loss / row.to_loss for row in others) - 1
            yield f"take {best.candidate.title}: the soonest other gains {100 * soonest:.0f} %, less than the threshold"
        else:
            times = plan.soonest_ddp.to_loss / best.to_loss
            yield (
                f"{best.candidate.title}: {times:.2f} times sooner at that loss than {plan.soonest_ddp.candidate.title}"
            )
        return
    gain = plan.speedup(best) - 1
    if plan.stay:
        fastest = max(plan.speedup(row) for row in plan.rows if row.method.equal and plan.fits(row)) - 1
        yield f"stay with ddp: the fastest other gains {100 * max(0.0, fastest):.0f} %, less than the threshold"
    else:
        yield f"{best.candidate.title}: {100 * gain:+.0f} % steps per second against ddp"
    gossips = isinstance(best.method, (GossipForecast, WarmStarted))
    if not plan.stay:
        yield f"{_unranked(plan)}, so this ranks steps; lightning-decentral rehearse measures your losses"
    yield from _optimizer(plan.setting.model, gossips)


def _unranked(plan: Comparison) -> str:
    """Reason why methods aren't ranked by losses, as text."""
    optimizer = plan.setting.model.optimizer
    if plan.known is not None:
        return "no method that is known to reach the loss fits this memory, or this profile doesn't show its cost"
    if optimizer not in BASES:
        return f"no loss was measured with {optimizer or 'an unnamed optimizer'}"
    return "no loss of such a model was measured (--like gpt, vit or resnet takes those of a recipe)"


def _optimizer(model: Model, gossip: bool) -> Iterator[str]:
    """Sentences about the optimizer that could be taken instead, and its cost."""
    more = products_seconds(model)
    if model.optimizer in ALIKE and more:
        why = "Adam takes smaller steps under gossip than under ddp; " if gossip else ""
        yield f"{why}Muon would take {1e3 * more:.3g} ms a step more: --optimizer muon (when: docs/optimizers.md)"
    if model.optimizer == MUON and gossip:
        yield "Muon under gossip takes a momentum of its own: tune optimizer.lr and .momentum (docs/optimizers.md)"


DDP = "#c8ccd4"
COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#6f4e7c", "#8fb3d9", "#9c6644", "#2e4057", "#b5838d", "#00798c")
SHOWN_ROWS = 8
Palette = Mapping[str, str]


def new_axes(width: float, height: float, across: str, upwards: str = "") -> tuple[Any, Any]:
    """(figure, its axes with these labels)."""
    figure = new_figure(width, height)
    axes = figure.subplots()
    axes.set_xlabel(across)
    axes.set_ylabel(upwards)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def svg(figure: Any) -> str:
    """The picture as an element of a page: no declaration, no date, nothing to be loaded."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def palette(titles: Sequence[str]) -> dict[str, str]:
    """{title: colour}, the same in all pictures; ddp is grey."""
    others = [title for title in dict.fromkeys(titles) if title != "ddp"]
    return {"ddp": DDP, **{title: COLOURS[i % len(COLOURS)] for i, title in enumerate(others)}}


def curves(
    cells: Sequence[Cell], titles: Sequence[str], colours: Palette, across: Callable[[Cell], float], label: str
) -> str:
    """Speed-up over ddp of these candidates."""
    figure, axes = new_axes(7, 3.6, label, "speed-up over ddp")
    places = [across(cell) for cell in cells]
    for title in titles:
        speedups = [cell.speedup(title) or float("nan") for cell in cells]
        axes.plot(places, speedups, color=colours[title], marker="o", markersize=3, label=title)
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places], minor=False)
    axes.minorticks_off()
    axes.grid(axis="y", color="#e4e8ee")
    figure.legend(loc="outside right center", frameon=False, fontsize=7)
    return svg(figure)


def winners(cells: Sequence[Cell], colours: Palette) -> str:
    """Workers across bandwidth, the recommended method as colour, its speed-up as number."""
    workers, rates = sorted({cell.workers for cell in cells}), sorted({cell.bytes_per_second for cell in cells})
    names = ["ddp", *sorted({cell.best for cell in cells} - {"ddp"})]
    figure, axes = new_axes(7.5, 1.4 + 0.45 * len(workers), "Gbit/s of a network card", "workers")
    axes.spines[["top", "right"]].set_visible(True)
    from matplotlib.patches import Rectangle  # there is one, or there were no figure

    square = partial(Rectangle, width=1, height=1, edgecolor="white", alpha=0.75)
    for cell in cells:
        x, y = rates.index(cell.bytes_per_second), workers.index(cell.workers)
        axes.add_patch(square((x - 0.5, y - 0.5), facecolor=colours[cell.best]))
        factor = f"{cell.speedup(cell.best):.1f}" if cell.speedup(cell.best) else ""
        axes.text(x, y, factor, ha="center", va="center", fontsize=8, color=INK)
    axes.set_xlim(-0.5, len(rates) - 0.5)
    axes.set_ylim(-0.5, len(workers) - 0.5)
    axes.set_xticks(range(len(rates)), [f"{8 * rate / 1e9:g}" for rate in rates])
    axes.set_yticks(range(len(workers)), [str(count) for count in workers])
    handles = [square((0, 0), facecolor=colours[name]) for name in names]
    figure.legend(handles, names, loc="outside right center", frameon=False, fontsize=7)
    return svg(figure)


def timeline(tasks: Sequence[Task[str]]) -> str:
    """Timeline of what the first workers and links do, one row each (SVG)."""
    spans = run(tasks)
    kinds: dict[str, list[str]] = {}  # rows of workers and rows of links, shown in pairs
    for row in dict.fromkeys(task.worker for task in tasks):
        kinds.setdefault(row.split()[0], []).append(row)
    first = [name for pair in zip(*kinds.values(), strict=False) for name in pair][:SHOWN_ROWS]
    figure, axes = new_axes(8, 0.9 + 0.3 * len(first), "milliseconds")
    for name, span in spans.items():
        if span.worker in first and span.finish > span.start:
            sends = name.split()[0] in ("exchange", "all-reduce", "gather", "scatter")
            colour = ACCENT if sends else INK if name.split()[0] in ("backward", "B", "mix") else WORKER
            place, width = first.index(span.worker), 1e3 * (span.finish - span.start)
            axes.barh(place, width, left=1e3 * span.start, color=colour, edgecolor="white", linewidth=0.4)
    axes.set_yticks(range(len(first)), first, fontsize=8)
    axes.invert_yaxis()
    return svg(figure)


MOST_CURVES = 8
NO_MAP = "<p>No map of other clusters: nothing is known of a network between nodes; give --bandwidth 200mbit.</p>"
HEAD = '<!doctype html><html lang="en"><meta charset="utf-8"><title>plan</title>'
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b263b; max-width: 1000px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 3px 9px; text-align: right }
td:first-child, th:first-child, td:last-child { text-align: left } tr:nth-child(even) { background: #f3f5f8 }
tr.best { font-weight: bold } code { background: #f3f5f8; padding: 2px 4px } svg { max-width: 100%; height: auto }
"""


def page(plan: Comparison, *, workers: Sequence[int] | None = None, rates: Sequence[float] = RATES) -> str:
    """The report.

    Args:
        workers: of the map and the curves; by default up to 16 nodes.
        rates: bytes per second of a network card in them.

    Raises:
        ValueError: no matplotlib.
    """
    where = plan.setting
    counts = (workers or sizes(where)) if where.network.knows("between") else []
    found = grid(plan, counts, rates) if counts else []
    body = "\n".join([*_head(plan), *(_maps(plan, found) if found else [NO_MAP])])
    for row in dict.fromkeys([plan.baseline, *([plan.best] if plan.best else [])]):
        body += f"\n<h2>Timeline: {escape(row.candidate.title)}</h2>"
        body += "<p>Equally fast workers; the first rows; a batch with an update.</p>\n"
        body += timeline(row.method.tasks(row.setting))
    return f"{HEAD}<style>{STYLE}</style>\n{body}\n</html>\n"


def _head(plan: Comparison) -> Iterator[str]:
    model, cluster = plan.setting.model, plan.setting.cluster
    yield f"<h1>{escape(model.name)} on {cluster.workers} workers, {cluster.per_node} on a node</h1>"
    yield f"<p>profiled on {escape(model.device)}; {model.parameter_bytes / 1e6:,.1f} MB of parameters, "
    yield f"{1e3 * model.seconds:,.1f} ms of computation</p>"
    rows = "".join(line("td", cells(plan, row), ' class="best"' if row is plan.best else "") for row in plan.rows)
    yield f"<table>{line('th', HEADINGS)}{rows}</table>"
    yield from (f"<p>{escape(sentence)}</p>" for sentence in sentences(plan))


def line(tag: str, found: Sequence[str], attributes: str = "") -> str:
    return f"<tr{attributes}>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in found) + "</tr>"


def _maps(plan: Comparison, found: Sequence[Cell]) -> Iterator[str]:
    titles = [row.candidate.title for row in plan.rows if row.method.equal][:MOST_CURVES]
    own = plan.setting.cluster.workers
    own_rate = plan.setting.network.price("exchange", "between", 2).bytes_per_second
    rate = min({c.bytes_per_second for c in found}, key=lambda r: abs(r - own_rate))
    over_workers = [cell for cell in found if cell.bytes_per_second == rate]
    over_rates = [cell for cell in found if cell.workers == own]
    gain = "times sooner than ddp at a loss" if plan.known else "its speed-up over ddp"
    yield f"<h2>Where each method wins</h2><p>Colour: what to train with; number: {gain}.</p>"
    colours = palette([*titles, *(cell.best for cell in found)])
    yield winners(found, colours)
    yield f"<h2>Over workers, at {8 * rate / 1e9:g} Gbit/s</h2>"
    yield curves(over_workers, titles, colours, lambda cell: cell.workers, "workers")
    yield f"<h2>Over bandwidth, {own} workers</h2>"
    yield curves(over_rates, titles, colours, lambda cell: 8 * cell.bytes_per_second / 1e9, "Gbit/s")
