"""Candidates of a plan: training methods, each as command-line overrides of `recipes/train.py`.

The overrides are the only place where a candidate is written. So the recommended method can be trained as printed, and
any other overrides can be added to the comparison. `forecasts` makes forecasts of them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from lightning_decentral.shared.compute.codec.codec import BFloat16, Codec
from lightning_decentral.shared.compute.codec.quantize import Int4, Int8
from lightning_decentral.shared.plan.forecast import Cluster
from lightning_decentral.shared.plan.known_losses import KnownLosses
from lightning_decentral.shared.plan.profile import Model

BASELINE = "strategy=ddp"
DDP = (BASELINE, "strategy=ddp_fp16")
WHOLE_THEN_HALF = "the first quarter whole, then half the depth in every other step"
MOMENTUM_IN_INT8 = (
    "strategy.states={momentum_buffer:{_target_:lightning_decentral.gossip.Travel,"
    "codec:{_target_:lightning_decentral.gossip.Int8}}}"
)
STREAM = "strategy=gossip strategy/topology=stream"
OUTER = "strategy.combine.lr=null strategy.combine.momentum=null"
"""Overrides by which learning rate and momentum follow the numbers of workers and of local steps."""
DEFAULTS = {"gossip": ("strategy/codec=plain", "strategy/combine=gossip"), "compressed": ("strategy/codec=int8",)}


@dataclass(frozen=True)
class Candidate:
    """Candidate of a plan: a method of training."""

    overrides: str  # overrides of the command line, one string
    title: str  # name in tables
    remark: str = ""  # note on the forecast


def candidates(cluster: Cluster, model: Model, slices: int = 1) -> Iterator[Candidate]:
    """Yield the candidates, those that mix most first: of equally fast candidates the first is recommended."""
    timed = {work.codec for work in model.rounds}
    int8, int4 = _remark(Int8(), timed), _remark(Int4(), timed)
    per_node, several = cluster.per_node, 1 < cluster.per_node < cluster.workers
    everyone = f"strategy=gossip strategy/island=fully_shard strategy.island.devices={cluster.workers}"
    yield Candidate(BASELINE, "ddp")
    yield Candidate("strategy=compressed", "compressed, int8", int8)
    yield Candidate("strategy=compressed strategy/codec=int4", "compressed, int4", int4)
    yield Candidate(everyone, "sharded over all")
    yield from _pipelines(cluster, model.batch, slices)
    yield Candidate("strategy=gossip strategy.delay=0", "gossip, blocking")
    yield Candidate("strategy=gossip", "gossip")
    for name, title in (("all_reduce", "replica islands"), ("fully_shard", "shard islands")):
        if several:
            island = f"strategy/island={name} strategy.island.devices={per_node}"
            yield Candidate(f"strategy=gossip {island}", f"gossip, {title}")
    for name, title in (("exponential", "exponential"), ("one_peer_exponential", "one-peer"), ("ring", "ring")):
        yield Candidate(f"strategy=gossip strategy/topology={name}", f"gossip, {title}")
    for name, codec in (("bfloat16", BFloat16()), ("int8", Int8())):
        yield Candidate(f"strategy=gossip strategy/codec={name}", f"gossip, {name}", _remark(codec, timed))
    if "momentum_buffer" in dict(model.states):
        overrides = f"strategy=gossip strategy/codec=int8 {MOMENTUM_IN_INT8}"
        yield Candidate(overrides, "gossip, int8, momentum too", int8)
    if several:
        island = f"strategy/island=all_reduce strategy.island.devices={per_node}"
        overrides = f"strategy=gossip {island} strategy/codec=int8"
        yield Candidate(overrides, "gossip, islands, int8", int8)
    for steps, delay in ((4, 4), (8, 1)):
        overrides = f"strategy=gossip strategy/topology=every strategy.topology.steps={steps} strategy.delay={delay}"
        yield Candidate(overrides, f"gossip every {steps}, delay {delay}")
    yield Candidate(f"{STREAM} strategy/combine=outer_nesterov {OUTER}", "streamed outer rounds")
    overrides = f"{STREAM} strategy/combine=pseudo_gradient strategy/codec=int4 {OUTER}"
    yield Candidate(overrides, "streamed outer rounds, int4", int4)
    yield Candidate("strategy=partial_backprop", "partial backprop", WHOLE_THEN_HALF)


def _remark(codec: Codec, timed: Collection[str]) -> str:
    """Remark for a codec that no round of the profile was measured with; empty otherwise."""
    return "" if repr(codec) in timed else "the codec's seconds are those of one CPU thread: profile again for yours"


def _pipelines(cluster: Cluster, batch: int, slices: int) -> Iterator[Candidate]:
    """Yield pipelines: one on each node, or one over all nodes."""
    stages = cluster.per_node if cluster.per_node > 1 else cluster.workers
    if stages > 1:
        cut = f"strategy.stages={stages} strategy.microbatches={stages} strategy/slicing=uniform"
        overrides = f"strategy=token_pipeline {cut} strategy.slicing.n={slices} data.batch_size={batch * stages}"
        yield Candidate(overrides, f"pipelines of {stages}", remark="each takes the batches of its devices")


def measured(known: KnownLosses) -> Iterator[Candidate]:
    """Return the candidates whose batches to the loss were measured."""
    return (Candidate(overrides, method) for method, overrides in known.overrides.items())


def is_ddp(overrides: str) -> bool:
    """Return whether the overrides train with a form of `ddp`."""
    return any(one in DDP for one in overrides.split())


def in_full(overrides: str) -> list[str]:
    """Overrides of a candidate, with the strategy's default codec and rule written out."""
    given = overrides.split()
    chosen = next((one.partition("=")[2] for one in given if one.startswith("strategy=")), "")
    named = {one.partition("=")[0] for one in given}
    return [*given, *(one for one in DEFAULTS.get(chosen, ()) if one.partition("=")[0] not in named)]
