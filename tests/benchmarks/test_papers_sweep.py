"""The rows of "Against the papers" on many models on few devices: what their simulations stand on."""

import pytest

from papers import hydra


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
