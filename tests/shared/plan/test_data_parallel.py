"""Data parallelism, sharded or not, pipelines and cuts, against closed forms at their limits."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_decentral.partial import Cyclic, Full, Staircase, Temporal
from lightning_decentral.partial.plan.cost import compute_fraction
from lightning_decentral.partial.plan.forecast import PartialForecast
from lightning_decentral.pipeline import Pipelining
from lightning_decentral.shared.plan import data_parallel
from lightning_decentral.shared.plan.data_parallel import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Accumulated,
    DataParallel,
    ShardedForecast,
    pieces,
)
from lightning_decentral.shared.plan.forecast import (
    Cluster,
    Method,
    Setting,
    at_factors,
    drawn,
    even,
    forecast,
    one_slow,
)
from lightning_decentral.shared.plan.network import FREE
from lightning_decentral.shared.plan.profile import BlockCost
from lightning_decentral.shared.plan.timeline import run
from tests.settings import BLOCK_BYTES, model, setting

METHODS = [DataParallel(), ShardedForecast(), PartialForecast(depth=Full()), PartialForecast(depth=Staircase())]


def seconds(method: Method, where: Setting) -> float:
    return float(method.seconds(where, even(where.cluster.workers))[0])


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_without_a_network_only_the_computation_is_left(method: Method) -> None:
    where = setting()
    updated = sum(b.update_seconds for b in model().blocks)
    spread = 7 / 8 * updated if method == ShardedForecast() else 0.0  # each updates its shard only
    assert seconds(method, where.without_network) == pytest.approx(model().seconds - spread)


def test_on_a_slow_network_ddp_is_the_all_reduce_behind_the_first_gradients() -> None:
    where = setting(rate=1e6)
    forward, first = 4 * 0.01, 0.02 * FIRST_BUCKET_BYTES / BLOCK_BYTES
    sent = 14 / 8 * 4 * BLOCK_BYTES / 1e6
    buckets = 2  # 1 MiB, and the rest within 25 MiB
    wanted = forward + 0.08 + sent * (1 - FIRST_BUCKET_BYTES / (4 * BLOCK_BYTES)) + 0.008 + 14 * 1e-4
    alone = forward + first + sent + buckets * 14 * 1e-4 + 0.008
    # The second bucket leaves when the backward has ended or the first has arrived, whichever is later.
    assert seconds(DataParallel(), where) == pytest.approx(max(wanted, alone))


def test_buckets_hold_all_gradients_and_the_whole_backward() -> None:
    blocks = (BlockCost("a", 0, 0.5, 0, 70 * 2**20), BlockCost("b", 0, 0.2, 0, 0), BlockCost("c", 0, 0.3, 0, 3 * 2**20))
    found = list(pieces(blocks))
    assert sum(p.bytes for p in found) == 73 * 2**20
    assert sum(p.seconds for p in found) == pytest.approx(1.0)
    by_bucket = [sum(p.bytes for p in found if p.bucket == n) for n in range(4)]
    assert by_bucket == [FIRST_BUCKET_BYTES, BUCKET_BYTES, BUCKET_BYTES, 22 * 2**20]


def test_a_network_as_fast_as_the_backward_is_hidden_but_for_the_last_bucket() -> None:
    where = setting(rate=1e10)
    last = where.network.price("all_reduce", "between", 8).seconds(4 * BLOCK_BYTES - FIRST_BUCKET_BYTES)
    assert seconds(DataParallel(), where) == pytest.approx(model().seconds + last)


def test_sharded_on_a_slow_network_sends_three_copies() -> None:
    where = setting(rate=1e6)
    sent = 3 * 7 / 8 * 4 * BLOCK_BYTES / 1e6 + 12 * 7e-4
    assert sent < seconds(ShardedForecast(), where) < sent + model().seconds
    assert ShardedForecast().card_bytes(where) == pytest.approx(3 * 7 / 8 * 4 * BLOCK_BYTES)


@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
def test_every_number_of_blocks_runs_to_its_end(blocks: int) -> None:
    for tasks in (
        data_parallel.step(model(blocks).blocks, FREE),
        data_parallel.sharded_step(model(blocks).blocks, FREE, FREE, 2),
    ):
        assert len(run(tasks)) == len(tasks)


def test_all_wait_for_the_slowest_which_is_2_4_times_the_mean() -> None:
    where = setting().without_network
    factors = one_slow(3.0, 8, 80)
    assert DataParallel().seconds(where, factors)[0] / model().seconds / factors.mean() == pytest.approx(2.4)


def test_stragglers_are_drawn_from_what_was_measured() -> None:
    variation = (0.9, 1.0, 1.3)
    factors = drawn(variation, 16)
    assert set(np.unique(factors)) == set(variation)
    assert factors.mean() == pytest.approx(np.mean(variation), rel=0.01)
    assert (drawn((), 16) == 1).all()
    where = setting(16)
    found = forecast(DataParallel(), where, factors)
    slowest = DataParallel().seconds(where, 1.3 * even(16))[0]
    assert found.even_seconds < found.p50_seconds <= found.p95_seconds <= slowest


def test_a_curve_is_exact_at_each_of_a_few_factors_and_close_between() -> None:
    factors = np.random.default_rng(0).uniform(1, 3, (2, 100, 4))
    assert at_factors(lambda f: max(f, 2.0), np.array([1.0, 2.5])).tolist() == [2.0, 2.5]
    assert np.abs(at_factors(lambda f: max(f, 2.0), factors) - np.maximum(factors, 2.0)).max() < 0.05


def test_exposed_is_what_a_free_network_would_save() -> None:
    where = setting(rate=1e8)
    found = forecast(DataParallel(), where, even(8))
    assert found.exposed_seconds == pytest.approx(found.seconds - model().seconds)
    assert found.extrapolated


def test_memory_counts_what_a_device_holds() -> None:
    parameters, saved = 4 * BLOCK_BYTES, 4 * 500_000
    assert DataParallel().memory_bytes(setting()) == (1 + 1 + 2 + 1) * parameters + saved
    assert ShardedForecast().memory_bytes(setting()) == 4 * parameters / 8 + 2 * BLOCK_BYTES + saved


def test_cuts_save_what_the_depth_says() -> None:
    where = replace(setting(), model=model(update=0)).without_network
    costs = [BlockCost(forward_seconds=0.01) for _ in range(4)]
    mean = (compute_fraction(costs, 4) + compute_fraction(costs, 2)) / 2
    for warm_up, whole in ((0, 0), (0.25, 0.25), (100, 0)):
        method, share = PartialForecast(depth=Temporal(warm_up=warm_up)), whole + (1 - whole) * mean
        assert seconds(method, where) == pytest.approx(share * where.model.seconds)
        sent = (whole + (1 - whole) * 0.75) * DataParallel().card_bytes(setting())
        assert method.card_bytes(setting()) == pytest.approx(sent)
    assert PartialForecast().depth.warm_up == 0.25, "the first quarter whole"


def test_a_warm_up_needs_the_memory_of_whole_steps() -> None:
    half = Cyclic(fractions=(0.5,))
    whole = DataParallel().memory_bytes(setting())
    assert PartialForecast(depth=Temporal(order=half, warm_up=0)).memory_bytes(setting()) == whole - 2 * 500_000
    for warm_up in (0.25, 10):
        assert PartialForecast(depth=Temporal(order=half, warm_up=warm_up)).memory_bytes(setting()) == whole


def test_a_pipeline_has_its_bubble() -> None:
    where = replace(setting(4), model=model(update=0)).without_network
    work = where.model.seconds  # P micro-batches of 1 / P of the model on each of P stages
    assert seconds(Pipelining(), where) == pytest.approx(work * (4 + 3) / 4)
    assert seconds(Pipelining(slices=8), where) == pytest.approx(work * (32 + 3) / 32)


def test_pipelines_reduce_between_them() -> None:
    where = setting(8, 4, rate=1e8)
    alone = seconds(Pipelining(stages=4), replace(where, cluster=Cluster(4, 4)))
    reduced = where.network.price("all_reduce", "between", 2, flows=4).seconds(BLOCK_BYTES)
    assert seconds(Pipelining(stages=4), where) == pytest.approx(alone + reduced)
    assert Pipelining(stages=4).card_bytes(where) == pytest.approx(4 * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("workers", "per_node", "stages", "crossings", "gradients"),
    [
        (2, 1, 2, 1, 0),  # one sends hidden states, the other gradients
        (4, 1, 4, 2, 0),  # both inner ones send both
        (4, 2, 4, 1, 0),
        (6, 2, 3, 2, 1 * 2 / 3),  # 0 0 | 0 1 | 1 1: the middle node sends back in one, on in the other
        (8, 1, 4, 2, 1 * 1 / 4),
        (8, 2, 4, 1, 1 * 2 / 4),
        (8, 4, 4, 0, 1),
    ],
)
def test_a_node_of_a_pipeline_sends_on_and_back(
    workers: int, per_node: int, stages: int, crossings: int, gradients: float
) -> None:
    """By hand: 100 kB of hidden states for each device's batch; 2 (r - 1) / r of the parameters on the node."""
    wanted = crossings * stages * 100_000 + gradients * 4 * BLOCK_BYTES
    assert Pipelining(stages=stages).card_bytes(setting(workers, per_node)) == pytest.approx(wanted)


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--workers 10 isn't a multiple of --per-node 4"):
        Cluster(10, 4)
    with pytest.raises(ValueError, match="must be at least 1"):
        Cluster(0)
    with pytest.raises(ValueError, match="3 stages don't divide 8 workers"):
        seconds(Pipelining(stages=3), setting())
    with pytest.raises(ValueError, match="8 stages for a model of 4 blocks"):
        seconds(Pipelining(), setting())


def test_of_accumulated_batches_one_is_averaged_and_updates() -> None:
    where, alone = setting(rate=1e6), DataParallel()
    passes = sum(block.pass_seconds for block in model().blocks)
    four = Accumulated(alone, 4)
    assert seconds(four, where) == pytest.approx((3 * passes + seconds(alone, where)) / 4)
    assert four.card_bytes(where) == alone.card_bytes(where) / 4
    assert four.memory_bytes(where) == alone.memory_bytes(where)
    assert seconds(Accumulated(alone, 1), where) == seconds(alone, where)


def test_half_precision_is_half_the_bytes() -> None:
    where, half = setting(rate=1e6), DataParallel(sent=0.5)
    assert half.card_bytes(where) == DataParallel().card_bytes(where) / 2
    assert seconds(half, where) == pytest.approx(seconds(DataParallel(), setting(rate=2e6)))
