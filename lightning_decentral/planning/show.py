"""A plan as a table, and what it says in words."""

from collections.abc import Iterator

from rich.table import Table

from lightning_decentral.gossip.forecast import Gossiping
from lightning_decentral.planning.plan import Plan, Row
from lightning_decentral.planning.units import shown_bytes, shown_seconds

HEADINGS = ("method", "step", "p50", "p95", "exposed", "card", "memory", "x ddp", "")
EXTRAPOLATED = "~"


def cells(plan: Plan, row: Row) -> tuple[str, ...]:
    """Of one method, as text."""
    found = row.forecast
    spans = (found.seconds, found.p50_seconds, found.p95_seconds, found.exposed_seconds)
    marks = [
        *([EXTRAPOLATED] if found.extrapolated else []),
        *([row.candidate.remark] if row.candidate.remark else []),
        *([] if plan.fits(row) else ["doesn't fit"]),
    ]
    sizes = shown_bytes(found.card_bytes), shown_bytes(found.memory_bytes)
    return (row.candidate.title, *map(shown_seconds, spans), *sizes, f"{plan.speedup(row):.2f}", " ".join(marks))


def table(plan: Plan) -> Table:
    """The fastest first."""
    cluster = plan.setting.cluster
    title = f"predicted for {cluster.workers} workers on {cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"
    found = Table(title=title, title_justify="left")
    for heading in HEADINGS:
        found.add_column(heading, justify="left" if heading in ("method", "") else "right")
    for row in plan.rows:
        found.add_row(*cells(plan, row), style="bold" if row is plan.best else None)
    return found


def sentences(plan: Plan) -> Iterator[str]:
    """What the columns are, what was left out, what to do."""
    yield (
        "step: mean seconds with stragglers; p50, p95: over runs of 64 steps; exposed: what a network that takes no "
        "time would save; card: bytes that a node sends in a step"
    )
    if any(row.forecast.extrapolated for row in plan.rows):
        yield f"{EXTRAPOLATED} extrapolated: not measured on groups of this size"
    for refused in plan.refused:
        yield f"not possible: {refused.candidate.title}: {refused.reason}"
    yield from verdict(plan)


def verdict(plan: Plan) -> Iterator[str]:
    """The recommendation."""
    if plan.best is None:
        yield "nothing fits into this memory: more workers, a smaller batch, or smaller pieces of the model"
        return
    gain = plan.speedup(plan.best) - 1
    if plan.stay:
        fastest = max(plan.speedup(row) for row in plan.rows if row.candidate.equal and plan.fits(row)) - 1
        yield f"stay with ddp: the fastest other gains {100 * max(0.0, fastest):.0f} %, less than the threshold"
    else:
        yield f"{plan.best.candidate.title}: {100 * gain:+.0f} % steps per second against ddp"
    if isinstance(plan.best.method, Gossiping):
        yield "gossip is another algorithm than all-reduce: compare what both reach before you settle"
    yield f"python recipes/train.py {plan.command}"
