"""Forecasts of strategies: from command-line overrides of `recipes/train.py` to the costs of a step."""

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
from lightning_decentral.gossip.compute.combine.combine import Combine, Rule
from lightning_decentral.gossip.compute.combine.consensus_control import ConsensusControl
from lightning_decentral.gossip.compute.link import cliques_of
from lightning_decentral.gossip.island import AllReduce, FullyShard, Island
from lightning_decentral.gossip.plan.forecast import GossipForecast
from lightning_decentral.gossip.plan.planned_traffic import Cliques
from lightning_decentral.gossip.plan.step_costs import (
    PLAIN,
    Alone,
    Encoding,
    ReplicatedCost,
    ShardedCost,
    StateMessage,
    Within,
)
from lightning_decentral.gossip.plan.topology.topology import Topology, audiences, step_graph
from lightning_decentral.gossip.plan.warm_start import WarmStarted
from lightning_decentral.gossip.strategy import GossipStrategy
from lightning_decentral.partial.plan.forecast import PartialForecast
from lightning_decentral.partial.strategy import PartialBackpropStrategy
from lightning_decentral.pipeline.compute.stage import Keep
from lightning_decentral.pipeline.plan.forecast import Pipelining
from lightning_decentral.pipeline.plan.slicing import Balanced, Planned, Uniform
from lightning_decentral.pipeline.strategy import TokenPipelineStrategy
from lightning_decentral.pipeline.wire.executor import ExactActivations
from lightning_decentral.shared.compute.codec.codec import BFloat16, Codec, Float16, Float32, Plain
from lightning_decentral.shared.compute.codec.quantize import Int2, Int4, Int8
from lightning_decentral.shared.compute.codec.topk import DifferenceCompression
from lightning_decentral.shared.plan.data_parallel import BUCKET_BYTES, DataParallel, ShardedForecast
from lightning_decentral.shared.plan.forecast import Cluster, Method
from lightning_decentral.shared.plan.profile import RoundWork
from lightning_decentral.shared.wire.pipeline_replicas import AverageGradients

PARAMETER_BYTES = 4  # bytes of an element of a message: codecs assume float32
# (send, receive) per byte of parameters on one CPU thread: benchmarks/results/codec-2-cores.json. For codecs of four
# and two bits they include the differences, which take longer than the codes by themselves.
CODEC_SECONDS_PER_BYTE: dict[Codec, tuple[float, float]] = {
    BFloat16(): (0.117e-9, 0.075e-9),
    Float16(): (0.129e-9, 0.077e-9),
    Int8(): (0.3e-9, 0.098e-9),
    Int4(): (0.882e-9, 0.352e-9),
    Int2(): (0.845e-9, 0.421e-9),
    DifferenceCompression(Int8()): (0.697e-9, 0.252e-9),
    DifferenceCompression(Int4()): (0.882e-9, 0.352e-9),
    DifferenceCompression(Int2()): (0.845e-9, 0.421e-9),
}

HALF_PRECISION = "fp16_compress_hook", "bf16_compress_hook"  # optimizers of torch, by name


@dataclass(frozen=True)
class Composed:
    """Strategy and optimizer composed from overrides of `recipes/train.py`; `optimizer` is empty if not given."""

    strategy: Strategy
    optimizer: str = ""
    accumulated: int = 1


@lru_cache(maxsize=256)  # cached: composing takes long, and a map of clusters has the same overrides in every cell
def composed(overrides: str) -> Composed:
    """Compose overrides to a strategy and an optimizer. ValueError: an override names something that doesn't exist."""
    arguments = overrides.split()
    chosen = {key: value for key, _, value in (one.partition("=") for one in arguments)}
    whole = "experiment" in chosen  # the configuration chooses a strategy and an optimizer
    if not whole and sum(one.startswith("strategy=") for one in arguments) != 1:
        raise ValueError(f"{overrides!r} must have one strategy=..., such as strategy=gossip strategy/topology=ring")
    others = [one for one in arguments if one.lstrip("+~").startswith(("strategy/", "strategy."))]
    config, given = ("train", arguments) if whole else (f"strategy/{chosen['strategy']}", others)
    try:
        with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
            cfg = compose(config, given, return_hydra_config=whole)
        optimizer = cfg.hydra.runtime.choices.optimizer if whole else chosen.get("optimizer", "")
        strategy: Strategy = instantiate(cfg.strategy, _convert_="all")
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{overrides!r} can't be composed: {' '.join(str(error).split())}") from None
    return Composed(strategy, optimizer, int(chosen.get("trainer.accumulate_grad_batches", 1)))


def strategy_of(overrides: str) -> Strategy:
    return composed(overrides).strategy


@singledispatch
def method_of(strategy: object, cluster: Cluster, slices: int) -> Method:
    """Make the forecast of a strategy. ValueError: the strategy has no forecast, or can't serve the cluster."""
    raise ValueError(f"there is no forecast for {type(strategy).__name__}: use one of this package's strategies or ddp")


@method_of.register
def _(strategy: DDPStrategy, cluster: Cluster, slices: int) -> Method:
    asked, hook = strategy._ddp_kwargs.get("bucket_cap_mb"), strategy._ddp_comm_hook
    if hook is not None and getattr(hook, "__name__", "") not in HALF_PRECISION:
        raise ValueError(f"no forecast reads the hook {hook}: leave it out, or take strategy=ddp_fp16")
    return DataParallel(BUCKET_BYTES if asked is None else int(asked * 2**20), sent=0.5 if hook else 1.0)


@method_of.register
def _(strategy: CompressedStrategy, cluster: Cluster, slices: int) -> Method:
    if not strategy.codec.encodes:
        return DataParallel(strategy.bucket_bytes or BUCKET_BYTES)
    encoding = encoding_of(strategy.codec)
    return CompressedForecast(strategy.bucket_bytes, encoding.wire_bytes, encoding.work)


@method_of.register
def _(strategy: GossipStrategy, cluster: Cluster, slices: int) -> Method:
    within = within_of(strategy.island)
    workers, part = strategy.island.workers(cluster.workers, cluster.per_node), cluster.simulated
    topology = strategy.topology.placed(max(1, cluster.per_node // within.devices))
    if workers == 1 and within.devices > 1:
        # A single island of all devices has no neighbours.
        return ShardedForecast() if isinstance(within, ShardedCost) else DataParallel()
    workers = strategy.island.workers(part.workers, part.per_node)
    for fragment in topology.fragments:
        strategy.combine.check(fragment, workers, strategy.weights, strategy.delay)
    states = strategy.states.items()
    for _, travel in states:
        travel.check(topology, workers, strategy.weights, strategy.delay)
    cliques = cliques_of(strategy.codec, strategy.combine, topology, strategy.weights, workers)
    messages = [
        StateMessage(name, travel.along(topology), encoding_of(travel.codec, travel.combine.form.copies))
        for name, travel in states
    ]
    encoding = encoding_of(strategy.codec, strategy.combine.form.copies, cliques)
    kept = kept_by(strategy.combine) + estimates(strategy.codec, topology, workers)
    given = topology, strategy.delay, strategy.weights, encoding, within, tuple(messages), kept
    forecast = GossipForecast(*given)
    # A whole number of exact steps isn't converted to a share: a forecast doesn't know the length of the run.
    return WarmStarted(strategy.exact_steps, forecast) if 0 < strategy.exact_steps < 1 else forecast


def kept_by(combine: Rule) -> int:
    """Copies of the parameters in a rule's state, counted on a sample state."""
    if isinstance(combine, ConsensusControl):
        return kept_by(combine.inner)
    assert isinstance(combine, Combine), f"{combine!r} is no rule"
    some = torch.zeros(1024)
    return round(sum(state.numel() for state in combine.init(some).values()) / len(some))


def estimates(codec: Codec, topology: Topology, workers: int) -> int:
    """Copies of the parameters that a codec of differences keeps, on the worker with the most: one for each audience
    and each source of a period."""
    if not codec.remembers:
        return 0
    steps, ranks = range(topology.period(workers)), range(workers)
    sources = [{j for step in steps for j in step_graph(topology, workers, step).sources[rank]} for rank in ranks]
    return max(len(sources[rank]) + len(set(audiences(topology, rank, workers).values())) for rank in ranks)


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
    """Raise ValueError for an option that changes a step and that forecasts don't model."""
    if asked != read:
        raise ValueError(f"no forecast reads {option} {asked}: it is predicted as {read} only, so leave it out")


def slices_of(slicing: object, slices: int) -> int:
    """Number of slices that a sequence is cut into. ValueError: their lengths are given."""
    match slicing:
        case None | Planned():
            return slices  # measured costs are known only when the training starts
        case Uniform() | Balanced():
            return slicing.n
    raise ValueError(f"no forecast reads strategy/slicing {slicing}: take uniform with strategy.slicing.n={slices}")


def within_of(island: Island) -> Within:
    match island:
        case AllReduce():
            _refuse_unread("strategy.island.codec", island.codec, Plain())
            return ReplicatedCost(island.devices)
        case FullyShard():
            return ShardedCost(island.devices)
    return Alone(island.devices)


def encoding_of(codec: Codec, copies: float = 1, cliques: Cliques = Cliques.PEERS) -> Encoding:
    """Make the costs of a codec: bytes by its own formula for float32. If the profile has no seconds for it, those
    measured on a CPU are added to the seconds of unencoded messages; an unknown codec takes as long as the slowest.
    `cliques`: `link.cliques_of`."""
    if not codec.encodes:
        return PLAIN if copies == 1 else Encoding(wire_bytes=lambda size: copies * size, copies=copies)

    def wire_bytes(size: float) -> float:
        return copies * codec.bytes(max(1, int(size) // PARAMETER_BYTES), torch.float32)

    assumed = RoundWork(repr(codec), *seconds_per_byte(codec))
    return Encoding(repr(codec), wire_bytes, assumed, copies, cliques)


def seconds_per_byte(codec: Codec) -> tuple[float, float]:
    """Assumed (send, receive) seconds per byte of a codec. A codec with other blocks has the seconds of its class, an
    unknown codec the largest of all, so that none is free before it is measured."""
    if isinstance(codec, Float32):  # for float32 parameters a plain copy, as for unencoded messages
        return 0.0, 0.0
    alike = (found for known, found in CODEC_SECONDS_PER_BYTE.items() if type(known) is type(codec))
    own, received = zip(*CODEC_SECONDS_PER_BYTE.values(), strict=True)
    return CODEC_SECONDS_PER_BYTE.get(codec) or next(alike, (max(own), max(received)))
