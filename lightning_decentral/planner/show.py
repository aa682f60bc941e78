"""Printing a plan: its table, its conclusions as text, units such as 200mbit."""

import math
import re
from collections.abc import Iterator

from rich.table import Table

from lightning_decentral.gossip.plan.forecast import GossipForecast
from lightning_decentral.gossip.plan.warm_start import WarmStarted
from lightning_decentral.planner.compare import ComparedMethod, Comparison
from lightning_decentral.planner.plan.optimizer_cost import ALIKE, MUON, products_seconds
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import Model

HEADINGS = ("method", "ms/step", "p95", "exposed", "card", "memory", "x ddp", "to loss", "")
NEVER, UNKNOWN = "never", "-"
GIVEN = {"between": "--bandwidth", "inside": "--inside-bandwidth"}
EXTRAPOLATED, REMARK, TOO_LARGE = "~", "*", "!"


def cells(plan: Comparison, row: ComparedMethod) -> tuple[str, ...]:
    """Table cells of one method, as text."""
    found = row.forecast
    spans = (found.seconds, found.p95_seconds, found.exposed_seconds)
    marks = [
        *([EXTRAPOLATED] if found.extrapolated else []),
        *([REMARK] if row.candidate.remark else []),
        *([] if plan.fits(row) else [TOO_LARGE]),
    ]
    sizes = shown_bytes(found.card_bytes), shown_bytes(found.memory_bytes)
    return (
        row.candidate.title,
        *(f"{1e3 * seconds:.4g}" for seconds in spans),
        *sizes,
        f"{plan.speedup(row):.2f}",
        sooner(plan, row),
        "".join(marks),
    )


def sooner(plan: Comparison, row: ComparedMethod) -> str:
    """Times sooner than the baseline at the loss that `ddp` with AdamW ends at."""
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
            f"to loss: times sooner at the loss that ddp with AdamW ends at, {plan.known.loss:g}; steps as measured "
            f"with {plan.known}, seconds as predicted; {NEVER}: not in as many steps; {UNKNOWN}: not measured"
        )
    if any(row.forecast.extrapolated for row in plan.rows):
        yield f"{EXTRAPOLATED} {_unmeasured(plan.setting.network)}"
    if plan.setting.cluster.per_node > 1 and not plan.setting.network.knows("inside"):
        yield "inside a node priced like the network card, which is too dear: give --inside-bandwidth 200gbit"
    yield from _rounds(plan)
    for remark in dict.fromkeys(row.candidate.remark for row in plan.rows if row.candidate.remark):
        titles = [row.candidate.title for row in plan.rows if row.candidate.remark == remark]
        yield f"{REMARK} {'; '.join(titles)}: {remark}"
    if not all(plan.fits(row) for row in plan.rows):
        yield f"{TOO_LARGE} needs more memory than there is"
    for refused in plan.refused:
        yield f"not possible: {refused.candidate.title}: {refused.reason}"
    yield from verdict(plan)


def _rounds(plan: Comparison) -> Iterator[str]:
    """Seconds that a round takes the device, as text: the recommended method's, else the fastest's that gossips."""
    gossips = [row for row in plan.rows if isinstance(row.method, GossipForecast)]
    for row in sorted(gossips, key=lambda row: row is not plan.best)[:1]:
        assert isinstance(row.method, GossipForecast)
        if seconds := row.method.round_seconds(plan.setting):
            share = f"{1e3 * seconds:.3g} ms, {100 * seconds / row.forecast.seconds:.2g} % of a step"
            yield f"a round takes the device itself (copy, encode, decode, mix): {row.candidate.title} {share}, counted"


def _unmeasured(network: Network) -> str:
    options = " and ".join(GIVEN[reach] for reach in network.given)
    measured = any(cost.reach not in network.given for cost in network.costs)
    extrapolated = "extrapolated: not measured on groups of this size"
    if not options:
        return extrapolated
    return f"priced from {options}, not measured" + (f", or {extrapolated}" if measured else "")


def verdict(plan: Comparison) -> Iterator[str]:
    if plan.best is None:
        yield "nothing fits into this memory: more workers, a smaller batch, or smaller pieces of the model"
        return
    yield from _gain(plan, plan.best)
    if plan.setting.cluster.nodes > 1:
        yield "on every host (docs/cluster.md):"
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
        yield (
            "no loss of such a model was measured, so this ranks steps: --like gpt, vit or resnet ranks by steps that "
            "models of that kind take to a loss; lightning-decentral rehearse measures yours"
        )
    yield from _optimizer(plan.setting.model, gossips)


def _optimizer(model: Model, gossip: bool) -> Iterator[str]:
    """Sentences about the optimizer that could be taken instead, and its cost."""
    more = products_seconds(model)
    if model.optimizer in ALIKE and more:
        why = "Adam takes smaller steps under gossip than under ddp; " if gossip else ""
        yield f"{why}Muon would take {1e3 * more:.3g} ms a step more: --optimizer muon (when: docs/optimizers.md)"
    if model.optimizer == MUON and gossip:
        yield "Muon under gossip takes a momentum of its own: tune optimizer.lr and .momentum (docs/optimizers.md)"


RATES = {"bit": 1 / 8, "kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
SPANS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SIZES = {"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "": 1.0}
SIZES |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


def bytes_per_second(text: str) -> float:
    """200mbit is 25e6. ValueError where it isn't a positive rate."""
    return _number(text, RATES, "a rate such as 200mbit or 25gbit")


def seconds(text: str) -> float:
    """100us is 1e-4. ValueError where it isn't a positive time."""
    return _number(text, SPANS, "a time such as 100us or 2ms")


def size_bytes(text: str) -> float:
    """24GB is 24e9. ValueError where it isn't a positive size."""
    return _number(text, SIZES, "a size such as 24GB, 80GiB or 24000000000")


def _number(text: str, units: dict[str, float], wanted: str) -> float:
    found = re.fullmatch(r"(\d+\.?\d*(?:e[+-]?\d+)?)\s*([a-zA-Z]*)", text)
    value = float(found[1]) * units.get(found[2], 0.0) if found else 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} isn't {wanted}")
    return value


def shown_bytes(value: float) -> str:
    """Format bytes with three digits: 12.3 MB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} B" if value else "0"
