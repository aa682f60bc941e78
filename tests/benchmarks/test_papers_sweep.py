"""The rows of "Against the papers" on many models on few devices: what their simulations stand on."""

import pytest

from papers import hydra, jigsaw, saturn, spb


def test_hydra_the_simulation_meets_its_bounds() -> None:
    one = 3 * hydra.BLOCKS * hydra.block_seconds(hydra.BATCH)
    kept = hydra.JOBS * hydra.STEPS * one
    assert hydra.pipelined(1, again=0) == pytest.approx(kept)
    # m + P - 1 turns of a pipeline in place of m.
    assert hydra.pipelined(8) == pytest.approx(kept * 4 / 3 * (8 + hydra.SHARDS - 1) / 8 / hydra.SHARDS)
    ours = hydra.shard_parallel()
    assert kept * 4 / 3 / hydra.DEVICES <= ours < 1.01 * kept * 4 / 3 / hydra.DEVICES
    assert hydra.shard_parallel(loads=False) <= ours < hydra.task_parallel()
    assert hydra.shard_parallel(loads=False, at_once=4) == pytest.approx(kept * 4 / 3 / 4)


def test_hydra_states_of_four_models_fit_the_devices_and_of_one_no_device() -> None:
    states = hydra.BLOCKS * hydra.STATE_BYTES * hydra.block_parameters(hydra.WIDTH)
    assert hydra.DEVICES * hydra.DEVICE_BYTES // states == hydra.AT_ONCE
    assert states > hydra.DEVICE_BYTES


def test_hydra_a_model_twice_as_large_as_the_device_takes_little_of_it() -> None:
    found = hydra.one_device(30, width=4096)
    assert found.peak_bytes < hydra.DEVICE_BYTES < found.footprint.parameter_bytes


def test_saturn_a_table_has_what_fits_and_its_baselines_their_closed_forms() -> None:
    six = saturn.Model(6e9, 16, 1.0)
    assert list(six.step(1, 1e9)) == ["spilled"]
    assert not six.step(2, 1e9)
    assert list(six.step(4, 1e9)) == ["token_pipeline"]
    jobs = saturn.tables(0, saturn.LINKS["PCIe"], 1.0)
    assert saturn.fixed(jobs, [8] * len(jobs)) == pytest.approx(sum(job.seconds[8] for job in jobs))
    ours = saturn.planned(jobs)
    assert saturn.lower_bound_seconds(jobs, saturn.DEVICES) <= ours <= saturn.fixed(jobs, [8] * len(jobs))


@pytest.mark.parametrize("size", jigsaw.SIZES)
def test_jigsaw_the_closed_form_is_the_timeline(size: int) -> None:
    assert jigsaw.saving(size) == pytest.approx((size - 1) / (3 * size), rel=1e-12)


def test_jigsaw_a_replay_does_the_work_that_was_asked_for() -> None:
    trace = jigsaw.jobs(1.0)
    asked = sum(job.size * job.work for job in trace)
    found = jigsaw.outcomes(1.0)
    # Cycles of the unaware have no gaps to save: only when a job runs changes.
    assert found["FIFO"].device_seconds == pytest.approx(asked)
    assert found["unaware"].device_seconds == pytest.approx(asked)
    assert asked * 2 / 3 < found["ours"].device_seconds < asked
    alone = jigsaw.replay(jigsaw.jobs(1e-3), jigsaw.AWARE)
    assert alone.device_seconds == pytest.approx(asked)
    assert alone.mean_completion_seconds == pytest.approx(sum(job.work for job in trace) / len(trace))


def test_spb_costs_of_equal_blocks_are_the_closed_forms() -> None:
    for depth in spb.DEPTHS:
        share = depth / spb.BLOCKS
        assert spb.compute_fraction(spb.EQUAL, depth) == pytest.approx((1 + 2 * share) / 3)
        assert spb.memory_fraction(spb.EQUAL, depth) == pytest.approx(share)
        assert spb.measured(depth)["bytes"] == pytest.approx(spb.traffic_fraction(spb.EQUAL, depth), rel=0.01)
    for n in spb.WORKERS:
        assert spb.stairs(n) == pytest.approx({"compute": (2 * n + 1) / (3 * n), "activations": (n + 1) / (2 * n)})


def test_spb_quality_holds_within_seeds_on_a_resnet_and_not_on_gpt() -> None:
    ratio, seeds = spb.quality("resnet", spb.STAIRS)
    assert 1 - ratio < seeds
    ratio, seeds = spb.quality("gpt", spb.STAIRS)
    assert ratio - 1 > 5 * seeds
