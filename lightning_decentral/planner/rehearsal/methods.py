"""Default methods of a rehearsal: those that `plan` ranks first by the table of known losses.

Short and separate: the table is read before a rehearsal is imported."""

from math import inf
from operator import itemgetter

from lightning_decentral.planner.candidates import BASELINE, OUTER, STREAM, Candidate, is_ddp, measured
from lightning_decentral.planner.compare import Comparison
from lightning_decentral.planner.forecasts import composed
from lightning_decentral.shared.plan.known_losses import KnownLosses

MOST = 6  # Default methods where the table knows none.
METHODS = (
    Candidate(BASELINE, "ddp"),
    Candidate("strategy=compressed", "compressed, int8"),
    Candidate("strategy=gossip", "gossip"),
    Candidate("strategy=gossip strategy/topology=ring", "gossip, ring"),
    Candidate("strategy=gossip strategy/codec=int8", "gossip, int8"),
    Candidate(f"{STREAM} strategy/combine=outer_nesterov {OUTER}", "streamed outer rounds"),
)


def methods_of(known: KnownLosses | None, plan: Comparison | None = None) -> tuple[Candidate, ...]:
    """`ddp`, and the fastest methods to its loss by the table of known losses; `METHODS` where it has no losses.
    `plan`: predicts seconds of a batch in the setting; its choice is first. Without it, by batches alone."""
    if known is None:
        return METHODS
    if plan is None:
        reached = [(known.share(one.title) or inf, one) for one in measured(known)]
    else:
        reached = [(row.to_loss * (row is not plan.best), row.candidate) for row in plan.rows]
    order = [one for share, one in sorted(reached, key=itemgetter(0)) if share < inf and one.overrides != BASELINE]
    # Hooks and accumulated gradients aren't rehearsed.
    made = {one: composed(one.overrides) for one in order}
    order = [one for one in order if made[one].accumulated == 1]
    first, *others = [one for one in order if getattr(made[one].strategy, "_ddp_comm_hook", None) is None]
    # A form of `ddp` is always among them: plan may name one that can't be rehearsed, as half precision.
    forms = [one for one in others if is_ddp(one.overrides)][: not is_ddp(first.overrides)]
    some = [first, *forms, *(one for one in others if one not in forms)][: MOST - 1]
    return METHODS[0], *sorted(some, key=order.index)
