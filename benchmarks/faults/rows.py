"""The catalogue: each fault, the strategy that it is done to, and which ends are right."""

from collections.abc import Iterator, Sequence
from typing import Any

from faults import alone, files, pipelines, places, settings
from faults.kinds import (
    MOMENTS,
    changed,
    fail,
    hook,
    interrupt,
    kill,
    on,
    poison,
    slow,
    stop,
    strategy,
    terminate,
)
from faults.row import EITHER, METHODS, Row, struck
from faults.runs import GOES_ON, LINE
from lightning_decentral.gossip import (
    Complete,
    Every,
    ExactDiffusion,
    Exponential,
    GradientTracking,
    Int4,
    PseudoGradient,
    PushSum,
    RelaySum,
    Tree,
)

# ---- ends of a worker ------------------------------------------------------------------------------------------------

LATER = ("as the fit starts", "in a step", "before an update", "in validation", "as it saves", "as the fit ends")


def ends() -> Iterator[Row]:
    for method in METHODS:
        moments = (
            list(MOMENTS) if method == "gossip" else ["as groups are made", "in a step", "in validation", "as it saves"]
        )
        for moment in moments:
            size = 3 if method == "gossip" else 2
            late = EITHER if moment == "as the fit ends" else (LINE,)
            for act, name in ((kill, "killed"), (stop, "stopped (SIGSTOP)"), (fail, "raises")):
                if act is fail and moment == "as groups are made":
                    continue
                faults = [on(1, MOMENTS[moment](act))]
                yield struck("a worker ends", f"worker 1 {name} {moment}", method, faults, (1,), late, size)
    yield struck(
        "a worker ends", "worker 0 killed in a step", "gossip", [on(0, MOMENTS["in a step"](kill))], (0,), (LINE,), 3
    )


LONG = changed(trainer={"max_epochs": 1000})


def stops() -> Iterator[Row]:
    for method in METHODS:
        one = [on(1, MOMENTS["in a step"](interrupt))]
        yield struck("a run is stopped", "Ctrl-C at worker 1", method, one, (), (LINE,))
        yield struck("a run is stopped", "Ctrl-C at all", method, [MOMENTS["in a step"](interrupt)], (), (LINE,))
        one = [LONG, slow(0.1), on(1, MOMENTS["in a step"](terminate))]
        yield struck("a run is stopped", "SIGTERM at worker 1, steps of 0.1 s", method, one, (), (LINE,))
    long = [LONG, slow(3.0), on(1, hook("on_train_batch_start", 1)(terminate))]
    yield struck("a run is stopped", "SIGTERM at worker 1, steps of 3 s", "gossip", long, (), (LINE,))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def numbers() -> Iterator[Row]:
    moments = {
        "before an update": hook("on_before_optimizer_step", 6),
        "after an update": hook("on_train_batch_end", 6),
        "before validation": hook("on_train_batch_end", 4),
        "just before a save": hook("on_save_checkpoint", 4),
    }
    for value in (float("nan"), float("inf"), 1e30):
        for where in ("parameter", "buffer"):
            for moment, at in moments.items():
                faults = [on(1, at(poison(value, where)))]
                yield struck("numbers", f"{value:g} in a {where} of worker 1 {moment}", "gossip", faults, size=3)
        for method in ("partial_backprop", "token_pipeline", "compressed"):
            faults = [on(1, moments["before an update"](poison(value, "parameter")))]
            yield struck("numbers", f"{value:g} in a parameter of worker 1 before an update", method, faults)


def under_rules() -> Iterator[Row]:
    plans: Sequence[dict[str, Any]] = (
        {"combine": PushSum(), "topology": Exponential()},
        {"combine": ExactDiffusion()},
        {"combine": GradientTracking(), "topology": Exponential()},
        {"combine": RelaySum(), "topology": Tree()},
        {"combine": PseudoGradient(), "topology": Every(2, Complete()), "codec": Int4()},
    )
    for plan in plans:
        faults = [strategy(**plan), on(1, hook("on_before_optimizer_step", 6)(poison(float("nan"), "parameter")))]
        fault = f"nan in a parameter of worker 1 before an update, {type(plan['combine']).__name__}"
        yield struck("numbers", fault, "gossip", faults, due=(GOES_ON,), size=3)


def rows() -> list[Row]:
    """Return the rows of all groups."""
    others = files, settings, places, alone
    return [
        *ends(),
        *pipelines.rows(),
        *stops(),
        *numbers(),
        *under_rules(),
        *(row for module in others for row in module.rows()),
    ]
