"""Posting of a stage's receives: before which actions. Short, as the wire and tests both read it.

Receives are posted before the actions that need them:

    two ahead    the action's own and two more: one that is needed next, one that travels meanwhile
    in step      those that are sent before the action in one order of all stages' actions

By NCCL a posted receive is a running kernel, and so is a send until its receive is posted. What waits for a whole
device (memory that is given back, a kernel's first loading, `torch.cuda.synchronize`) waits for both. Two ahead, the
sender may need something of this very stage, whose host stands still. In step, a stage that stands before X has sent
only what comes before X, and posted exactly what is sent before X: it waits for stages alone that stand at something
earlier. So the earliest of those that wait goes on, however many wait at once, wherever, however large messages are.

By gloo a host waits for its messages, one by one: there two ahead is safe, and in step would come late.
"""

from bisect import bisect
from collections.abc import Mapping, Sequence

from lightning_decentral.pipeline.plan.schedule import TOWARDS, Action, Kind, equally_long

AHEAD = 2
Posts = Mapping[Action, Sequence[Action]]  # action -> those whose receives are posted before it, in order.


def two_ahead(actions: Sequence[Action]) -> Posts:
    """Post receives two ahead, for a stage with these actions."""
    coming = [action for action in actions if action.kind is not Kind.WEIGHTS]
    later = zip(coming[1:], coming[AHEAD + 1 :], strict=False)
    return {coming[0]: coming[: AHEAD + 1], **{action: [expected] for action, expected in later}}


def in_step(stages: Sequence[Sequence[Action]], num_slices: int) -> list[Posts]:
    """Post receives in step, for each of these stages; all must ask with the same actions."""
    # By start; of those that start at once senders come first, so what they send is received before its turn. Any order
    # would do in which nothing comes before what it needs.
    spans = equally_long(stages, num_slices).items()
    order = {a: (span.start, a.kind is not Kind.FORWARD, a.stage * TOWARDS[a.kind]) for a, span in spans}

    def posts(own: Sequence[Action]) -> Posts:
        found: dict[Action, list[Action]] = {}
        moments = [order[action] for action in own]
        for action in own:
            for needed in action.needs(len(stages), num_slices):
                if needed.stage != action.stage:
                    found.setdefault(own[bisect(moments, order[needed])], []).append(action)
        return found

    return [posts(own) for own in stages]
