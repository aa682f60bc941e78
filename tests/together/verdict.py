"""What must hold of a run, whatever was combined: each by arithmetic that isn't the package's."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.together.pool import Outcome
from tests.together.probe import LEARNING_RATE, WRITTEN_AT_END, apart
from tests.together.run import Named, Seen
from tests.together.space import NONE, STEPS, Case, differs

MAY_SUM = ("PeriodicAverage", "AlternatingExp", "Complete", "BaseGraph")
"""Topologies of which some steps, or some of what travels, may be an all-reduce."""
REFUSALS = ("ValueError", "MisconfigurationException", "TypeError")
ANOTHERS = re.compile(rf"PeerLost: .* in set-up: worker \d+ ended: ({'|'.join(REFUSALS)}): ")
"""A worker that heard of another's refusal before it came to its own."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-5, torch.bfloat16: 0.3}
HALF_STEP = {
    "Int8": 1 / 254,
    "Int4": 1 / 14,
    "Int2": 0.5,
    "default": 1 / 254,
    "BFloat16": 2**-9,
    "Float16": 2**-12,
    "Float32": 2**-24,
}
"""The largest rounding of a gradient in [-1, 1], by codec."""
OWED = 2.5
"""Roundings that error feedback may still owe at the end: a worker's and an owner's, of what is a little over 1."""
BENDS_UPDATES = ("QuasiGlobal", "Outer", "PseudoGradient", "PushSum", "RelaySum", "GradientTracking")
"""Rules that make more or less of the updates than their sum."""


def verdict(case: Case, outcomes: Sequence[Outcome], folder: Path) -> str:
    """What is wrong; empty: nothing, or all workers refused the run in one line before its first step."""
    if any(outcome.hung for outcome in outcomes):
        return f"hangs: {[outcome.error[:300] or ('hung' if outcome.hung else 'ended') for outcome in outcomes]}"
    errors = [outcome.error for outcome in outcomes if outcome.error]
    began = any(folder.glob("began-*"))
    if case.has("raise", "kill") and (began or not errors):
        return _one_ended(case, outcomes, errors)
    if case["method"] == "elastic" and differs(case) and not began:
        named = any(error.startswith("ValueError: ") for error in errors)  # the others wait for more
        return "" if named else f"the worker that was given something else isn't told: {errors}"
    if differs(case) and any(error.startswith("ValueError") for error in errors):
        # Who was given what no constructor takes never comes to the meeting, where the other waits.
        errors = [error.replace("MeetingFailed", "ValueError", 1) for error in errors]
    if errors:
        return _refused(errors, len(outcomes), began)
    if differs(case):
        return "workers that were given different things train"
    seen = [outcome.value for outcome in outcomes]
    return next((text for check in CHECKS if (text := check(case, seen))), "")


def _one_ended(case: Case, outcomes: Sequence[Outcome], errors: list[str]) -> str:
    """Of a fixed number of workers all end; where they may come and go the others train on."""
    planted = [error for error in errors if error.startswith("EOFError") or "planted by an event" in error]
    ends = 1 if case["method"] == "elastic" else len(outcomes)
    if not planted or len(errors) != ends:
        return f"an exception of one worker: {errors}"
    left = [outcome.value for outcome in outcomes if not outcome.error]
    return next((text for check in OF_SURVIVORS if left and (text := check(case, left))), "")


def refusal(outcomes: Sequence[Outcome]) -> str:
    """The first worker's, where all ended with an error."""
    return outcomes[0].error if all(outcome.error for outcome in outcomes) else ""


def _refused(errors: list[str], workers: int, began: bool) -> str:
    short = [error[:400] for error in errors]
    if began:
        return f"ends after training began: {short}"
    if len(errors) < workers:
        return f"refused by some alone: {short}"
    if not all(error.startswith(REFUSALS) or ANOTHERS.match(error) for error in errors):
        return f"no refusal but an error: {short}"
    return "" if all("\n" not in error.strip() for error in errors) else f"refused in several lines: {short}"


# ---- each of these looks at all workers ------------------------------------------------------------------------------


def finite(case: Case, seen: list[Seen]) -> str:
    """No number is NaN or infinite; not in the optimizers either."""
    for worker, one in enumerate(seen):
        wild = [name for name, value in one.last.items() if name != "least" and not value.isfinite().all()]
        if wild:
            return f"worker {worker} ends with NaN or infinity in {wild}"
        if any(not value.isfinite().all() for value in one.optimizer if value.is_floating_point()):
            return f"worker {worker}'s optimizer holds NaN or infinity"
    return ""


def healed_once(case: Case, seen: list[Seen]) -> str:
    """One poisoned gradient is one heal, of one worker."""
    if not case.has("nan") or case.has("stop"):
        return ""
    counts = [one.healed for one in seen]
    who = next(event.who for event in case.events if event.kind == "nan")
    return "" if counts[who] >= 1 else f"worker {who} had NaN gradients and was not healed: {counts}"


def same_end(case: Case, seen: list[Seen]) -> str:
    """All workers hand back one model and took equally many steps."""
    if len({one.steps for one in seen}) > 1 and not (case.gossips and case.has("stop")):
        return f"workers took {[one.steps for one in seen]} steps"
    if case["evaluate"] != "own":
        for name in _trained(seen[0]):
            if any(not torch.equal(seen[0].last[name], one.last[name]) for one in seen):
                return f"workers hand back different values of {name}"
    return ""


def equal_replicas(case: Case, seen: list[Seen]) -> str:
    """Where they stay equal, they never differ, nor their buffers where training ends."""
    for name in ("level", "least") if case["method"] in ("compressed", "partial", "pipeline") else ():
        if any(not torch.equal(seen[0].last[name], one.last[name]) for one in seen):
            return f"replicas that stay equal end with different values of {name}"
    size = case.workers // case.replicas
    for first in range(0, case.workers, size):
        group = seen[first : first + size]
        for place, other in enumerate(group):
            like = group[place % case.stages]
            # Not by ==: a run that is healed has had NaN.
            if len(other.rows) != len(like.rows) or any(
                not _alike(a, b) for a, b in zip(like.rows, other.rows, strict=True)
            ):
                return f"replicas that stay equal: worker {first + place} differs from {first + place % case.stages}"
    return ""


def sum_of_updates(case: Case, seen: list[Seen]) -> str:
    """mean_i x_i(end) = x(0) + mean_i sum of the updates that each would have made alone."""
    for name in _trained(seen[0]) if seen[0].alone else ():
        if "expert" in name and case["states"] not in ("none", NONE):  # momentum of steps that a worker sat out
            continue
        first = seen[0].first[name].double()
        due = first + sum((one.alone[name].double() - first for one in seen), torch.zeros_like(first)) / len(seen)
        got = sum((one.last[name].double() for one in seen), torch.zeros_like(first)) / len(seen)
        far, may = _largest(got - due), _may_miss(case, seen[0].last[name])
        if not far <= may:
            return f"{name} ends {far:.3g} from x(0) + the mean of all updates; {may:.3g} would be rounding"
    return ""


def accounted(case: Case) -> bool:
    """Whether it is known by how much all updates together move the mean."""
    if case["gradient"] == "bowl" or case.has("write at end", "nan"):
        return False
    if case["states"] not in ("none", NONE) and case.has("stop"):  # who goes on has the momentum of who ended, too
        return False
    if case.has("clamp") and case["accumulate"] == "2" and case.replicas < case.workers:
        return False  # what isn't averaged yet is clamped, as under ddp
    return not (_bends(case) and (case["gradient"] != "still" or _bends_writes(case)))


def accounted_elsewhere(case: Case) -> bool:
    """The same of the run that goes on by another number of workers: none of them has a state of its own any more."""
    stateless = case["optimizer"] == "sgd" or case.replicas == 1
    owes = case["method"] in ("compressed", "pipeline") and _codec(case) != "Plain()"  # and forgets it
    return accounted(case) and stateless and not owes


def met(case: Case, seen: list[Seen]) -> str:
    """Without gradients, workers that were moved apart come together."""
    if case["gradient"] != "still" or not case.has("apart") or case.has("write at end"):
        return ""
    at = next(event.at for event in case.events if event.kind == "apart")
    if len(seen[0].rows) - at < 9 or case["accumulate"] == "2":
        return ""
    begun = max(abs(apart(rank, case)) for rank in range(case.workers))
    left = max(_spread([one.own[name] for one in seen]) for name in seen[0].own)
    return (
        ""
        if left <= 0.95 * begun + 1e-3
        else f"workers were moved {begun:.2f} apart and are {left:.3g} apart at the end"
    )


def nearer(case: Case, seen: list[Seen]) -> str:
    """With one optimum for all, the distance to it falls."""
    if case["gradient"] != "bowl" or case.has("write", "write at end", "freeze", "stop", "refit", *LATE):
        return ""
    names = [name for name in _trained(seen[0]) if "late" not in name and "expert" not in name]
    first, last = (_norm(of, names) for of in (seen[0].first, seen[0].last))
    wild = max(_norm(one.own, [name for name in names if name in one.own]) for one in seen)
    if not wild <= 5 * first:
        return f"a worker is {wild:.3g} from the optimum of all, from which all began {first:.3g} away"
    if "Outer" in case["rule"] and case["optimizer"] == "adamw":
        return ""  # steps of one length, however near: the momentum swings beyond
    slow = 0.98 if _slow(case) else 0.7
    if len(seen[0].rows) < STEPS:  # it went on from a file, near already: a few steps in which messages begin anew
        slow = 1.5
    return "" if last <= slow * first else f"the distance to the optimum of all went from {first:.3g} to {last:.3g}"


LATE = ("replace", "replace one", "prune", "reparametrize")


def saved_is_validated(case: Case, seen: list[Seen]) -> str:
    """What stands in the module while it is validated is what the file of that moment has, on all workers.

    To rounding: the file's mean is summed anew, and an all-reduce adds in an order that depends on the place.
    """
    if case["evaluate"] == "own" or case.has("stop"):
        return ""
    for at, stage in ((at, stage) for at in seen[0].validated for stage in range(case.stages)):
        state = seen[stage].validated[at]  # of a stage its own part
        for name, value in seen[0].saved[at].items():
            if name in state and not _same(state[name], value):
                far = _largest(state[name].double() - value.double())
                return f"at batch {at} {name} was validated {far:.3g} from what was saved"
        for worker, one in enumerate(seen[stage :: case.stages]):
            for name in seen[stage].own:
                if name in state and not torch.equal(one.validated[at][name], state[name]):
                    return f"at batch {at} the model number {worker} validated another {name} than the first"
    return ""


def bytes_are_counted(case: Case, seen: list[Seen]) -> str:
    """What a strategy says it has sent is what torch was given to send; but for all-reduces, which torch shares out."""
    if case.has("resume", "stop"):
        return ""
    for worker, one in enumerate(seen):
        said, counted = one.sent_bytes
        sums_some = any(name in case["topology"] for name in MAY_SUM) or "coded" in case["states"]
        if not (counted <= said if sums_some else counted in (0, said)):
            return f"worker {worker} says that it sent {said} bytes and sent {counted}"
    return ""


def written_last(case: Case, seen: list[Seen]) -> str:
    """What a callback writes where training ends is what is handed back."""
    if not case.has("write at end"):
        return ""
    for worker, one in enumerate(seen):
        for name in _trained(one):
            if one.last[name].numel() and not bool((one.last[name] == WRITTEN_AT_END).all()):
                return f"worker {worker} hands back another {name} than a callback wrote when training ended"
    return ""


def resumed_is_whole(case: Case, seen: list[Seen]) -> str:
    """The run that goes on from a file ends as the one that wrote it, bit for bit."""
    # Gradients aren't in files: what waits for another optimizer's turn is coded with fewer neighbours.
    waits = case["optimizer"] in ("two", "turns") and case["method"] == "compressed"
    for worker, one in enumerate(seen):
        for name, value in one.resumed.items():
            far = _largest(value.double() - one.last[name].double())
            if not (torch.equal(value, one.last[name]) or (waits and far <= _may_miss(case, value))):
                return f"worker {worker} ends {far:.3g} off in {name} after it was resumed"
    return ""


CHECKS = (
    finite,
    healed_once,
    same_end,
    equal_replicas,
    written_last,
    sum_of_updates,
    met,
    nearer,
    saved_is_validated,
    resumed_is_whole,
    bytes_are_counted,
)


OF_SURVIVORS = (finite, same_end, written_last, nearer, saved_is_validated)
"""The mean is no more that of all updates."""


def _trained(one: Seen) -> list[str]:
    """Names of parameters as the model that is handed back has them, and had at the start."""
    return [name for name in one.last if name in one.first and name not in ("level", "least", "seen")]


def _codec(case: Case) -> str:
    """Of averaged gradients: pipelines send them as they are by default."""
    return "Plain()" if (case["method"], case["codec"]) == ("pipeline", "default") else case["codec"]


def _bends(case: Case) -> bool:
    """Whether the sum isn't that of the updates, or isn't known well enough."""
    lossy = case["method"] in ("compressed", "pipeline") and _codec(case) != "Plain()"
    nonlinear = (
        case["optimizer"] == "adamw" or case["clip"] != "none" or case.has("clamp") or case["codec"].startswith("TopK")
    )
    coded_states = case["states"] not in ("none", "-") and case["optimizer"] != "sgd"
    return any(rule in case["rule"] for rule in BENDS_UPDATES) or (lossy and nonlinear) or (coded_states and nonlinear)


def _bends_writes(case: Case) -> bool:
    """Whether what a callback adds isn't in the mean as it was added: a rule's momentum lengthens it as any update, and
    by push-sum it has a worker's weight."""
    lengthens = any(rule in case["rule"] for rule in ("Outer", "PseudoGradient", "QuasiGlobal"))
    return (lengthens and case.has("write")) or ("PushSum" in case["rule"] and case.has("write", "apart"))


def _may_miss(case: Case, like: Tensor) -> float:
    kind = torch.float32 if case["dtype"] == "several" and case["clip"] == "norm" else like.dtype  # the norm's
    twice = 2 if case["optimizer"] in ("two", "turns") or case.has("reparametrize") else 1  # gradients are so large
    twice *= 2 if case["shape"] == "tied" else 1
    size = TOLERANCE[torch.bfloat16 if case["precision"] == "bf16-true" else kind]
    if case["method"] not in ("compressed", "pipeline"):
        return size
    half = next((step for name, step in HALF_STEP.items() if _codec(case).startswith(name)), 0.0)
    momentum = {"momentum": 0.5, "two": 0.3, "turns": 0.3}.get(case["optimizer"], 0.0)
    twice *= 2 if case.has("refit") else 1  # each fit owes its own
    # What is owed at one rate is paid at another: half a rounding for each time that the rate falls or rises by all.
    twice *= 4 if case["schedule"] == "restarts" else 1
    return size + twice * OWED * half * LEARNING_RATE[case["optimizer"]] / (1 - momentum)


def _slow(case: Case) -> bool:
    """Whether too few or too small steps are taken to come far."""
    bends = any(rule in case["rule"] for rule in BENDS_UPDATES)
    small = case["clip"] != "none" or case["schedule"] != "none" or case["accumulate"] == "2"
    return bends or small or case["optimizer"] in ("adamw", "turns") or case["codec"].startswith(("TopK", "Int2"))


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max()) if difference.numel() else 0.0


def _same(a: Tensor, b: Tensor) -> bool:
    return (
        bool(a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=4 * torch.finfo(a.dtype).eps))
        if (a.is_floating_point())
        else torch.equal(a, b)
    )


def _norm(of: Named, names: Sequence[str]) -> float:
    return math.sqrt(sum(float(of[name].double().square().sum()) for name in names))


def _spread(values: Sequence[Tensor]) -> float:
    stacked = torch.stack([value.double() for value in values])
    return _largest(stacked - stacked.mean(0))


def _alike(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=True))


__all__ = ["Named", "refusal", "verdict"]
