"""Settings of a gossip run as text: topology, order, codec, bytes per step, bytes through a node's network card."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import view_as_real

from lightning_decentral.gossip.compute.link import cliques_of
from lightning_decentral.gossip.plan.planned_traffic import all_reduce_copies, copies_sent, copies_through_card
from lightning_decentral.gossip.plan.weights import consensus_steps, describe
from lightning_decentral.gossip.wire.consensus import Consensus
from lightning_decentral.gossip.wire.exchange import Traffic
from lightning_decentral.gossip.wire.optimizer_mixer import OptimizerMixer
from lightning_decentral.shared.introduction import adam_hint, traffic

if TYPE_CHECKING:
    import lightning_decentral.gossip.strategy as gossip

ORDERS = {0: "blocking (adapt-then-combine)", 1: "overlapped (adapt-while-combining)"}


@runtime_checkable
class Monitored(Protocol):
    """Interface of a strategy for the callbacks that watch it."""

    def traffic(self) -> Traffic:
        """This worker's counters (bytes, seconds, rounds) since fit began; no communication."""

    def consensus(self) -> Consensus:
        """Consensus error: the workers' distance from their mean; collective."""

    def summary(self) -> dict[str, str]:
        """Describe the settings: {topic: text}."""

    def rounds(self) -> list[int]:
        """Numbers of rounds taken, one number for each optimizer."""

    def mixing(self) -> dict[str, float]:
        """Mixing values of this worker (rate, delay, ...), as far as its rule and codec have them; no communication."""


@runtime_checkable
class Tracked(Protocol):
    """Interface of a strategy with settings that experiment loggers sort and group by."""

    def hyperparameters(self) -> dict[str, float | str]:
        """Settings for experiment loggers: {name: a number, or the name of a class}."""


def described(plan: "gossip.GossipStrategy", mixers: Iterable[OptimizerMixer]) -> dict[str, str]:
    """Describe the settings of a gossip run: {topic: text}."""
    mixers, size = list(mixers), plan.workers
    steps = consensus_steps(plan.topology, size, plan.weights)
    model_bytes, message_bytes = _bytes(plan, mixers)
    sent = _copies(plan) * message_bytes
    lines = {
        "workers": str(size) if plan.island.devices == 1 else _workers(plan),
        "topology": describe(plan.topology, size, plan.weights),
        "steps to exact consensus": "never exact" if steps is None else str(steps),
        "order": ORDERS.get(plan.delay, f"landed {plan.delay} updates later"),
        "codec": repr(plan.codec),
        "bytes per worker and step": f"{sent:,.0f} ({sent / max(model_bytes, 1):.3g} x the parameters)",
        "bytes through a node's card": through_card(plan, message_bytes, model_bytes),
        "evaluated": _evaluated(plan, mixers),
    }
    if size > 1:
        lines["a worker with NaN"] = healing(plan)
    if plan.states:
        lines["mixed states"] = ", ".join(_mixed_state(plan, name, mixers) for name in plan.states)
    hint = adam_hint(plan.optimizers, size, plan.lightning_module)
    return lines | ({"hint": hint} if hint else {})


def hyperparameters(plan: "gossip.GossipStrategy", mixers: Iterable[OptimizerMixer]) -> dict[str, float | str]:
    """Describe the settings for experiment loggers, which sort and group runs: numbers, and names of classes."""
    size, steps = plan.workers, consensus_steps(plan.topology, plan.workers, plan.weights)
    model_bytes, message_bytes = _bytes(plan, list(mixers))
    return {
        "workers": size,
        "devices_per_worker": plan.island.devices,
        "topology": plan.topology.label(size),
        **rules(plan),
        **({} if steps is None else {"steps_to_consensus": steps}),
        "model_bytes": model_bytes,
        "bytes_per_step": round(_copies(plan) * message_bytes),
    }


def rules(plan: Any) -> dict[str, float | str]:
    """Settings of a worker's round for loggers: names of codec, rule and weights, delay, evaluate, heals."""
    names = {name: type(getattr(plan, name)).__name__ for name in ("codec", "combine", "weights")}
    return {**names, "delay": plan.delay, "evaluate": plan.evaluate, "heals": plan.heals}


def introduced(plan: Any, mixers: Iterable[OptimizerMixer], evaluated: str = "") -> list[str]:
    """Describe the settings in a line, and a hint on Adam where it helps; nothing for a single worker. `evaluated`
    tells which model is evaluated, for a strategy of Fabric."""
    mixers, size = list(mixers), plan.workers
    if size == 1:
        return []
    model_bytes, message_bytes = _bytes(plan, mixers)
    messages = f"{type(plan.codec).__name__ if plan.codec.encodes else 'uncompressed'} messages"
    sent = traffic(_copies(plan) * message_bytes, model_bytes, size)
    line = (
        f"{_workers(plan)} on {plan.topology.label(size)}, {messages}, {sent}, "
        f"{evaluated or _evaluated(plan, mixers)} is evaluated"
    )
    return [f"gossip: {line}", *filter(None, [adam_hint(plan.optimizers, size, plan.lightning_module)])]


def _workers(plan: "gossip.GossipStrategy") -> str:
    return f"{plan.workers} workers" if plan.island.devices == 1 else f"{plan.workers} islands, each {plan.island!r}"


def _evaluated(plan: "gossip.GossipStrategy", mixers: Sequence[OptimizerMixer]) -> str:
    anchors = "' anchors" if plan.island.shards == 1 and any(each.mixer.shown() for each in mixers) else ""
    return f"the mean of the workers{anchors}" if plan.evaluate == "mean" else "each worker's own model"


def _bytes(plan: "gossip.GossipStrategy", mixers: Sequence[OptimizerMixer]) -> tuple[int, int]:
    """Bytes of the parameters, and bytes of a worker's message to another worker."""
    # Of the parameters: each device packs all of them, or one of the island's shards.
    model_bytes = sum(bucket.bytes for each in mixers for bucket in each.buckets) * plan.island.shards
    # Of a message, a part of it from each device. A round sends one fragment, about as many bytes as any other;
    # optimizer states are sent, too, from the first update on.
    fragments = len(plan.topology.fragments)
    of_device = sum(each.mixer.exchange.coder.bytes for each in mixers) * plan.combine.form.copies // fragments
    return model_bytes, of_device * plan.island.devices


def _copies(plan: "gossip.GossipStrategy") -> float:
    cliques = cliques_of(plan.codec, plan.combine, plan.topology, plan.weights, plan.workers)
    return copies_sent(plan.topology, plan.weights, plan.worker, plan.workers, cliques)


def _mixed_state(plan: "gossip.GossipStrategy", name: str, mixers: Sequence[OptimizerMixer]) -> str:
    """Describe a mixed optimizer state, and the bytes that a worker sends per step if all parameters have the state."""
    travel = plan.states[name]
    flats = [view_as_real(b.flat).view(-1) if b.flat.is_complex() else b.flat for each in mixers for b in each.buckets]
    # Each device of an island sends a part.
    message = sum(travel.codec.bytes(flat.numel(), flat.dtype) for flat in flats)
    along = travel.along(plan.topology)
    cliques = cliques_of(travel.codec, travel.combine, along, plan.weights, plan.workers)
    sent = copies_sent(along, plan.weights, plan.worker, plan.workers, cliques) * message
    return f"{name}: {travel}, up to {sent:,.0f} bytes a step"


def healing(plan: "gossip.GossipStrategy") -> str:
    """Describe what happens to a worker whose parameters contain NaN or infinity."""
    reason = "heals=0" if plan.heals == 0 else plan.combine.recovery.incurable
    if not plan.member.heals:
        reason = f"under NCCL the devices of {plan.island!r} don't check each other"
    return f"ends the training: {reason}" if reason else f"takes its neighbours' parameters, {plan.heals} times at most"


def through_card(plan: "gossip.GossipStrategy", message_bytes: float, model_bytes: float) -> str:
    """Describe the bytes that leave the busiest node by these settings, and by a ring all-reduce of the gradients."""
    if plan.num_nodes == 1:
        return "none, there is one node"
    shape = plan.topology, plan.weights, plan.workers, plan.workers_per_node
    cliques = cliques_of(plan.codec, plan.combine, *shape[:3])
    steps = copies_through_card(*shape, cliques)
    mean, most = sum(steps) / len(steps) * message_bytes, max(steps) * message_bytes
    reduced = all_reduce_copies(plan.num_nodes * plan.num_processes, plan.num_processes) * model_bytes
    return f"{mean:,.0f} a step, at most {most:,.0f} (all-reduce: {reduced:,.0f})"
