"""Forecasts of the words that users type: their bytes are what the rounds of such a run send, counted there."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_decentral import CompressedStrategy, GossipStrategy
from lightning_decentral.gossip import ConsensusControl, Gossip, Int4, Int8, Outer, PushSum
from lightning_decentral.gossip.compute.error_feedback import Coded
from lightning_decentral.gossip.mixer_builder import MixerBuilder
from lightning_decentral.gossip.plan.forecast import GossipForecast
from lightning_decentral.gossip.plan.warm_start import WarmStarted
from lightning_decentral.gossip.summary import described
from lightning_decentral.gossip.wire.island_member import IslandMember
from lightning_decentral.gossip.wire.optimizers import Mixers
from lightning_decentral.optim import Muon
from lightning_decentral.planner.block_profile import states_of
from lightning_decentral.planner.candidates import MOMENTUM_IN_INT8, OUTER, STREAM
from lightning_decentral.planner.forecasts import (
    CODEC_SECONDS_PER_BYTE,
    encoding_of,
    estimates,
    kept_by,
    method_of,
    strategy_of,
)
from lightning_decentral.shared.compute.codec.codec import Float32
from lightning_decentral.shared.compute.codec.topk import DifferenceCompression, TopK
from lightning_decentral.shared.plan.forecast import Cluster, Setting, even
from lightning_decentral.shared.plan.profile import BlockCost, Model
from lightning_decentral.shared.wire.compressed_mean import mean_by
from lightning_decentral.shared.wire.pending import Pending, Together
from tests.docs.pages import ROOT
from tests.gossip.wire.test_assembly import Alike
from tests.settings import links, model

SIZE, SIDE = 4, 64  # matrices of whole blocks of every codec, without padding


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.zeros(SIDE, SIDE) for _ in range(9)])

    def optimizer(self) -> Muon:
        """Six of nine are hidden; all have had an update."""
        rows = list(self.layers)
        groups: list[dict[str, Any]] = [{"params": rows[:6]}, {"params": rows[6:], "hidden": False}]
        return Muon(groups, lr=0.01)


class Counted(Alike):
    """What the wire's tally counts beside messages is left out: their headers."""

    headers = 0

    def exchange(self, sends: Any, receives: Any) -> tuple[list[Pending], list[Pending]]:
        Counted.headers += sum(m.tensor.nbytes for m in sends if m.tensor.dtype == torch.int64)
        return super().exchange(sends, receives)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        return Together([])


def run_of(strategy: GossipStrategy, module: Net, optimizer: Muon) -> Any:
    """What the rounds of a run ask of it, for worker 0 of four that are alike, on nodes of their own."""
    topology = strategy.topology.placed(1)
    told = SimpleNamespace(all_gather=lambda row: (SimpleNamespace(wait=lambda: None), [row] * SIZE), size=SIZE, rank=0)
    of_group = lambda groups: next((Counted(len(g)) for g in groups if 0 in g), None)  # noqa: E731
    wire: Any = SimpleNamespace(group=of_group, world=told)
    names = ("weights", "codec", "states", "island", "delay", "bucket_bytes", "heals", "evaluate")
    return SimpleNamespace(
        **{name: getattr(strategy, name) for name in names},
        topology=topology,
        combine=strategy.combine.placed(topology.fragments[0], SIZE),
        member=IslandMember(wire, 1, lambda call: call()),
        wire=wire,
        workers=SIZE,
        worker=0,
        workers_per_node=1,
        num_nodes=SIZE,
        num_processes=1,
        lightning_module=None,
        optimizers=[optimizer],
    )


def rounds_of(run: Any, module: Net) -> MixerBuilder:
    return MixerBuilder(run, run.wire, run.member, torch.device("cpu"), module)


def model_of(module: Net, optimizer: Muon) -> Model:
    whole = sum(p.nbytes for p in module.parameters())
    return Model("", "cpu", (BlockCost("all", 0.1, 0.1, 0.0, whole),), states=states_of([optimizer]))


def update(module: Net, optimizer: Muon) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


GOSSIP = "strategy=gossip"
SHORT = "strategy.topology.steps=6 strategy.topology.parts=3"


@pytest.mark.sampled
@pytest.mark.parametrize(
    "words",
    [
        GOSSIP,
        f"{GOSSIP} strategy/codec=int8",
        f"{GOSSIP} strategy/topology=complete strategy/codec=bfloat16",
        f"{GOSSIP} strategy/topology=every strategy.topology.steps=3",
        f"{GOSSIP} strategy/combine=gradient_tracking",
        f"{GOSSIP} strategy/codec=difference_compression strategy/topology=ring",
        f"{STREAM} {SHORT}",
        f"{STREAM} {SHORT} strategy/combine=outer_nesterov {OUTER}",
        f"{STREAM} {SHORT} strategy/combine=pseudo_gradient strategy/codec=int4 {OUTER}",
        f"{GOSSIP} strategy/codec=int8 {MOMENTUM_IN_INT8}",
        f"{GOSSIP} {MOMENTUM_IN_INT8.replace('codec:', 'every:2,codec:')}",
    ],
)
def test_a_forecasts_bytes_are_those_that_rounds_send(words: str) -> None:
    module, strategy = Net(), strategy_of(words)
    optimizer = module.optimizer()
    assert isinstance(strategy, GossipStrategy)
    run = run_of(strategy, module, optimizer)
    rounds = rounds_of(run, module)
    mixers = Mixers(rounds.making)
    mixers.adopt(optimizer)
    steps, Counted.headers = 12, 0  # whole periods of all
    for _ in range(steps):
        update(module, optimizer)
        mixers.step(optimizer)
    mixers.settle()
    sent = sum(mixer.traffic().bytes_sent for mixer in mixers) - Counted.headers
    setting = Setting(model_of(module, optimizer), links(), Cluster(SIZE))
    forecast = method_of(strategy, setting.cluster, 1)
    assert forecast.card_bytes(setting) * steps == sent > 0
    if not strategy.states:  # of which the summary at the start knows no bytes yet
        said = described(run, mixers)["bytes per worker and step"]
        assert said.startswith(f"{forecast.card_bytes(setting):,.0f} (")


def test_the_summary_says_what_a_state_adds_at_most() -> None:
    """Where all parameters have it, that is what the forecast says, too."""
    module, strategy = Net(), strategy_of(f"{GOSSIP} {MOMENTUM_IN_INT8}")
    assert isinstance(strategy, GossipStrategy)
    optimizer = module.optimizer()
    run = run_of(strategy, module, optimizer)
    rounds = rounds_of(run, module)
    mixers = Mixers(rounds.making)
    mixers.adopt(optimizer)
    said = described(run, mixers)["mixed states"]
    whole = 9 * 4 * SIDE * SIDE
    model = Model("", "cpu", (BlockCost("all", 0.1, 0.1, 0.0, whole),), states=(("momentum_buffer", whole),))
    setting = Setting(model, links(), Cluster(SIZE))
    more = method_of(strategy, setting.cluster, 1).card_bytes(setting) - whole
    assert said.endswith(f", up to {more:,.0f} bytes a step")
    assert said.startswith("momentum_buffer: Travel(codec=Int8(block=256)")


@pytest.mark.parametrize("codec", ["plain", "int8", "int4", "int2"])
def test_a_compressed_averages_bytes_are_those_that_it_sends(codec: str) -> None:
    strategy = strategy_of(f"strategy=compressed strategy/codec={codec}")
    assert isinstance(strategy, CompressedStrategy)
    mean = mean_by(strategy.codec, lambda: Counted(SIZE), torch.device("cpu"))
    for place in range(2):
        mean.start(torch.ones(8 * 1024), place).wait()
    setting = Setting(Model("", "cpu", (BlockCost("all", 0.1, 0.1, 0.0, 2 * 4 * 8 * 1024),)), links(), Cluster(SIZE))
    assert method_of(strategy, setting.cluster, 1).card_bytes(setting) == mean.sent_bytes > 0


def test_rounds_of_states_come_behind_those_of_parameters() -> None:
    """On links that are all that counts a step takes what both together take; a state the profile lacks is one line."""
    module = Net()
    optimizer = module.optimizer()
    update(module, optimizer)
    where = Setting(model_of(module, optimizer), links(latency=0, rate=1e3), Cluster(SIZE))
    factors = torch.ones(1, 80, SIZE).double().numpy()

    def seconds(words: str, where: Setting = where) -> float:
        return float(method_of(strategy_of(words), where.cluster, 1).seconds(where, factors)[0])

    alone, both = seconds(GOSSIP), seconds(f"{GOSSIP} {MOMENTUM_IN_INT8}")
    whole = 9 * SIDE * SIDE * 4
    assert alone == pytest.approx(whole / 1e3, rel=1e-3)
    assert both == pytest.approx((whole + 6 / 9 * whole * 260 / 1024) / 1e3, rel=1e-3)
    model = Model("", "cpu", where.model.blocks, states=(("exp_avg", 4),))
    with pytest.raises(ValueError, match="no state 'momentum_buffer' of the optimizer, only exp_avg: profile with"):
        seconds(f"{GOSSIP} {MOMENTUM_IN_INT8}", Setting(model, where.network, where.cluster))


def test_fragments_hide_what_one_message_does_not() -> None:
    """A sixth of a model in every step, each hidden behind it; all of it in every sixth step waits for its link."""
    where = Setting(Model("", "cpu", (BlockCost("all", 0.1, 0.1, 0.0, 6_000_000),)), links(0, 1e7), Cluster(SIZE))
    factors = torch.ones(1, 80, SIZE).double().numpy()
    times = [
        float(method_of(strategy_of(words), where.cluster, 1).seconds(where, factors)[0])
        for words in (
            f"{GOSSIP} strategy/topology=every strategy.topology.steps=6",
            f"{GOSSIP} strategy/topology=stream strategy.topology.steps=6 strategy.topology.parts=6",
        )
    ]
    waited = 6e6 / 1e7 - 0.2  # but for the step that hides it
    assert times == pytest.approx([0.2 + waited / 6, 0.2])


def test_a_warm_start_is_its_share_of_all_reduces_that_are_waited_for() -> None:
    """A fifth of the run at the compute and 2 3/4 of the bytes, the rest at what a hidden message takes."""
    where = Setting(Model("", "cpu", (BlockCost("all", 0.1, 0.1, 0.0, 1_000_000),)), links(0, 1e7), Cluster(SIZE))
    factors = torch.ones(1, 80, SIZE).double().numpy()
    whole, warm = (
        method_of(strategy_of(f"{GOSSIP} strategy.exact_steps={steps}"), where.cluster, 1) for steps in (200, 0.2)
    )
    assert isinstance(whole, GossipForecast)  # nobody knows of how many
    assert isinstance(warm, WarmStarted)
    reduced = 2 * 3 / 4 * 1e6
    assert whole.seconds(where, factors)[0] == pytest.approx(0.2)
    assert warm.seconds(where, factors)[0] == pytest.approx(0.2 + 0.2 * reduced / 1e7)
    assert warm.card_bytes(where) == pytest.approx(0.2 * reduced + 0.8 * 1e6)
    assert warm.memory_bytes(where) >= whole.memory_bytes(where)
    assert len(warm.prices(where)) > len(whole.prices(where))
    assert warm.tasks(where) == whole.tasks(where)


# ---- memory -------------------------------------------------------------------------------------------------------


def test_rules_keep_what_their_state_has() -> None:
    assert [kept_by(rule) for rule in (Gossip(), Outer(), PushSum(), ConsensusControl(target=0.1, inner=Outer()))] == [
        0,
        2,
        1,
        2,
    ]
    plain, outer = (
        method_of(strategy_of(f"{STREAM} {words}"), Cluster(SIZE), 1)
        for words in ("", f"strategy/combine=outer_nesterov {OUTER}")
    )
    setting = Setting(Model("", "cpu", (BlockCost("all", 0.1, 0.1, 0.0, 1000),)), links(), Cluster(SIZE))
    assert outer.memory_bytes(setting) - plain.memory_bytes(setting) == 2000


@pytest.mark.parametrize("words", ["ring", "hypercube", "complete", "exponential"])
def test_a_codec_of_differences_keeps_an_estimate_of_each_link(words: str) -> None:
    strategy = strategy_of(f"{GOSSIP} strategy/topology={words} strategy/codec=difference_compression")
    assert isinstance(strategy, GossipStrategy)
    module = Net()
    optimizer = module.optimizer()
    run = run_of(strategy, module, optimizer)
    rounds = rounds_of(run, module)
    (mixer,) = rounds.mixers()
    mixer.extend(rounds.pack(list(module.parameters())))
    for _ in range(2 * run.topology.period(SIZE)):
        mixer.step(0.1)
    mixer.drain()
    coder = mixer.exchange.coder
    assert isinstance(coder, Coded)
    kept = sum(e.numel() for channel in coder._channels for e in channel.estimates.values())
    assert estimates(strategy.codec, run.topology, SIZE) * 9 * SIDE * SIDE == kept
    assert estimates(Int8(), run.topology, SIZE) == 0


# ---- own work -----------------------------------------------------------------------------------------------------


def test_assumed_seconds_are_the_committed_ones() -> None:
    """Those of plain codes of four and two bits are of their differences, a bound."""
    measured = {}
    for row in json.loads((ROOT / "benchmarks" / "results" / "codec-2-cores.json").read_text())["summary"]:
        measured[row["codec"]] = row["send ms per MB"], row["hear ms per MB"]
    for codec, seconds in CODEC_SECONDS_PER_BYTE.items():
        alike = repr(codec) if repr(codec) in measured else repr(DifferenceCompression(codec))
        assert [1e9 * s for s in seconds] == pytest.approx(measured[alike])


def test_codecs_of_one_kind_are_assumed_to_take_the_same() -> None:
    assert encoding_of(Int4(block=64)).assumed.own_seconds_per_byte == CODEC_SECONDS_PER_BYTE[Int4()][0]
    assert encoding_of(Int8(block=64)).assumed.heard_seconds_per_byte == CODEC_SECONDS_PER_BYTE[Int8()][1]


def test_a_codec_that_nobody_measured_is_not_free() -> None:
    """It counts as the slowest one; what copies float32 takes what messages take."""
    own, received = zip(*CODEC_SECONDS_PER_BYTE.values(), strict=True)
    assumed = encoding_of(TopK()).assumed
    assert (assumed.own_seconds_per_byte, assumed.heard_seconds_per_byte) == (max(own), max(received))
    assert encoding_of(Float32()).assumed.own_seconds_per_byte == 0


@pytest.mark.parametrize(
    "words",
    [
        "strategy=ddp",
        "strategy=compressed",
        "strategy=gossip",
        "strategy=gossip strategy.delay=0",
        "strategy=gossip strategy/island=all_reduce strategy.island.devices=2",
        "strategy=gossip strategy/island=fully_shard strategy.island.devices=2",
        "strategy=gossip strategy/island=fully_shard strategy.island.devices=4",
        "strategy=partial_backprop",
        "strategy=token_pipeline strategy.stages=4 strategy.microbatches=4",
    ],
)
def test_what_the_loop_takes_comes_once_to_every_step(words: str) -> None:
    method, without = (
        method_of(strategy_of(words), Cluster(4), 1),
        Setting(model(), links(), Cluster(4)).without_network,
    )
    looped = replace(without, model=replace(model(), loop_seconds=0.5))
    more = method.seconds(looped, even(4)) - method.seconds(without, even(4))
    assert more.tolist() == pytest.approx([0.5])
