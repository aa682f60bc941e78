"""Printing a plan: its table, and its conclusions as text."""

import math
from collections.abc import Iterator
from textwrap import fill

from rich.table import Table

from lightning_decentral.gossip.plan.forecast import GossipForecast
from lightning_decentral.gossip.plan.warm_start import WarmStarted
from lightning_decentral.planner.compare import BASES, ComparedMethod, Comparison
from lightning_decentral.planner.plan.optimizer_cost import ALIKE, MUON, products_seconds
from lightning_decentral.shared.plan.profile import Model
from lightning_decentral.shared.plan.units import shown_bytes

HEADINGS = ("method", "ms/step", "p95", "exposed", "card", "memory", "x ddp", "to loss", "")
TITLE_WIDTH = 22  # width of the title's column: all others take 58 at most
NEVER, UNKNOWN = "never", "-"
GIVEN = {"between": "--bandwidth", "inside": "--inside-bandwidth"}
EXTRAPOLATED, REMARK, TOO_LARGE = "~", "*", "!"


def cells(plan: Comparison, row: ComparedMethod) -> tuple[str, ...]:
    found = row.forecast
    spans = (1e3 * seconds for seconds in (found.seconds, found.p95_seconds, found.exposed_seconds))
    milliseconds = map(digits, spans)
    sizes = shown_bytes(found.card_bytes), shown_bytes(found.memory_bytes)
    marks = EXTRAPOLATED * found.extrapolated + REMARK * bool(row.candidate.remark) + TOO_LARGE * (not plan.fits(row))
    return row.candidate.title, *milliseconds, *sizes, times(plan.speedup(row)), speed_up(plan, row), marks


def speed_up(plan: Comparison, row: ComparedMethod) -> str:
    """Speed-up over the row `ddp` in time to the loss at which `ddp` with AdamW ends, as text."""
    if row.share is None or not plan.baseline.to_loss < math.inf:
        return UNKNOWN
    return times(plan.baseline.to_loss / row.to_loss) if row.share < math.inf else NEVER


def times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 100 else digits(ratio, 3)


def digits(value: float, count: int = 4) -> str:
    """Text with so many significant digits, and zeros for more: 1687307 is 1687000."""
    rounded = float(f"{value:.{count}g}")
    return f"{rounded:.{count}g}" if rounded < 10**count else f"{rounded:.0f}"


def table(plan: Comparison) -> Table:
    """Table of methods, the fastest to the loss first, then the fastest steps; 80 columns, long titles are wrapped."""
    cluster = plan.setting.cluster
    title = f"predicted for {cluster.workers} workers on {cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"
    found = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in HEADINGS:
        found.add_column(heading, justify="left" if heading in ("method", "") else "right", no_wrap=True)
    for row in plan.rows:
        name, *others = cells(plan, row)
        name = fill(name, TITLE_WIDTH, break_long_words=False, break_on_hyphens=False)
        found.add_row(name, *others, style="bold" if row is plan.best else None)
    return found


def sentences(plan: Comparison) -> Iterator[str]:
    """Sentences about the columns, about methods that were left out, and on how to train."""
    yield (
        "milliseconds per step: mean with stragglers; p95: 19 of 20 runs of 64 steps take less; exposed: what a "
        "network without delay would save; card: bytes that a node sends in a step"
    )
    if plan.known is not None:
        yield (
            f"to loss: speed-up over the row ddp to reach the final loss of ddp with AdamW at its best rate, "
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
        yield "links inside a node priced like the network card, which is too slow: give --inside-bandwidth 200gbit"
    cluster = plan.setting.cluster
    if (part := cluster.simulated.workers) < cluster.workers:
        yield (
            f"gossip, outer rounds and partial backprop of {cluster.workers} workers are an estimate: who waits for "
            f"whom is simulated for {part} of them, in the same kind of graph; the others are computed for all"
        )
    yield from _rounds(plan)
    for remark in dict.fromkeys(row.candidate.remark for row in plan.rows if row.candidate.remark):
        titles = [row.candidate.title for row in plan.rows if row.candidate.remark == remark]
        yield f"{REMARK} {'; '.join(titles)}: {remark}"
    if not all(plan.fits(row) for row in plan.rows):
        yield f"{TOO_LARGE} needs more memory than there is"
    yield from (f"not possible: {title}: {reason}" for title, reason in plan.refused.items())
    yield from verdict(plan)


def _rounds(plan: Comparison) -> Iterator[str]:
    """Compute seconds of a gossip round, as text: of the recommended method, else of the fastest gossip method."""
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
    """Sentences on the best method's gain, at a loss where one is known, and on missing measurements."""
    if best.to_loss < math.inf:
        if plan.stay:
            others = (row for row in plan.rows if row.method.equal and plan.fits(row))
            fastest = max(best.to_loss / row.to_loss for row in others) - 1
            yield f"take {best.candidate.title}: the fastest other gains {100 * fastest:.0f} %, less than the threshold"
        else:
            gain = times(plan.fastest_ddp.to_loss / best.to_loss)
            yield f"{best.candidate.title}: {gain} times faster to that loss than {plan.fastest_ddp.candidate.title}"
        return
    if plan.stay:
        fastest = max(plan.speedup(row) for row in plan.rows if row.method.equal and plan.fits(row)) - 1
        yield f"stay with ddp: the fastest other gains {100 * max(0.0, fastest):.0f} %, less than the threshold"
    else:
        yield f"{best.candidate.title}: {100 * (plan.speedup(best) - 1):+.0f} % steps per second against ddp"
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
    """Sentences about an optimizer to use instead, and its cost."""
    more = products_seconds(model)
    if model.optimizer in ALIKE and more:
        why = "Adam takes smaller steps under gossip than under ddp; " if gossip else ""
        yield f"{why}Muon would take {1e3 * more:.3g} ms a step more: --optimizer muon (when: docs/optimizers.md)"
    if model.optimizer == MUON and gossip:
        yield "Muon under gossip takes a momentum of its own: tune optimizer.lr and .momentum (docs/optimizers.md)"
