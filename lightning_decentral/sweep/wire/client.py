"""Scheduler client of a sweep's member: it asks the arbiter for its device, and waits until it has it."""

import json
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from lightning_decentral.sweep.plan.arbiter import Instruction, TurnReport
from lightning_decentral.sweep.plan.policy import MODES, Score, Watched
from lightning_decentral.sweep.wire.own_clock import standing_still

# In the environment of every process of a member: its Admission.
VARIABLE = "LIGHTNING_DECENTRAL_SWEEP"
LONGEST_BYTES = 1 << 16  # of a message, which has some hundred


@dataclass(frozen=True)
class Admission:
    """Admission of a member to its sweep: what it knows of it."""

    socket: str  # path of the arbiter's socket
    member: str  # its name
    width: int = 1  # devices that it was granted
    quantum_seconds: float = 0.25  # after how long it should return a grant
    memory_bytes: int | None = None  # of its device; None: no limit
    threads: int | None = None  # processor threads to compute with, on a device that is one
    watched: Watched | None = None  # the scores that it is asked for, and may be ended for; None: none

    def variable(self) -> dict[str, str]:
        """The environment variable that carries it."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def found(cls, environment: Mapping[str, str] = os.environ) -> "Admission | None":
        """Admission of this process, from its environment; None outside a sweep."""
        text = environment.get(VARIABLE)
        return None if text is None else cls(**json.loads(text))


class Baggage(Protocol):
    """State of a member on its device: it leaves and comes back when the scheduler asks."""

    def leave(self) -> None:
        """Move all of it to the host."""

    def enter(self) -> None:
        """Move all of it to the device again."""


class Seat:
    """One member's connection to the arbiter; any wait raises SystemExit when the sweep has ended."""

    def __init__(self, admission: Admission, baggage: Baggage) -> None:
        self.admission, self.baggage = admission, baggage
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(admission.socket)
        self._lines, self._orders = Lines(self._connection), deque[Instruction]()
        self.held = False
        self._since = self._before_seconds = 0.0  # when the present grant began; seconds of those before it
        write(self._connection, {"say": "hello", "member": admission.member})

    @property
    def spent_seconds(self) -> float:
        return time.perf_counter() - self._since if self.held else 0.0

    @property
    def worked_seconds(self) -> float:
        return self._before_seconds + self.spent_seconds

    @property
    def fresh(self) -> bool:
        """True where there is a grant with time left."""
        return self.held and self.spent_seconds < self.admission.quantum_seconds

    def take(self, turn: TurnReport) -> None:
        """Returns with a grant: the present one while it is fresh, otherwise the next one, as the arbiter sees fit."""
        if not self.fresh:
            with standing_still():
                # A renewal is one message: it returns a grant and asks for the next.
                self._end("renew" if self.held else "request", turn)
                try:
                    while not self.held:
                        self._follow(self._next())
                except BaseException:
                    self.baggage.enter()  # a member that is interrupted while it waits may still save what it has
                    raise
            self._since = time.perf_counter()

    def give(self, turn: TurnReport) -> None:
        """The device is free for others."""
        if self.held:
            self._end("release", turn)

    def ends(self, score: Score) -> bool:
        """Return whether the training is over with this score: the scheduler's answer, which comes at once."""
        with standing_still():
            write(self._connection, {"say": "score", **asdict(score)})
            while (order := self._next()) not in (Instruction.GO_ON, Instruction.END):
                self._follow(order)  # another order may come before the answer
        return order is Instruction.END

    def vacate(self) -> None:
        """Report that nothing of this member is on the device any more."""
        write(self._connection, {"say": "left"})

    def _end(self, event: str, turn: TurnReport) -> None:
        self._before_seconds, self.held = self.worked_seconds, False
        write(self._connection, {"say": event, **asdict(turn)})

    def _follow(self, order: Instruction) -> None:
        if order is Instruction.LEAVE:
            self.baggage.leave()
            self.vacate()
        else:
            self.baggage.enter()
            self.held = order is Instruction.RUN  # ENTER brings its tensors alone, ahead of the grant

    def _next(self) -> Instruction:
        try:
            while not self._orders:
                self._orders.extend(Instruction(message["order"]) for message in self._lines.arrived())
        except EOFError:
            sys.exit("the sweep has ended")
        return self._orders.popleft()


def turn_of(message: Mapping[str, Any]) -> TurnReport:
    """The report in a message of a member; ValueError for a value that is no number."""
    found = {key: message[key] for key in asdict(TurnReport()) if key in message}
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None) if key != "kept_bytes" else int)):
            raise ValueError(f"{key}={value!r:.40} is no number")
    return replace(TurnReport(), **found)


def score_of(message: Mapping[str, Any]) -> Score:
    """The score in a message of a member; ValueError for no name, no direction or no number."""
    metric, mode, step, value = (message.get(key) for key in ("metric", "mode", "step", "value"))
    if not isinstance(metric, str) or not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"{metric!r:.40}, {mode!r:.40} is no metric")
    if type(step) is not int or type(value) is not float:
        raise ValueError(f"step={step!r:.40}, value={value!r:.40} is no score")
    return Score(metric, mode, step, value)


Message = dict[str, Any]


def write(connection: socket.socket, message: Message) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


class Lines:
    """The messages that arrive on one socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def arrived(self) -> Iterator[Message]:
        """Reads once, which may wait, and yields what is whole. EOFError: the other side is gone. ValueError: what came
        is no message."""
        try:
            chunk = self.connection.recv(1 << 16)
        except ConnectionResetError:  # it was killed with messages unread
            chunk = b""
        if not chunk:
            raise EOFError("the other side has closed the connection")
        # A message may come in pieces.
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        for line in whole:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                raise ValueError(f"{line!r:.40} is no JSON") from None
            if not isinstance(found, dict):
                raise ValueError(f"{found!r:.40} is no message")
            yield found
        if len(self._rest) > LONGEST_BYTES:
            raise ValueError(f"a line of more than {LONGEST_BYTES} bytes")
