"""Dummy jobs for a schedule: every job a process, every piece a stand-in of its length, granted by the same dispatch.

What is rehearsed is the schedule: processes, hand-overs, cores, the policy's decisions at real times. A piece is not
the model's own computation but as much waiting (`Sleeping`) or hashing (`Computing`); a load is waiting.
"""

import heapq
import os
import selectors
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.sweep.plan.dispatch import Dispatch, DispatchOrder, Processor, Queue
from lightning_decentral.sweep.plan.policy import Policy
from lightning_decentral.sweep.plan.simulation import Ran, Spans, row
from sweep import stand_in

PROGRAM = [sys.executable, "-I", "-S", str(Path(stand_in.__file__))]


class DummyJob(ABC):
    """Base of dummy jobs: what a piece does.

    Attributes:
        said: what was real in a rehearsal.
    """

    said: ClassVar[str]

    @abstractmethod
    def words(self, devices: int) -> list[str]:
        """Return the arguments of `stand_in`; measured here where it must be.

        Raises:
            ValueError: so many devices can't be stood in for.
        """

    def core(self, device: int) -> int:
        """Return the core on which a device's stand-in works; 0 where it doesn't matter."""
        return 0

    def rehearse(self, queues: Sequence[Queue], devices: Sequence[Processor], policy: Policy) -> Spans:
        """Return when each piece really ran: seconds since the beginning, from the grant to the answer.

        Raises:
            ValueError: jobs that can't be scheduled, more devices than can be stood in for.
            RuntimeError: a job's process ended.
        """
        run = _Run(Dispatch(queues, devices, policy), self)
        try:
            return run.through()
        finally:
            run.end()


@dataclass(frozen=True)
class Sleeping(DummyJob):
    """Waits: as many devices as you like."""

    said = "processes that stand in for the pieces (sleep), not the models themselves"

    def words(self, devices: int) -> list[str]:
        """Nothing to measure."""
        return ["sleep"]


@dataclass(frozen=True)
class Computing(DummyJob):
    """Hashes on one core for each device, as many rounds as took the piece's seconds when measured alone."""

    said = "processes that stand in for the pieces (compute), not the models themselves"

    calibration_seconds: float = 0.3

    def words(self, devices: int) -> list[str]:
        """Rounds per second."""
        if sys.platform != "linux":
            raise ValueError("pieces that compute stay on a core, which only Linux grants: let them sleep")
        if devices > len(cores()):
            raise ValueError(f"{devices} devices that compute need as many cores: let them sleep")
        command = [*PROGRAM, "calibrate", str(self.calibration_seconds)]
        return ["compute", subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()]

    def core(self, device: int) -> int:
        """Each device its own."""
        return cores()[device]


STAND_INS: dict[str, DummyJob] = {"compute": Computing(), "sleep": Sleeping()}


def cores() -> list[int]:
    """Return the processor cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


class _Run:
    """One rehearsal."""

    def __init__(self, dispatch: Dispatch, stand_in: DummyJob) -> None:
        self._dispatch = dispatch
        self._command = [*PROGRAM, *stand_in.words(len(dispatch.devices))]
        self._cores = [stand_in.core(device) for device in range(len(dispatch.devices))]
        self._selector = selectors.DefaultSelector()
        self._timers = [(queue.arrival_seconds, -1, job) for job, queue in enumerate(dispatch.queues)]
        heapq.heapify(self._timers)
        self._running: dict[int, tuple[int, Ran, float]] = {}
        self._spans: Spans = {}
        self._jobs: list[subprocess.Popen[bytes]] = []

    def through(self) -> Spans:
        """Run until all pieces have run."""
        for job in range(len(self._dispatch.queues)):
            process = self._started()
            assert process.stdout is not None
            self._selector.register(process.stdout, selectors.EVENT_READ, job)
            self._ask(job, 0, 0.0)  # has it started?
            self._answer(job)
        self._began = time.perf_counter()
        while not self._dispatch.over:
            self._happen()
            for order in self._dispatch.orders():
                self._carry_out(order)
        return self._spans

    def _started(self) -> "subprocess.Popen[bytes]":
        """Start it in a session of its own: Ctrl-C reaches the parent, which ends it."""
        pipe = subprocess.PIPE
        self._jobs.append(subprocess.Popen(self._command, stdin=pipe, stdout=pipe, start_new_session=True))
        return self._jobs[-1]

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _happen(self) -> None:
        """Wait for the next event, and give the dispatch all events so far."""
        wait = max(0.0, self._timers[0][0] - self._now()) if self._timers else None
        for key, _ in self._selector.select(wait):
            self._answer(key.data)
            device, ran, start = self._running.pop(key.data)
            self._spans[ran] = Span(row(self._dispatch.devices[device], load=False), start, self._now())
            self._dispatch.finished(device)
        while self._timers and self._timers[0][0] <= self._now():
            _, device, job = heapq.heappop(self._timers)
            if device < 0:
                self._dispatch.arrive(job)
            else:
                self._dispatch.loaded(device)

    def _carry_out(self, order: DispatchOrder) -> None:
        piece = self._dispatch.queues[order.job].pieces[order.piece]
        ran, now = Ran(self._dispatch.queues[order.job].name, order.piece, order.load), self._now()
        if order.load:
            finish = now + piece.load_seconds
            self._spans[ran] = Span(row(self._dispatch.devices[order.device], load=True), now, finish)
            heapq.heappush(self._timers, (finish, order.device, order.job))
            return
        self._running[order.job] = (order.device, ran, now)
        self._ask(order.job, order.device, piece.compute_seconds)

    def _ask(self, job: int, device: int, seconds: float) -> None:
        stdin = self._jobs[job].stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # it ended: whoever reads its answer names it
            stdin.write(f"{self._cores[device]} {seconds!r}\n".encode())
            stdin.flush()

    def _answer(self, job: int) -> None:
        stdout = self._jobs[job].stdout
        assert stdout is not None
        if stdout.readline() != b"done\n":
            raise RuntimeError(f"the process of job {self._dispatch.queues[job].name} ended: see above")

    def end(self) -> None:
        """Every process."""
        self._selector.close()
        for process in self._jobs:
            process.kill()
            process.communicate()
