"""The forecast of compressed averages against closed forms at its limits."""

import pytest

from lightning_decentral.compressed import CompressedForecast
from lightning_decentral.planner.forecasts import method_of, strategy_of
from lightning_decentral.shared.plan.data_parallel import DataParallel
from lightning_decentral.shared.plan.forecast import Method, Setting, even
from lightning_decentral.shared.plan.profile import Model, RoundWork
from tests.settings import BLOCK_BYTES, model, setting


def seconds(method: Method, where: Setting) -> float:
    return float(method.seconds(where, even(where.cluster.workers))[0])


def quarter(size: float) -> float:
    return size / 4


def slow_work(_: Model) -> RoundWork:
    return RoundWork("Slow()", 1e-6, 2e-6)


def test_without_a_network_only_the_computation_is_left() -> None:
    assert seconds(CompressedForecast(), setting().without_network) == pytest.approx(model().seconds)


def test_on_a_slow_network_it_is_the_codes() -> None:
    """As an all-reduce of so many bytes: both halves send (n - 1) / n of them."""
    where = setting(rate=1e3)
    whole = 4 * BLOCK_BYTES
    n = where.cluster.workers
    found = seconds(CompressedForecast(wire_bytes=quarter), where)
    assert found == pytest.approx(2 * (n - 1) / n * whole / 4 / 1e3, rel=1e-3)
    assert found == pytest.approx(seconds(DataParallel(), where) / 4, rel=1e-3)


def test_coding_is_counted_where_it_is_what_a_step_waits_for() -> None:
    """Of one bucket nothing overlaps but the backward: encode, reduce and decode come one after the other."""
    where = setting().without_network
    whole, n = 4 * BLOCK_BYTES, where.cluster.workers
    plain = seconds(CompressedForecast(bucket_bytes=1 << 40), where)
    found = seconds(CompressedForecast(bucket_bytes=1 << 40, work=slow_work), where)
    rest = whole - 2**20  # the first bucket is small, and its coding hides
    more = rest * (1e-6 * ((n - 1) / n + 1 / n) + 2 * 2e-6 * (n - 1) / n)
    assert found - plain == pytest.approx(more, rel=0.1)


@pytest.mark.parametrize("bucket_bytes", [2**20, 1 << 40])
def test_no_coding_is_hidden_behind_the_backward(bucket_bytes: int) -> None:
    """It takes the processor that the backward would have; the network is what it hides."""
    where = setting().without_network
    found = seconds(CompressedForecast(bucket_bytes=bucket_bytes, work=slow_work), where)
    whole, n = 4 * BLOCK_BYTES, where.cluster.workers
    coding = whole * ((n - 1) / n * (1e-6 + 2 * 2e-6) + 1e-6 / n)
    assert found == pytest.approx(model().seconds + coding)


def test_a_bucket_takes_its_time_however_small_it_is() -> None:
    """Two rounds, in which messages of all others are heard."""
    where = setting().without_network
    buckets = -(-(4 * BLOCK_BYTES - 2**20) // 2**21) + 1
    found = seconds(CompressedForecast(2**21, work=lambda _: RoundWork("Talking()", 0, 0, 1e-3, 1e-4)), where)
    assert found == pytest.approx(model().seconds + buckets * (2e-3 + 2 * 7 * 1e-4))


def test_a_nodes_workers_share_its_card() -> None:
    alone, together = setting(8, 1, rate=1e3), setting(8, 4, rate=1e3)
    method = CompressedForecast(wire_bytes=quarter)
    assert method.card_bytes(alone) == pytest.approx(2 * 7 / 8 * BLOCK_BYTES)
    assert method.card_bytes(together) == pytest.approx(4 * 2 * 4 / 8 * BLOCK_BYTES)
    assert seconds(method, together) == pytest.approx(method.card_bytes(together) / 1e3, rel=1e-3)
    assert method.card_bytes(setting(8, 8)) == 0


def test_the_planner_reads_the_codec() -> None:
    where = setting()
    plain = method_of(strategy_of("strategy=compressed strategy/codec=plain"), where.cluster, 1)
    coded = method_of(strategy_of("strategy=compressed"), where.cluster, 1)
    assert plain == DataParallel()
    assert isinstance(coded, CompressedForecast)
    assert coded.card_bytes(where) < 0.26 * plain.card_bytes(where)


def test_a_network_as_fast_as_the_backward_hides_behind_it() -> None:
    """Both ways of all buckets but the last ones': they don't wait until the gradients are complete."""
    per_second = 4 * BLOCK_BYTES / (4 * 0.02) / 2  # half of the backward's for all codes and both ways
    where, bucket = setting(rate=per_second), 2**20
    found = seconds(CompressedForecast(bucket_bytes=bucket, wire_bytes=quarter), where)
    way = bucket / 4 / per_second + 1e-4
    assert model().seconds < found < model().seconds + 4 * way
