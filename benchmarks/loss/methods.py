"""The methods of `loss/per_second.py`, and what each is tuned over.

Words are Hydra's, and `hook=`, `accumulate=`, `peer=` of the benchmark itself (`network/accuracy_worker.py`).
"""

from math import isfinite
from typing import Any

from network.accuracy import INT8

ADAMW, MUON = ["strategy=ddp", "optimizer.lr=6e-3"], ["strategy=ddp", "optimizer=muon"]
ACCUM = ["strategy=ddp", "optimizer=accum_adamw"]
DIFFERENCES = ["strategy/codec=difference_compression", "strategy/codec@strategy.codec.inner=int4"]


def streamed(steps: int) -> list[str]:
    """A fragment of the model in each step, all in so many."""
    each = [f"strategy.topology.steps={steps}", f"strategy.topology.parts={steps}"]
    return ["strategy/topology=stream", *each, "strategy.delay=1", "optimizer.momentum=0.9"]


FOUR = ["hook=fp16", "accumulate=4"]
SHARED = "+strategy/codec@strategy.orthogonal=int8"
TORCHFT, DECENT_DP = ["strategy._target_=loss.peers.Apart", "peer=torchft"], ["peer=decent_dp"]
METHODS = {
    "ddp": ADAMW,
    "ddp, AccumAdamW": ACCUM,
    "ddp, fp16 hook": [*ADAMW, "hook=fp16"],
    "ddp, PowerSGD": ["strategy=ddp", "optimizer.lr=3e-3", "hook=powersgd"],
    "ddp, Muon": MUON,
    "ddp, Muon, fp16 hook": [*MUON, "hook=fp16"],
    "ddp, Muon, fp16 hook, small buckets": [*MUON, "hook=fp16", "+strategy.bucket_cap_mb=0.2"],
    "ddp, Muon, PowerSGD": [*MUON, "hook=powersgd"],
    "ddp, AccumAdamW, fp16 hook": [*ACCUM, "hook=fp16"],
    "ddp, fp16 hook, accumulating 4": [*ADAMW, *FOUR],
    "ddp, Muon, fp16 hook, accumulating 4": [*MUON, *FOUR],
    "torchft's DiLoCo": [*ADAMW, *TORCHFT, "optimizer.lr=3e-3"],
    "torchft's DiLoCo, Muon": [*MUON, *TORCHFT],
    "decent-dp, AccumAdamW": [*ACCUM, *DECENT_DP],
    "gossip, int8, AccumAdamW": [*INT8, "optimizer=accum_adamw"],
    "gossip, int8, Muon": ["experiment=gossip_muon"],
    "gossip, int8, Muon and its momentum": ["experiment=gossip_muon_momentum"],
    "gossip, int4 differences, Muon": ["experiment=gossip_muon", *DIFFERENCES, "optimizer.lr=3e-2"],
    "compressed, int8, Muon": ["experiment=compressed_muon"],
    "compressed, int8, Muon, small buckets": ["experiment=compressed_muon", "+strategy.bucket_bytes=200000"],
    "compressed, int8, Muon shared out": ["experiment=compressed_muon", SHARED],
    "compressed, int4, Muon": [
        *["experiment=compressed_muon", "strategy/codec=int4", "optimizer.lr=3e-2", "optimizer.momentum=0.9"],
    ],
    "compressed, int4, Muon, small buckets": [
        *["experiment=compressed_muon", "strategy/codec=int4", "optimizer.lr=3e-2", "optimizer.momentum=0.9"],
        "+strategy.bucket_bytes=200000",
    ],
    "outer rounds of 8, int4, Muon": ["experiment=outer_muon"],
    "streamed outer rounds of 8, int4, Muon": ["experiment=outer_muon", *streamed(8)],
    "outer rounds of 4, int4, Muon": ["experiment=outer_muon", "strategy.topology.steps=4"],
    "outer rounds of 4, int4, AccumAdamW": [
        *["experiment=outer_muon", "strategy.topology.steps=4", "optimizer=accum_adamw", "optimizer.lr=3e-3"],
    ],
    "streamed outer rounds of 2, int4, Muon": [
        *["experiment=outer_muon", *streamed(2), "strategy.combine.lr=0.8", "strategy.combine.momentum=0.3"],
    ],
}
"""The first form of `ddp` is what the others are compared with."""

RATES = {"adamw": (1.5e-3, 3e-3, 6e-3, 1.2e-2), "muon": (1e-2, 2e-2, 3e-2, 4e-2)}
MOMENTA = {"adamw": (0.9,), "muon": (0.8, 0.9, 0.95)}
LIKE = (", fp16 hook", " shared out", ", small buckets")
"""In the names of what takes the rate of the same method without: losses are its, but for rounding."""
OWN = ("accumulating", "PowerSGD")
"""In the names of what loses more than by rounding, and is tuned by itself; where it wasn't, it takes those, too."""


def family(method: str) -> str:
    """Return the family of its optimizer, over which rates and momenta are tuned."""
    return "muon" if "Muon" in method else "adamw"


def plain(method: str) -> str:
    """The same without a hook, or without sharing out."""
    words = (*LIKE, *(f", {word}" for word in OWN))
    return next((method[: method.index(word)] for word in words if word in method), method)


def tuned_alone(method: str) -> bool:
    """Return whether its rate and momentum are tuned for itself, and no other method's serve."""
    return plain(method) == method or any(word in method for word in OWN)


def best(runs: dict[str, float]) -> dict[str, tuple[float, float, float]]:
    """{method: (loss, rate, momentum)}, the lowest of each, from {"method | rate | momentum": loss}."""
    found: dict[str, tuple[float, float, float]] = {}
    for name, reached in ((name, reached) for name, reached in runs.items() if isfinite(reached)):
        method, rate, momentum = name.split(" | ")
        found[method] = min(found.get(method, (float("inf"), 0.0, 0.0)), (reached, float(rate), float(momentum)))
    return found


def tuned(runs: dict[str, Any]) -> dict[str, list[str]]:
    """{method: overrides of its best rate and momentum}; what wasn't tuned takes those of the same method without a
    hook.

    Raises:
        ValueError: of a method a part of the grid has run.
    """
    chosen, found = best(runs), {}
    for method in chosen:
        wanted, ran = len(RATES[family(method)]) * len(MOMENTA[family(method)]), f"{method} | "
        if sum(name.startswith(ran) for name in runs) != wanted:
            raise ValueError(f"{method} isn't tuned to the end, {wanted} runs: run benchmarks/loss.py tuning first")
    for method in METHODS:
        if (source := method if method in chosen else plain(method)) in chosen:
            _, rate, momentum = chosen[source]
            own = [f"optimizer.momentum={momentum:g}"] if family(method) == "muon" else []
            found[method] = [f"optimizer.lr={rate:g}", *own]
    return found
