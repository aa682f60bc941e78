"""Candidates of a plan: words of the command line of `recipes/train.py`, and forecasts of the strategies they make.

The words are the only place where a candidate is written. So whatever wins can be trained as printed, and any other
words can join the comparison.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache, singledispatch

import torch
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning.pytorch.strategies import DDPStrategy, Strategy
from omegaconf.errors import OmegaConfBaseException

from lightning_decentral.compressed.plan.forecast import CompressedForecast
from lightning_decentral.compressed.strategy import CompressedStrategy
from lightning_decentral.gossip.plan.forecast import PLAIN, Encoding, GossipForecast
from lightning_decentral.gossip.plan.island_cost import Alone, ReplicatedCost, Shards, Within
from lightning_decentral.gossip.strategy import GossipStrategy
from lightning_decentral.gossip.wire.island import AllReduce, FullyShard, Island
from lightning_decentral.partial.plan.forecast import PartialForecast
from lightning_decentral.partial.strategy import PartialBackpropStrategy
from lightning_decentral.pipeline.compute.activation_codec import ExactActivations
from lightning_decentral.pipeline.compute.stage import Keep
from lightning_decentral.pipeline.plan.forecast import Pipelining
from lightning_decentral.pipeline.plan.slicing import Balanced, Planned, Uniform
from lightning_decentral.pipeline.strategy import TokenPipelineStrategy
from lightning_decentral.shared.compute.codec.codec import Codec, MessageLayout
from lightning_decentral.shared.compute.codec.difference import DifferenceCompression
from lightning_decentral.shared.compute.codec.quantize import BFloat16, Float16, Int8, Plain
from lightning_decentral.shared.plan.data_parallel import BUCKET_BYTES, DataParallel, ShardedForecast
from lightning_decentral.shared.plan.forecast import Cluster, Method
from lightning_decentral.shared.plan.profile import Model, RoundWork
from lightning_decentral.shared.wire.pipeline_replicas import AverageGradients

BASELINE = "strategy=ddp"
WHOLE_THEN_HALF = "the first quarter whole, then half the depth in every other step"
PARAMETER_BYTES = 4  # of an element of a message: codecs are told float32
# (send, hear) per byte of parameters on one CPU thread: benchmarks/results/codec-2-cores.json.
CODEC_SECONDS_PER_BYTE = {
    BFloat16: (0.093e-9, 0.185e-9),
    Float16: (0.089e-9, 0.184e-9),
    Int8: (0.413e-9, 0.22e-9),
    DifferenceCompression: (1.16e-9, 0.276e-9),  # of Int8; others are slower to send
}

# One island of all devices has nobody to gossip with.
ALONE: dict[type[Within], Method] = {ReplicatedCost: DataParallel(), Shards: ShardedForecast()}


@dataclass(frozen=True)
class Candidate:
    """A way to train.

    Args:
        words: of the command line.
        title: for tables.
        remark: what a reader must know of the number.
    """

    words: str
    title: str
    remark: str = ""


def candidates(cluster: Cluster, model: Model, slices: int = 1) -> Iterator[Candidate]:
    """From the one that mixes most to the one that mixes least: of equally fast ones the first is recommended."""
    timed = {work.codec for work in model.rounds}
    per_node, several = cluster.per_node, 1 < cluster.per_node < cluster.workers
    everyone = f"strategy=gossip strategy/island=fully_shard strategy.island.devices={cluster.workers}"
    yield Candidate(BASELINE, "ddp")
    yield Candidate("strategy=compressed", "compressed, int8", _remark(Int8(), timed))
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
    if several:
        island = f"strategy/island=all_reduce strategy.island.devices={per_node}"
        words = f"strategy=gossip {island} strategy/codec=int8"
        yield Candidate(words, "gossip, islands, int8", _remark(Int8(), timed))
    for steps, delay in ((4, 4), (8, 1)):
        words = f"strategy=gossip strategy/topology=every strategy.topology.steps={steps} strategy.delay={delay}"
        yield Candidate(words, f"gossip every {steps}, delay {delay}")
    yield Candidate("strategy=partial_backprop", "partial backprop", WHOLE_THEN_HALF)


def _remark(codec: Codec, timed: Collection[str]) -> str:
    """On a profile that no round with this codec was measured for."""
    return "" if repr(codec) in timed else "the codec's seconds are those of one CPU thread: profile again for yours"


def _pipelines(cluster: Cluster, batch: int, slices: int) -> Iterator[Candidate]:
    """One pipeline on each node, or over all."""
    stages = cluster.per_node if cluster.per_node > 1 else cluster.workers
    cut = (
        f"strategy.stages={stages} strategy.microbatches={stages} strategy/slicing=uniform strategy.slicing.n={slices}"
    )
    if stages > 1:
        words = f"strategy=token_pipeline {cut} data.batch_size={batch * stages}"
        yield Candidate(words, f"pipelines of {stages}", remark="each takes the batches of its devices")


# ---- from words to forecasts ------------------------------------------------------------------------------------


@lru_cache(maxsize=256)  # a map of clusters asks for the same words in every cell, and composing takes long
def strategy_of(words: str) -> Strategy:
    """What these words make.

    Raises:
        ValueError: they name something that isn't there.
    """
    named = [word for word in words.split() if word.startswith("strategy=")]
    others = [word for word in words.split() if word.lstrip("+~").startswith(("strategy/", "strategy."))]
    if len(named) != 1:
        raise ValueError(f"{words!r} must have one word strategy=..., such as strategy=gossip strategy/topology=ring")
    try:
        with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
            cfg = compose(f"strategy/{named[0].partition('=')[2]}", others)
        strategy: Strategy = instantiate(cfg.strategy, _convert_="all")
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{words!r} can't be composed: {' '.join(str(error).split())}") from None
    return strategy


@singledispatch
def method_of(strategy: object, cluster: Cluster, slices: int) -> Method:
    """The forecast of a strategy.

    Raises:
        ValueError: there is none, or the strategy can't serve the cluster.
    """
    raise ValueError(f"there is no forecast for {type(strategy).__name__}: use one of this package's strategies or ddp")


@method_of.register
def _(strategy: DDPStrategy, cluster: Cluster, slices: int) -> Method:
    asked = strategy._ddp_kwargs.get("bucket_cap_mb")
    return DataParallel() if asked is None else DataParallel(bucket_bytes=int(asked * 2**20))


@method_of.register
def _(strategy: CompressedStrategy, cluster: Cluster, slices: int) -> Method:
    if not strategy.codec.encodes:
        return DataParallel(strategy.bucket_bytes or BUCKET_BYTES)
    encoding = encoding_of(strategy.codec)
    return CompressedForecast(strategy.bucket_bytes, encoding.wire_bytes, encoding.work)


@method_of.register
def _(strategy: GossipStrategy, cluster: Cluster, slices: int) -> Method:
    within = within_of(strategy.island)
    workers = strategy.island.workers(cluster.workers, cluster.per_node)
    topology = strategy.topology.placed(max(1, cluster.per_node // within.devices))
    strategy.combine.check(topology, workers, strategy.weights, strategy.delay)
    if workers == 1 and within.devices > 1:
        return ALONE[type(within)]
    encoding = encoding_of(strategy.codec, strategy.combine.copies)
    return GossipForecast(topology, strategy.delay, strategy.weights, encoding, within)


@method_of.register
def _(strategy: PartialBackpropStrategy, cluster: Cluster, slices: int) -> Method:
    _refuse_unread("strategy.cuts", strategy.cuts, "auto")
    return PartialForecast(strategy.depth)


@method_of.register
def _(strategy: TokenPipelineStrategy, cluster: Cluster, slices: int) -> Method:
    _refuse_unread("strategy/replicas", strategy.replicas, AverageGradients())
    _refuse_unread("strategy/activations", strategy.activations, Keep())
    _refuse_unread("strategy/boundary", strategy.boundary, ExactActivations())
    own = slices_of(strategy.slicing, slices)
    return Pipelining(strategy.stages, strategy.microbatches, own, strategy.schedule, strategy.partition)


def _refuse_unread(option: str, asked: object, read: object) -> None:
    """ValueError for what would change a step and no forecast knows."""
    if asked != read:
        raise ValueError(f"no forecast reads {option} {asked}: it is predicted as {read} only, so leave the word out")


@singledispatch
def slices_of(slicing: object, slices: int) -> int:
    """How many a sequence is cut into.

    Raises:
        ValueError: their lengths are given.
    """
    raise ValueError(f"no forecast reads strategy/slicing {slicing}: take uniform with strategy.slicing.n={slices}")


@slices_of.register(Planned)
@slices_of.register(type(None))
def _(slicing: Planned | None, slices: int) -> int:
    return slices  # measured when the training starts


@slices_of.register(Uniform)
@slices_of.register(Balanced)
def _(slicing: Uniform | Balanced, slices: int) -> int:
    return slicing.n


@singledispatch
def within_of(island: Island) -> Within:
    """What an island's devices do."""
    return Alone(island.devices)


@within_of.register
def _(island: AllReduce) -> Within:
    _refuse_unread("strategy.island.codec", island.codec, Plain())
    return ReplicatedCost(island.devices)


@within_of.register
def _(island: FullyShard) -> Within:
    return Shards(island.devices)


def encoding_of(codec: Codec, copies: float = 1) -> Encoding:
    """Bytes by the codec's own formula for float32, matrices unknown; where the profile has no seconds of its own for
    the codec, those measured on a CPU on top of what messages as they are take, else none."""
    if not codec.encodes:
        return PLAIN if copies == 1 else Encoding(wire_bytes=lambda size: copies * size, copies=copies)

    def wire_bytes(size: float) -> float:
        return copies * codec.bytes(MessageLayout(max(1, int(size) // PARAMETER_BYTES)), torch.float32)

    assumed = RoundWork(repr(codec), *CODEC_SECONDS_PER_BYTE.get(type(codec), (0.0, 0.0)))
    return Encoding(repr(codec), wire_bytes, assumed, copies, peers_only=True)
