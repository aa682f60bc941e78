"""Seconds per step on a slow network: what a setting is called, and a slower processor."""

import argparse
import os
import time
from pathlib import Path

import pytest

from network import slower
from network.cluster import ClusterError
from network.speed import label_of, mean_compute


def options(model: str = "sleeping", processor: float = 1.0) -> argparse.Namespace:
    return argparse.Namespace(model=model, processor=processor)


def test_a_setting_is_called_by_what_is_unusual() -> None:
    assert label_of(options(), 1.0) == "1"
    assert label_of(options(), 3.0) == "3"
    assert label_of(options("linear"), 1.0) == "linear"
    assert label_of(options(processor=0.7), 1.0) == "processor*0.7"


@pytest.mark.parametrize(("model", "straggler"), [("linear", 1.0), ("sleeping", 3.0)])
def test_a_slower_processor_has_no_second_label(model: str, straggler: float) -> None:
    with pytest.raises(ClusterError, match=r"processor=0\.7 goes without --model and --stragglers"):
        label_of(options(model, 0.7), straggler)


def test_sleeping_layers_take_as_long_on_a_slower_processor() -> None:
    assert mean_compute(0.3, 8, "processor*0.7") == mean_compute(0.3, 8, "1") == 0.3
    assert mean_compute(0.3, 8, "3") == pytest.approx(0.375)
    assert mean_compute(0.3, 8, "linear") == 0


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_what_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(ClusterError, match=f"processor={share:g} is no share"), slower.processor(share):
        pass


def test_a_system_without_control_groups_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slower, "GROUPS", tmp_path / "nowhere")
    with pytest.raises(ClusterError, match=r"no control group can be made in .*No such file"), slower.processor(0.5):
        pass


def test_a_process_gets_no_more_than_its_share_and_all_of_it_afterwards() -> None:
    quarter = 0.25 / (os.cpu_count() or 1)
    before = Path("/proc/self/cgroup").read_text()
    began, used = time.monotonic(), time.process_time()
    try:
        with slower.processor(quarter):
            while time.process_time() - used < 0.25:
                pass
    except ClusterError as error:
        pytest.skip(f"needs a control group of its own: {error}")
    assert time.monotonic() - began > 0.8  # a quarter of one processor: a second, less what a period is short of
    assert Path("/proc/self/cgroup").read_text() == before
