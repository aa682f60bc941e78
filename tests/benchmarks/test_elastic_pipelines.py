"""Pipelines that lose a stage: a pipeline is one worker of a run, and what was measured says what the pages say."""

import statistics
import time
from typing import Any

import pytest

from elastic.pipelines import LENGTH, VOCABULARY, Pipelines, Stages, sequences
from elastic.run import FORK, Here
from elastic.worker import Job
from pages.choosing import result
from tests.docs.pages import ROOT


def test_sequences_can_be_learned() -> None:
    ids = sequences(0, 400)
    assert ids.shape == (400, LENGTH)
    assert 0 <= int(ids.min()) <= int(ids.max()) < VOCABULARY
    ruled = (5 * ids[:, :-1] + 3) % VOCABULARY == ids[:, 1:]
    assert 0.85 < float(ruled.double().mean()) < 0.92  # seven of eight, and one of 32 of the others


def stages(struck: int, *seconds: float) -> Stages:
    """Processes that sleep for so long."""
    processes = [FORK.Process(target=time.sleep, args=(each,)) for each in seconds]
    for process in processes:
        process.start()
    return Stages(processes, struck)


@pytest.mark.timeout(60)
def test_a_lost_stage_leaves_the_others_to_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    found = stages(0, 50, 0.5)
    assert found.is_alive()
    assert found.pid == found.processes[0].pid
    seconds = found.lose()
    assert seconds is not None
    assert 0 < seconds < 10
    assert [process.exitcode for process in found.processes] == [-9, 0]
    monkeypatch.setattr("elastic.pipelines.ENDING_SECONDS", 0.2)
    found = stages(1, 50, 50)
    assert found.lose() is None
    assert [process.exitcode for process in found.processes] == [-9, -9]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_pipeline_that_loses_its_last_stage_holds_nobody_up_and_is_replaced(tmp_path: Any) -> None:
    """Two pipelines: the other one steps on while the lost one's first stage finds out whom it has lost."""
    with Pipelines(Job(tmp_path, 2, -1, 0.02, 10.0), Here()) as run:
        run.until(lambda: all(len(run.said(name, "step")) > 3 for name in run.alive))
        name, other = sorted(run.alive)
        run.alive[name].struck = 1
        at = run.lose(name)
        ended = run.ended[name]
        assert ended is not None
        meanwhile = [step for step in run.said(other, "step") if at < step["at"] < at + ended]
        assert len(meanwhile) > 3  # it asks for 2.5 s
        new = run.start()
        run.until(lambda: len(run.said(new, "step")) > 3)
        assert run.said(new, "step")[0]["step"] > run.said(name, "step")[-1]["step"]


def test_pages_have_what_was_measured() -> None:
    rows = result("elastic-pipelines-2-cores.json")["losses"]
    beyond = statistics.median(one for row in rows for one in row["beyond"])
    joined = [statistics.median(row["joined"] for row in rows if row["stage"] == stage) for stage in (0, 1)]
    text = " ".join((ROOT / "docs" / "elastic.md").read_text().split())
    assert f"others lost {beyond:.1f} s, and a new one took part after {joined[0]:.0f} to {joined[1]:.0f} s" in text
    # Less than the seconds for which a pipeline asks who is lost.
    assert max(one for row in rows for one in row["beyond"]) < 2.5 < min(row["ended"] for row in rows if row["stage"])
