"""Server (scheduler) of a running sweep: starts members as processes, and one thread serves their messages."""

import os
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus

from lightning_decentral.shared.compute.hardware import cores
from lightning_decentral.shared.wire.meeting.interrupts import terminated_as_interrupted
from lightning_decentral.sweep.member import (
    MemberFailed,
    SweepMember,
    begin_record,
    read_record,
    returned,
    write_scores,
)
from lightning_decentral.sweep.plan.arbiter import Arbiter, Instruction
from lightning_decentral.sweep.plan.policy import Score, Scoreboard
from lightning_decentral.sweep.processes import Lifeline, kill_group
from lightning_decentral.sweep.wire.client import Admission, Message, score_of, turn_of
from lightning_decentral.sweep.wire.seats import Seats

if TYPE_CHECKING:
    import lightning_decentral.sweep.progress as progress

# How long interrupted members may take to close their files.
GRACE_SECONDS = 8.0
REFRESH_SECONDS = 0.5

Starts = Callable[[SweepMember, Mapping[str, str], Lifeline], Any]
"""Starts a member's process: (member, environment, lifeline) -> a multiprocessing process."""


class Sweep:
    """Runs all members of a sweep to their end; members that fail don't stop the others."""

    def __init__(
        self,
        members: Sequence[SweepMember],
        arbiter: Arbiter,
        starts: Starts,
        watcher: "progress.LiveTable",  # informed of the sweep's progress
        alive: int,  # maximum number of members' processes at once
        scores: Scoreboard | None = None,  # of members that ran earlier, to compare with; new scores are added
    ) -> None:
        self.members = {member.name: member for member in members}
        self.arbiter, self._starts, self._watcher, self._alive = arbiter, starts, watcher, alive
        self.scores = scores or Scoreboard()
        self.outcomes: dict[str, JobReturn] = {}
        self.processes: dict[str, Any] = {}
        self._queue = {member.name: member for member in members}
        self._selector = selectors.DefaultSelector()
        gone = lambda name: self.arbiter.gone(name, self.now)  # noqa: E731
        self.seats = Seats(self._selector, self._expects, self.receive, gone)
        self._shown = 0.0
        self.began = time.perf_counter()

    @property
    def now(self) -> float:
        return time.perf_counter() - self.began

    def run(self) -> dict[str, JobReturn]:
        """Return the outcomes by member name; on KeyboardInterrupt all members are ended first, then it is raised."""
        # A folder that only this user may enter: whoever may write to the socket may ask for a device. Members remove
        # the folder if the sweep is killed.
        with tempfile.TemporaryDirectory(prefix="sweep-") as folder, socket.socket(socket.AF_UNIX) as listener:
            self._path = str(Path(folder) / "arbiter")
            listener.bind(self._path)
            listener.listen()
            self._selector.register(listener, selectors.EVENT_READ, self.seats.accept)
            self._lifeline = Pipe(duplex=False)
            for member in self._queue.values():
                begin_record(member)
            try:
                with terminated_as_interrupted():
                    self._work()
            finally:
                self._end_all()
        return self.outcomes

    def _work(self) -> None:
        while self._queue or self.processes:
            while len(self.processes) < self._alive and (name := self.arbiter.next_start(list(self._queue), self.now)):
                self._start(self._queue.pop(name))
            for key, _ in self._selector.select(min(REFRESH_SECONDS, self.arbiter.rests_seconds(self.now))):
                if self._selector.get_map().get(key.fd) is key:  # an earlier event may have closed it
                    key.data(key.fileobj)
            for name, order in self.arbiter.settle(self.now):
                self._give(name, order)
            if self.now - self._shown >= REFRESH_SECONDS:
                # A sentinel doesn't fire while a process that the member left behind keeps it open.
                for name in [name for name, process in self.processes.items() if process.exitcode is not None]:
                    self._ended(self.members[name])
                self._watcher.show(self)
                self._shown = self.now
        self._watcher.show(self)

    def _give(self, name: str, order: Instruction) -> None:
        if order is Instruction.END:
            kill_group(self.processes[name].pid)
        else:
            self.seats.write(name, {"order": order.value, "device": self.arbiter.place(name)})

    def _start(self, member: SweepMember) -> None:
        account = self.arbiter.join(member.name, member.width)
        admission = Admission(
            socket=self._path,
            member=member.name,
            width=account.width,
            quantum_seconds=self.arbiter.lasts_seconds(account.width),
            memory_bytes=self.arbiter.memory_bytes,
            threads=max(1, cores() // len(self.arbiter.devices)),
            watched=self.arbiter.policy.watched,
            cores=self.arbiter.cores,
        )
        process = self._starts(member, {**environment(account.home), **admission.variable()}, self._lifeline)
        self.processes[member.name] = process
        self._selector.register(process.sentinel, selectors.EVENT_READ, lambda _: self._ended(member))

    def _ended(self, member: SweepMember) -> None:
        process = self.processes.pop(member.name)
        self._selector.unregister(process.sentinel)
        process.join()
        if process.exitcode:  # the member had no time to end what it had started
            kill_group(process.pid)
        for name in self.arbiter.seats(member.name):
            self.seats.hang_up(name)
        self.arbiter.leave(member.name, self.now)
        try:
            ended = MemberFailed("RuntimeError", f"the process ended with exit code {process.exitcode}")
            outcome = read_record(member) or returned(member, JobStatus.FAILED, ended)
        except ValueError as error:
            outcome = returned(member, JobStatus.FAILED, MemberFailed.of(error))
        self.outcomes[member.name] = outcome
        self._watcher.ended(member, outcome)

    # ---- members' messages ------------------------------------------------------------------------------------------

    def receive(self, name: str, message: Message) -> None:
        """Act on a member's message. ValueError for a message that no member sends."""
        match message.get("say"):
            case "request":
                self.arbiter.request(name)
            case "renew" | "release" as event:
                self.arbiter.give_back(name, turn_of(message), self.now)
                if event == "renew":
                    self.arbiter.request(name)
            case "left":
                self.arbiter.left(name)
            case "score":
                self._judge(name, score_of(message))
            case event:
                raise ValueError(f"say={event!r:.40} means nothing")

    def _judge(self, name: str, score: Score) -> None:
        """Judge a new score; a member that was ended before and resumes from an earlier checkpoint stays ended."""
        self.scores.add(name, score)
        verdict = self.scores.verdicts.get(name) or self.arbiter.policy.verdict(self.scores.histories, name)
        if verdict is not None:
            self.scores.verdicts[name] = verdict
            self._watcher.judged(self.members[name], verdict)
        write_scores(self.members[name], self.scores)
        self.seats.write(name, {"order": (Instruction.END if verdict else Instruction.GO_ON).value})

    def _expects(self, name: str) -> bool:
        return any(name in self.arbiter.seats(member) for member in self.processes)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def _end_all(self) -> None:
        """Interrupt all live members as by Ctrl-C; after a delay kill them with all that they started."""
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
        deadline = time.perf_counter() + GRACE_SECONDS
        try:
            for process in self.processes.values():
                process.join(max(0.0, deadline - time.perf_counter()))
        finally:  # a second Ctrl-C comes here at once
            for end in self._lifeline:
                end.close()
            for process in self.processes.values():
                kill_group(process.pid)
                process.join()
            self._selector.close()


def environment(devices: Sequence[str], visible: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment in which a process sees only these GPUs, out of those that this process sees."""
    numbers = [int(device.partition(":")[2]) for device in devices if device.startswith("cuda")]
    seen = visible.get("CUDA_VISIBLE_DEVICES")
    names = [str(n) if seen is None else seen.split(",")[n] for n in numbers]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)} if names else {}
