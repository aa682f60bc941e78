"""Scheduler client of a sweep's member: asks the arbiter for a device, and waits until it is granted."""

import json
import math
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from lightning_decentral.sweep.plan.arbiter import Instruction, TurnReport
from lightning_decentral.sweep.plan.policy import MODES, Score, Watched
from lightning_decentral.sweep.wire.own_clock import standing_still

# Environment variable in every process of a member, with its Admission.
VARIABLE = "LIGHTNING_DECENTRAL_SWEEP"
LONGEST_BYTES = 1 << 16  # maximum of a message, which usually has some hundred


@dataclass(frozen=True)
class Admission:
    """Admission of a member to its sweep: the settings that its process needs."""

    socket: str  # path of the arbiter's socket
    member: str  # the member's name
    width: int = 1  # number of granted devices
    quantum_seconds: float = 0.25  # seconds after which a grant should be returned
    memory_bytes: int | None = None  # of its device; None: no limit
    threads: int | None = None  # processor threads for computing, on a CPU device
    watched: Watched | None = None  # the score that the member reports, and may be ended for; None: none
    cores: Mapping[str, Sequence[int]] | None = None  # of each device (`Arbiter.cores`)

    def variable(self) -> dict[str, str]:
        """Environment variable that passes the admission to a process."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def found(cls, environment: Mapping[str, str] = os.environ) -> "Admission | None":
        """Read this process's admission from its environment; None outside a sweep."""
        text = environment.get(VARIABLE)
        return None if text is None else cls(**json.loads(text))


class Baggage(Protocol):
    """Interface of a member's state on its device, which is moved to the host and back at the scheduler's request."""

    def leave(self) -> None:
        """Move all state to the host."""

    def enter(self) -> None:
        """Move all state back to the device."""


class Seat:
    """Connection of a member to the arbiter; every wait raises SystemExit when the sweep has ended."""

    def __init__(self, admission: Admission, baggage: Baggage) -> None:
        self.admission, self.baggage = admission, baggage
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(admission.socket)
        self._lines, self._orders = Lines(self._connection), deque[Instruction]()
        self.held, self.device = False, None  # the device that a worker was granted, where workers ask one by one
        self._since = self._before_seconds = 0.0  # when the present grant began; seconds of earlier grants
        write(self._connection, {"say": "hello", "member": admission.member})

    @property
    def spent_seconds(self) -> float:
        return time.perf_counter() - self._since if self.held else 0.0

    @property
    def worked_seconds(self) -> float:
        return self._before_seconds + self.spent_seconds

    @property
    def fresh(self) -> bool:
        """True if there is a grant with time left."""
        return self.held and self.spent_seconds < self.admission.quantum_seconds

    def take(self, turn: TurnReport) -> None:
        """Return with a grant: the present one while time is left, otherwise the next one from the arbiter."""
        if not self.fresh:
            with standing_still():
                # A renewal is one message: it returns a grant and asks for the next.
                self._end("renew" if self.held else "request", turn)
                try:
                    while not self.held:
                        self._follow(self._next())
                except BaseException:
                    self.baggage.enter()  # a member that is interrupted while it waits may still save its state
                    raise
            self._since = time.perf_counter()

    def give(self, turn: TurnReport) -> None:
        """Free the device for other members."""
        if self.held:
            self._end("release", turn)

    def ends(self, score: Score) -> bool:
        """Return whether the scheduler ends the training for this score; it answers at once."""
        with standing_still():
            write(self._connection, {"say": "score", **asdict(score)})
            while (order := self._next()) not in (Instruction.GO_ON, Instruction.END):
                self._follow(order)  # another order may arrive before the answer
        return order is Instruction.END

    def vacate(self) -> None:
        """Report that this member has nothing on the device any more."""
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
            self.held = order is Instruction.RUN  # ENTER only loads its tensors, ahead of the grant

    def _next(self) -> Instruction:
        try:
            while not self._orders:
                for message in self._lines.arrived():
                    self._orders.append(Instruction(message["order"]))
                    self.device = message.get("device")
        except EOFError:
            sys.exit("the sweep has ended")
        return self._orders.popleft()


def turn_of(message: Mapping[str, Any]) -> TurnReport:
    """Read a report from a member's message; ValueError for a value that isn't a number."""
    found = {key: message[key] for key in asdict(TurnReport()) if key in message}
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None) if key != "kept_bytes" else int)):
            raise ValueError(f"{key}={value!r:.40} is no number")
    if not 0 <= (found.get("piece_seconds") or 0.0) < math.inf:
        raise ValueError(f"piece_seconds={found['piece_seconds']!r:.40} is no duration")
    return replace(TurnReport(), **found)


def score_of(message: Mapping[str, Any]) -> Score:
    """Read a score from a member's message; ValueError without a name, a mode or a number."""
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
    """Reads the messages that arrive on one socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def arrived(self) -> Iterator[Message]:
        """Read once, which may wait, and yield complete messages. EOFError: the other side is gone. ValueError:
        malformed data."""
        try:
            chunk = self.connection.recv(1 << 16)
        except ConnectionResetError:  # it was killed with unread messages
            chunk = b""
        if not chunk:
            raise EOFError("the other side has closed the connection")
        # A message may arrive in pieces.
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
