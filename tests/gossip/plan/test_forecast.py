"""The recursion over steps: against the timeline's run of the same tasks, the design's numbers, and closed forms."""

from collections import Counter
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from lightning_decentral.gossip import (
    AlternatingExponentialRing,
    Auto,
    BaseGraph,
    Complete,
    Every,
    Exponential,
    FromGraph,
    GossipForecast,
    Hypercube,
    OnePeerExponential,
    Own,
    PeriodicAverage,
    Ring,
    Star,
    Stream,
    Topology,
)
from lightning_decentral.gossip.plan.forecast import ready, step_tasks
from lightning_decentral.gossip.plan.planned_traffic import (
    Cliques,
    RoundLoad,
    copies_through_card,
    rounds,
    rounds_of_part,
)
from lightning_decentral.gossip.plan.step_costs import Alone, Encoding, ReplicatedCost, ShardedCost
from lightning_decentral.pipeline import Pipelining
from lightning_decentral.shared.plan.data_parallel import DataParallel, ShardedForecast
from lightning_decentral.shared.plan.forecast import Cluster, Method, Setting, even, forecast, one_slow
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import LinkCost, RoundWork
from lightning_decentral.shared.plan.timeline import run
from tests.settings import BLOCK_BYTES, model, setting

PARAMETERS = 4 * BLOCK_BYTES
STATIC_HYPERCUBE = FromGraph(nx.hypercube_graph(3))


def seconds(method: Method, where: Setting) -> float:
    return float(method.seconds(where, even(where.cluster.workers))[0])


# ---- waiting ------------------------------------------------------------------------------------------------------


def with_one_slow(topology: Topology, delay: int) -> float:
    """Seconds per step over the mean compute: 8 workers, one random worker 3 times slower in each step."""
    factors = one_slow(3.0, 8, 2000, runs=8)
    plan = rounds(topology, Own(), 8, 1)
    last = ready(factors, [np.zeros(8)] * len(plan), plan, delay).max(axis=2)
    return float((last[:, -1] - last[:, 200]).mean() / 1799 / factors.mean())


@pytest.mark.parametrize(("delay", "published"), [(1, 1.29), (2, 1.15), (4, 1.08), (8, 1.04)])
def test_a_hypercube_whose_workers_hear_all_neighbours_waits_as_designed(delay: int, published: float) -> None:
    assert with_one_slow(STATIC_HYPERCUBE, delay) == pytest.approx(published, abs=0.02)


@pytest.mark.parametrize(("delay", "least"), [(1, 1.24), (2, 1.15), (4, 1.08), (8, 1.04)])
def test_one_peer_a_step_waits_less(delay: int, least: float) -> None:
    assert with_one_slow(Hypercube(), delay) == pytest.approx(least, abs=0.02)


def test_blocking_on_everyone_is_the_barrier() -> None:
    assert with_one_slow(Complete(), 0) == pytest.approx(2.4)


@pytest.mark.parametrize("delay", [0, 1, 2, 5])
@pytest.mark.parametrize(
    "topology",
    [Hypercube(), Exponential(), Star(), Every(3, Ring()), BaseGraph(), AlternatingExponentialRing(2)],
    ids=repr,
)
def test_the_recursion_is_the_timeline_of_its_tasks(topology: Topology, delay: int) -> None:
    drawing = np.random.default_rng(0)
    compute = drawing.uniform(1, 3, (1, 12, 8))
    plan = rounds(topology, Own(), 8, 1)
    exchange = [drawing.uniform(0, 2, 8) for _ in plan]
    work = list(drawing.uniform(0, 1, (len(plan), 8)))
    spans = run(step_tasks(compute[0], exchange, plan, delay, work))
    moments = ready(compute, exchange, plan, delay, work)[0]
    for rank in range(8):
        mixed = [spans[f"mix {step} of {rank}"].finish for step in range(12)]
        arrived = [spans[f"exchange {step} of {rank}"].finish for step in range(12)]
        assert moments[:, rank] == pytest.approx(mixed if delay else arrived)


# ---- seconds of an exchange ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e7, 1e8, 1e9])
def test_the_steady_state_is_the_longer_of_computation_and_exchange(rate: float) -> None:
    where, sent = setting(rate=rate), PARAMETERS / rate + 1e-4
    compute = model().seconds
    assert seconds(GossipForecast(Hypercube()), where) == pytest.approx(max(compute, sent), rel=1e-6)
    assert seconds(GossipForecast(Hypercube(), delay=0), where) == pytest.approx(compute + sent)
    assert seconds(GossipForecast(Exponential()), where) == pytest.approx(max(compute, 3 * PARAMETERS / rate + 1e-4))


def test_several_neighbours_at_once_cost_what_was_measured_of_several() -> None:
    fan = LinkCost("exchange", "between", 8, 1, 1e-4, 0.5e7, peers=3)
    where = setting(rate=1e7)
    where = replace(where, network=Network((*where.network.costs, replace(fan, peers=1, bytes_per_second=1e7), fan)))
    assert seconds(GossipForecast(Hypercube()), where) == pytest.approx(PARAMETERS / 1e7 + 1e-4)
    assert seconds(GossipForecast(Exponential()), where) == pytest.approx(3 * PARAMETERS / 0.5e7 + 1e-4)


def test_workers_of_a_node_share_its_card() -> None:
    where = setting(8, 4, rate=1e7)
    inside, between = PARAMETERS / 1e10 + 1e-5, 4 * PARAMETERS / 1e7 + 1e-4
    mean = model().seconds + (2 * inside + between) / 3  # two of three steps stay in the node
    assert seconds(GossipForecast(Hypercube(), delay=0), where) == pytest.approx(mean)


def test_alternating_ring_moves_what_the_paper_says() -> None:
    """(2L - 1) / (2L) M a step on average, an all-reduce over 2L devices in every other step."""
    where = setting(8, 4, rate=1e7)
    method = GossipForecast(Auto().placed(4))
    assert method.card_bytes(where) == pytest.approx(7 / 8 * PARAMETERS)
    sent = 2 * 7 / 8 * PARAMETERS / 1e7 + 14 * 1e-4
    assert seconds(method, where) == pytest.approx((sent + model().seconds) / 2)


def test_every_k_with_delay_k_has_k_steps_to_hide_behind() -> None:
    where, sent = setting(rate=1e8), PARAMETERS / 1e8 + 1e-4
    assert 1 < sent / model().seconds < 4
    assert seconds(GossipForecast(Every(4, Hypercube()), delay=4), where) == pytest.approx(model().seconds, rel=0.01)
    once = seconds(GossipForecast(Every(4, Hypercube()), delay=1), where)
    assert once == pytest.approx((3 * model().seconds + sent) / 4, rel=0.01)


QUARTER = Encoding("Int8", lambda size: size / 4, RoundWork("Int8", 0.7e-9, 0.3e-9), cliques=Cliques.PEERS)
WORK = 1e-9 * PARAMETERS


def test_a_codec_sends_fewer_bytes_and_takes_its_time() -> None:
    where = setting(rate=1e7)
    method = GossipForecast(Hypercube(), encoding=QUARTER)
    assert seconds(method, where) == pytest.approx(PARAMETERS / 4e7 + 1e-4 + WORK)
    fast = replace(where, network=where.without_network.network)
    assert seconds(method, fast) == pytest.approx(model().seconds + WORK)
    assert method.card_bytes(where) == PARAMETERS / 4
    three = seconds(replace(method, topology=Exponential()), fast)
    assert three == pytest.approx(model().seconds + (0.7e-9 + 3 * 0.3e-9) * PARAMETERS)


@pytest.mark.parametrize(("delay", "hidden"), [(0, False), (1, False), (2, True)])
def test_a_rounds_work_is_hidden_where_another_round_is_under_way(delay: int, hidden: bool) -> None:
    """Where the link is what is waited for."""
    where = setting(rate=1e7)
    sent = PARAMETERS / 4e7 + 1e-4 + (0.0 if delay else model().seconds)
    method = GossipForecast(Hypercube(), delay, encoding=QUARTER)
    assert seconds(method, where) == pytest.approx(sent + (0.0 if hidden else WORK), rel=1e-3)


PLAIN_WORK, CODEC_WORK = RoundWork("Plain()", 1e-9), RoundWork("Int8", 5e-9, 1e-9)


@pytest.mark.parametrize(("method", "assumed", "with_plain", "measured"), [
    (GossipForecast(Hypercube()), 0.0, 1e-9, 1e-9),
    (GossipForecast(Ring()), 0.0, 1e-9, 1e-9),
    (GossipForecast(Ring(), encoding=QUARTER), 1.3e-9, 2.3e-9, 7e-9),
    (GossipForecast(Ring(), encoding=replace(QUARTER, copies=2)), 2.6e-9, 4.6e-9, 14e-9),
    (GossipForecast(Every(2, Ring()), encoding=QUARTER), 1.3e-9 / 2, 2.3e-9 / 2, 3.5e-9),
], ids=["one", "several", "codec", "two copies", "every other"])  # fmt: skip
def test_what_a_round_takes_this_device_is_measured_rather_than_assumed(
    method: GossipForecast, assumed: float, with_plain: float, measured: float
) -> None:
    """A codec that the profile doesn't have costs what it is known for on top of messages as they are."""
    where = setting().without_network
    for works, seconds_per_byte in (((), assumed), ((PLAIN_WORK,), with_plain), ((PLAIN_WORK, CODEC_WORK), measured)):
        known = replace(where, model=replace(where.model, rounds=works))
        assert seconds(method, known) == pytest.approx(model().seconds + seconds_per_byte * PARAMETERS)


@pytest.mark.parametrize(("topology", "heard", "share"), [
    (Hypercube(), 1, 1.0), (Ring(), 2, 1.0), (Every(2, Ring()), 2, 0.5), (Stream(4, 4, Ring()), 2, 1.0)
], ids=repr)  # fmt: skip
def test_a_round_takes_its_time_however_short_its_message(topology: Topology, heard: int, share: float) -> None:
    """A fragment's, too."""
    where = setting().without_network
    talking = RoundWork("Plain()", round_seconds=1e-3, message_seconds=1e-4)
    known = replace(where, model=replace(where.model, rounds=(talking,)))
    more = seconds(GossipForecast(topology), known) - model().seconds
    assert more == pytest.approx(share * (1e-3 + heard * 1e-4))


def test_in_a_clique_one_mixture_is_heard_and_in_a_star_the_leaves_hear_one() -> None:
    assert rounds(Complete(), Own(), 8, 1)[0].received.tolist() == [1] * 8
    assert rounds(Complete(), Own(), 8, 1, Cliques.PEERS)[0].received.tolist() == [7] * 8
    assert rounds(Star(), Own(), 4, 1)[0].received.tolist() == [3, 1, 1, 1]
    assert rounds(Every(2, Ring()), Own(), 4, 1)[0].received.tolist() in ([0] * 4, [2] * 4)
    for one in rounds(AlternatingExponentialRing(4), Own(), 8, 4):
        assert one.received.max() == 1, "it all-reduces in cliques of a node's workers and of two nodes'"


def test_of_an_island_every_device_corrects_what_it_has_and_hears_its_part() -> None:
    where = setting(8, 4).without_network
    where = replace(where, model=replace(where.model, rounds=(RoundWork("Plain()", 2e-9, 1e-9),)))
    for within, own in ((ReplicatedCost(4), 2e-9), (ShardedCost(4), 0.5e-9)):
        bare = replace(where, model=replace(where.model, rounds=()))
        method = GossipForecast(Hypercube(), within=within)
        more = (own + 1e-9 / 4) * PARAMETERS
        assert seconds(method, where) == pytest.approx(seconds(method, bare) + more)


def test_where_messages_are_encoded_nothing_is_all_reduced() -> None:
    assert {load.clique for one in rounds(Complete(), Own(), 8, 1) for load in one.loads} == {8}
    assert rounds(Complete(), Own(), 8, 1, Cliques.PEERS)[0].loads == (RoundLoad(0, 0, 7, 1),) * 8


def test_codes_that_owners_add_up_go_there_and_back_by_parts() -> None:
    """7 of 8 parts each way, of which a worker decodes its own from all others, and the others' means."""
    where, coded = setting(rate=1e7), replace(QUARTER, cliques=Cliques.OWNERS)
    method = GossipForecast(Complete(), encoding=coded)
    each = 7 / 8 * PARAMETERS / 4e7 + 1e-4
    assert seconds(method, where) == pytest.approx(2 * each + (0.7e-9 + 2 * 0.3e-9) * PARAMETERS)
    assert method.card_bytes(where) == pytest.approx(2 * 7 / 8 * PARAMETERS / 4)
    told = GossipForecast(Complete(), encoding=QUARTER)
    assert told.card_bytes(where) == 4 * method.card_bytes(where)
    two = setting(2, rate=1e7)
    assert seconds(method, two) == pytest.approx(seconds(told, two)), "two workers tell each other"


@pytest.mark.parametrize(("per_node", "sent"), [(1, 2 * 7 / 8), (2, 2 * 2 * 6 / 8), (4, 4 * 2 * 4 / 8), (8, 0)])
def test_through_a_nodes_card_go_the_parts_that_others_own(per_node: int, sent: float) -> None:
    assert copies_through_card(Complete(), Own(), 8, per_node, Cliques.OWNERS) == [pytest.approx(sent)]


def test_an_average_from_time_to_time_waits_for_all_then() -> None:
    where = setting(rate=1e8).without_network
    method = GossipForecast(PeriodicAverage(8, Ring()), delay=0)
    factors = one_slow(3.0, 8, 80, runs=4)
    found = [float(m.seconds(where, factors).mean()) for m in (GossipForecast(Ring(), delay=0), method, DataParallel())]
    assert found == sorted(found)


def both_of_eight() -> Network:
    """Eight workers, measured as two nodes of four, and as one worker of each of eight nodes."""
    inside = LinkCost("exchange", "inside", 2, 1, 1e-5, 1e10)
    kinds = [(4, 1e8), (1, 2e8)]
    names = ("all_reduce", "all_gather", "reduce_scatter")
    return Network(
        (inside, *(LinkCost(o, "between", 8, 1, 1e-3, rate, per_node=n) for o in names for n, rate in kinds))
    )


def test_an_all_reduce_over_shared_nodes_costs_what_ddp_pays_for_it() -> None:
    where = replace(setting(8, 4), network=both_of_eight())
    (price,) = DataParallel().prices(where)
    assert (price.bytes_per_second, price.extrapolated) == (1e8, False)
    assert GossipForecast(Complete()).prices(where) == (price,)
    assert set(ReplicatedCost(8).prices(where)) == {price}
    assert ShardedCost(8).prices(where) == ShardedForecast().prices(where)
    assert Pipelining(stages=1).prices(where)[1] == price
    alone = replace(setting(8, 1), network=both_of_eight())
    assert GossipForecast(Complete()).prices(alone) == DataParallel().prices(alone) != (price,)
    assert {load.per_node for load in rounds(Complete(), Own(), 8, 3)[0].loads} == {3}, "nodes of 3, 3 and 2"


# ---- islands ------------------------------------------------------------------------------------------------------


def test_an_island_of_one_device_is_a_device() -> None:
    where = setting(rate=1e8)
    assert seconds(GossipForecast(Hypercube(), within=ReplicatedCost(1)), where) == pytest.approx(
        seconds(GossipForecast(Hypercube(), within=Alone()), where)
    )


@pytest.mark.parametrize("within", [ReplicatedCost(4), ShardedCost(4)], ids=repr)
def test_every_byte_of_an_island_crosses_the_card_once(within: ReplicatedCost | ShardedCost) -> None:
    where = setting(8, 4, rate=1e7)
    method = GossipForecast(Hypercube(), within=within)
    assert method.card_bytes(where) == PARAMETERS
    gathered = PARAMETERS * 3 / 4 / 1e10 + 3e-5 if within == ReplicatedCost(4) else 0.0
    # Four flows share the card, each with a quarter of the parameters.
    assert seconds(method, where) == pytest.approx(PARAMETERS / 1e7 + 1e-4 + gathered, rel=0.01)


def test_an_island_waits_for_its_slowest_device() -> None:
    where = setting(4, 4).without_network
    factors = even(4)
    factors[:, :, 2] = 2.0
    assert float(GossipForecast(Auto(), within=ReplicatedCost(4)).seconds(where, factors)[0]) == pytest.approx(
        2 * model().seconds
    )


def test_memory_is_a_replica_and_the_messages() -> None:
    where = setting()
    replica = 4 * PARAMETERS + 4 * 500_000
    assert GossipForecast(Hypercube()).memory_bytes(where) == replica + 2 * PARAMETERS
    assert GossipForecast(Hypercube(), delay=3).memory_bytes(where) == replica + 6 * PARAMETERS
    assert GossipForecast(Ring()).memory_bytes(where) == replica + 3 * PARAMETERS
    assert GossipForecast(Auto()).memory_bytes(setting(1)) == replica


def test_a_forecast_and_its_tasks_agree_where_all_are_equally_fast() -> None:
    where = setting(rate=1e8)
    method = GossipForecast(OnePeerExponential())
    found = forecast(method, where, even(8))
    assert found.seconds == found.p50_seconds == found.p95_seconds
    spans = run(method.tasks(where))
    steps = Counter(name.split()[0] for name in spans)["compute"] // 8
    last = max(spans[f"compute {steps - 1} of {rank}"].start for rank in range(8))
    first = max(spans[f"compute {steps - 2} of {rank}"].start for rank in range(8))
    assert last - first == pytest.approx(found.even_seconds)
    assert found.exposed_seconds == pytest.approx(found.even_seconds - model().seconds)


# ---- periods longer than what is counted ---------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [40, 64, 65, 100, 500])
def test_a_talk_in_many_steps_is_spread_over_them(steps: int) -> None:
    """Blocking it is waited for, overlapped its first step hides a part of it."""
    where = setting(rate=1e6)
    step, sent = model().seconds, 2 * 7 / 8 * PARAMETERS / 1e6 + 14 * 1e-4
    assert seconds(GossipForecast(Every(steps, Complete()), 0), where) == pytest.approx(step + sent / steps)
    assert seconds(GossipForecast(Every(steps, Complete()), 1), where) == pytest.approx(step + (sent - step) / steps)


def test_fragments_of_a_long_period_are_counted_as_they_come() -> None:
    """9 parts in 90 steps, of which 64 steps see 7."""
    where = setting(rate=1e6)
    sent = 2 * 7 / 8 * PARAMETERS / 9 / 1e6 + 14 * 1e-4
    found = seconds(GossipForecast(Stream(90, 9, Complete()), 0), where)
    assert found == pytest.approx(model().seconds + sent / 10)


def test_a_graph_without_talks_is_a_step_alone() -> None:
    assert seconds(GossipForecast(Every(100, FromGraph(nx.empty_graph(8))), 0), setting()) == pytest.approx(
        model().seconds
    )


@pytest.mark.parametrize("per_node", [1, 4])
@pytest.mark.parametrize("cliques", [Cliques.PEERS, Cliques.RING])
@pytest.mark.parametrize("topology", [Exponential(), Ring(), Complete(), Every(2, Complete())], ids=repr)
def test_a_part_of_many_workers_has_the_messages_of_all(topology: Topology, cliques: Cliques, per_node: int) -> None:
    whole = rounds(topology, Own(), 256, per_node, cliques)
    part = rounds_of_part(topology, Own(), 64, 256, per_node, cliques)
    assert [{*one.loads} for one in part] == [{*one.loads} for one in whole]
    assert [{*one.received} for one in part] == [{*one.received} for one in whole]


@pytest.mark.parametrize("per_node", [1, 4])
@pytest.mark.parametrize("topology", [Exponential(), Ring(), Hypercube(), Every(4, Complete())], ids=repr)
def test_many_workers_are_forecast_as_a_part_of_them(
    topology: Topology, per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, method = setting(128, per_node, rate=1e8), GossipForecast(topology)
    whole = forecast(method, where, even(128))
    monkeypatch.setattr("lightning_decentral.shared.plan.forecast.SIMULATED", 64)
    part = forecast(method, where, even(64))
    assert where.cluster.simulated.workers == 64
    found = [(one.seconds, one.card_bytes, one.memory_bytes) for one in (part, whole)]
    assert found[0] == pytest.approx(found[1], rel=0.08)  # by the bits of a node's number that a period has


@pytest.mark.parametrize(
    ("workers", "per_node", "part"),
    [
        (128, 1, 128),
        (1024, 1, 128),
        (1000, 1, 125),
        (1_000_000, 8, 80),
        (1009, 1, 127),
        (1000, 100, 300),
    ],
)
def test_a_large_cluster_is_simulated_by_whole_nodes(workers: int, per_node: int, part: int) -> None:
    found = Cluster(workers, per_node).simulated
    assert found.workers == part
    assert found.per_node == per_node
    assert Cluster(512, 512).simulated == Cluster(128, 128)
