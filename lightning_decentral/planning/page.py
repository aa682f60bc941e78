"""A plan as one self-contained HTML page: nothing is loaded from elsewhere."""

from collections.abc import Iterator, Sequence
from html import escape
from math import inf

from lightning_decentral.planning import pictures
from lightning_decentral.planning.plan import THRESHOLD, Plan
from lightning_decentral.planning.show import HEADINGS, cells, sentences
from lightning_decentral.planning.sweep import RATES, Cell, sizes
from lightning_decentral.planning.sweep import cells as swept

MOST_CURVES = 8
NO_MAP = "<p>No map of other clusters: nothing is known of a network between nodes; give --bandwidth 200mbit.</p>"
HEAD = '<!doctype html><html lang="en"><meta charset="utf-8"><title>plan</title>'
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b263b; max-width: 1000px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 3px 9px; text-align: right }
td:first-child, th:first-child, td:last-child { text-align: left } tr:nth-child(even) { background: #f3f5f8 }
tr.best { font-weight: bold } code { background: #f3f5f8; padding: 2px 4px } svg { max-width: 100%; height: auto }
"""


def page(
    plan: Plan,
    variation: Sequence[float] = (),
    *,
    workers: Sequence[int] | None = None,
    rates: Sequence[float] = RATES,
    threshold: float = THRESHOLD,
    slices: int = 1,
) -> str:
    """The report.

    Args:
        variation: of the seconds of computation, as in `Profile`.
        workers: of the map and the curves; by default up to 16 nodes.
        rates: bytes per second of a network card in them.

    Raises:
        ValueError: no matplotlib.
    """
    where, limit = plan.setting, inf if plan.memory_bytes is None else plan.memory_bytes
    counts = (workers or sizes(where)) if where.network.knows("between") else []
    found = swept(where, variation, counts, rates, threshold, slices, plan.also, limit) if counts else []
    body = "\n".join([*_head(plan), *(_maps(plan, found) if found else [NO_MAP]), *_timelines(plan)])
    return f"{HEAD}<style>{STYLE}</style>\n{body}\n</html>\n"


def _head(plan: Plan) -> Iterator[str]:
    model, cluster = plan.setting.model, plan.setting.cluster
    yield f"<h1>{escape(model.name)} on {cluster.workers} workers, {cluster.per_node} on a node</h1>"
    yield f"<p>profiled on {escape(model.device)}; {model.parameter_bytes / 1e6:,.1f} MB of parameters, "
    yield f"{1e3 * model.seconds:,.1f} ms of computation</p>"
    rows = "".join(_line("td", cells(plan, row), ' class="best"' if row is plan.best else "") for row in plan.rows)
    yield f"<table>{_line('th', HEADINGS)}{rows}</table>"
    yield from (f"<p>{escape(sentence)}</p>" for sentence in sentences(plan))


def _line(tag: str, found: Sequence[str], attributes: str = "") -> str:
    return f"<tr{attributes}>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in found) + "</tr>"


def _maps(plan: Plan, found: Sequence[Cell]) -> Iterator[str]:
    titles = [row.candidate.title for row in plan.rows if row.method.equal][:MOST_CURVES]
    own = plan.setting.cluster.workers
    own_rate = plan.setting.network.price("exchange", "between", 2).bytes_per_second
    rate = min({c.bytes_per_second for c in found}, key=lambda r: abs(r - own_rate))
    over_workers = [cell for cell in found if cell.bytes_per_second == rate]
    over_rates = [cell for cell in found if cell.workers == own]
    yield "<h2>Where each method wins</h2><p>Colour: what to train with; number: its speed-up over ddp.</p>"
    colours = pictures.palette([*titles, *(cell.best for cell in found)])
    yield pictures.winners(found, colours)
    yield f"<h2>Over workers, at {8 * rate / 1e9:g} Gbit/s</h2>"
    yield pictures.curves(over_workers, titles, colours, lambda cell: cell.workers, "workers")
    yield f"<h2>Over bandwidth, {own} workers</h2>"
    yield pictures.curves(over_rates, titles, colours, lambda cell: 8 * cell.bytes_per_second / 1e9, "Gbit/s")


def _timelines(plan: Plan) -> Iterator[str]:
    for row in dict.fromkeys([plan.baseline, *([plan.best] if plan.best else [])]):
        yield f"<h2>Timeline: {escape(row.candidate.title)}</h2><p>Equally fast workers; the first rows.</p>"
        yield pictures.timeline(row.method.tasks(plan.setting))
