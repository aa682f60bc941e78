"""The same dispatch with real processes: every piece once, in order, where the simulation may put it."""

import itertools
import os
import subprocess

import pytest

from lightning_decentral.sweep import FIFO, LRTF
from lightning_decentral.sweep.plan.dispatch import Queue, WorkPiece, devices
from lightning_decentral.sweep.plan.simulation import Ran, computed, simulate
from sweep.dummy_jobs import PROGRAM, Computing, DummyJob, Sleeping, cores


@pytest.mark.parametrize("stand_in", [Sleeping(), Computing(calibration_seconds=0.02)], ids=lambda s: type(s).__name__)
def test_pieces_really_run_one_at_a_time(stand_in: DummyJob) -> None:
    queues = [
        Queue("a", (WorkPiece(0.01, 0.02),) * 3),
        Queue("b", (WorkPiece(0.02),) * 2),
        Queue("c", (WorkPiece(0.01, 0.01),) * 2, arrival_seconds=0.03),
    ]
    there = devices(min(2, len(cores())))
    spans = stand_in.rehearse(queues, there, LRTF())
    assert set(spans) == set(simulate(queues, there, LRTF()))
    for queue in queues:
        own = [spans[Ran(queue.name, i)] for i in range(len(queue.pieces))]
        assert own[0].start >= queue.arrival_seconds
        assert all(a.finish <= b.start for a, b in itertools.pairwise(own))
    for device in there:
        edges = sorted((s.start, s.finish) for s in computed(spans).values() if s.worker == device.name)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(edges))
    for ran, span in computed(spans).items():
        load = spans.get(Ran(ran.job, ran.piece, load=True))
        assert load is None or load.finish <= span.start
    if isinstance(stand_in, Sleeping):
        pieces = {queue.name: queue.pieces for queue in queues}
        lengths = [
            (span.finish - span.start, pieces[r.job][r.piece].compute_seconds) for r, span in computed(spans).items()
        ]
        assert all(took >= asked for took, asked in lengths)


def children() -> set[str]:
    """Processes of this one."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return set(listed.stdout.split())


def test_no_process_stays() -> None:
    before = children()
    Sleeping().rehearse([Queue("a", (WorkPiece(0.0),))], devices(1), FIFO())
    assert len(children() - before) <= 1  # ps itself


def test_a_stand_in_ends_with_its_parents_pipe() -> None:
    process = subprocess.Popen([*PROGRAM, "sleep"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 0
    assert process.stdout is not None
    process.stdout.close()


def test_a_job_whose_process_ends_is_named() -> None:
    class Failing(DummyJob):
        def words(self, devices: int) -> list[str]:
            return ["calibrate", "0.0"]  # prints a number and ends

    with pytest.raises(RuntimeError, match="the process of job a ended"):
        Failing().rehearse([Queue("a", (WorkPiece(60.0),))], devices(1), FIFO())


def test_more_devices_than_cores_can_only_sleep() -> None:
    with pytest.raises(ValueError, match="devices that compute need as many cores: let them sleep"):
        Computing().words(len(cores()) + 1)
