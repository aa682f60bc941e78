"""A member's clock against a simulated one, which only a test's hand moves: every name and thread."""

import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer

from lightning_decentral.sweep import time_slicing
from lightning_decentral.sweep.time_slicing import Gate
from lightning_decentral.sweep.wire import client, own_clock
from lightning_decentral.sweep.wire.client import Admission
from lightning_decentral.sweep.wire.own_clock import standing_still
from tests.tiny import QUIET, Net, SizedBatches, in_processes

BEGIN_NS = 1_700_000_000 * 10**9


class Hand:
    """Of a clock that stands still but for `on`, in the place of this process's clocks."""

    def __init__(self) -> None:
        self.ns = BEGIN_NS
        for name in own_clock.SECONDS:
            setattr(time, name, named(name, lambda: 1e-9 * self.ns))
            setattr(time, f"{name}_ns", named(f"{name}_ns", lambda: self.ns))
        own_clock._true_ns = time.monotonic_ns

    def on(self, seconds: float) -> None:
        self.ns += round(1e9 * seconds)


def named(name: str, function: Callable[[], Any]) -> Callable[[], Any]:
    function.__module__, function.__name__, function.__qualname__ = "time", name, name
    return function


def measured() -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by each way of asking, of the thread that has waited and of another."""
    hand = Hand()
    imported = time.monotonic  # `from time import monotonic`
    globals()["of_a_module"] = time.perf_counter

    class Watch:
        clock = time.time

        def __init__(self, default: Callable[[], float] = time.monotonic) -> None:
            self.kept, self.default = time.perf_counter, default

    watch, of_a_closure = Watch(), {"clock": imported}
    assert Watch.clock() == watch.kept(), "looked up once, which a type remembers"
    ways: dict[str, Callable[[], float]] = {
        **{name: lambda name=name: getattr(time, name)() for name in own_clock.SECONDS},
        **{name: lambda name=name: 1e-9 * getattr(time, name)() for name in own_clock.NANOSECONDS},
        "module": lambda: globals()["of_a_module"](),
        "dictionary": lambda: of_a_closure["clock"](),
        "class": lambda: Watch.clock(),
        "through an instance": lambda: watch.clock(),
        "instance": lambda: watch.kept(),
        "default": lambda: Watch().default(),
    }
    hand.on(1.0)
    with standing_still():
        hand.on(2.0)
        with standing_still():
            hand.on(4.0)
    hand.on(0.5)
    own = {way: ask() - 1e-9 * BEGIN_NS for way, ask in ways.items()}
    others: dict[str, float] = {}
    thread = threading.Thread(target=lambda: others.update({w: a() - 1e-9 * BEGIN_NS for w, a in ways.items()}))
    thread.start()
    thread.join()
    assert pickle.loads(pickle.dumps(time.monotonic)) is time.monotonic
    return own, others


def test_whatever_asks_for_the_time_gets_the_members_own() -> None:
    own, others = in_processes(measured)
    assert own == pytest.approx(dict.fromkeys(own, 1.5), abs=2e-6)
    assert others == pytest.approx(dict.fromkeys(own, 7.5), abs=2e-6)


class Connection:
    """Of a member whose every turn takes the others a minute."""

    hand: Hand

    def __init__(self, *_: Any) -> None:
        self.answer = b""

    def connect(self, path: str) -> None: ...

    def sendall(self, line: bytes) -> None:
        if b"request" in line or b"renew" in line:
            self.answer = b'{"order": "run"}\n'
        if b"score" in line:
            self.answer = b'{"order": "go on"}\n'

    def recv(self, size: int) -> bytes:
        self.hand.on(60.0)
        return self.answer

    def close(self) -> None: ...


class Second(Callback):
    """A step takes one, and this callback measures them."""

    def __init__(self) -> None:
        self.seconds = list[float]()

    def on_train_batch_start(self, *_: Any) -> None:
        self.began = time.perf_counter()

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        Connection.hand.on(1.0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)


def trained() -> tuple[int, list[float], float, float]:
    Connection.hand = Hand()
    client.socket.socket = Connection  # type: ignore[assignment, misc]
    second = Second()
    gate = Gate(Admission("", "0", quantum_seconds=2.5))
    trainer = Trainer(**QUIET, max_time={"seconds": 8}, max_steps=100, callbacks=[gate, second])
    trainer.fit(Net(), SizedBatches(6), SizedBatches(1))
    seat = time_slicing._SEATS[os.getpid()]
    (timer,) = (callback for callback in trainer.callbacks if isinstance(callback, Timer))
    return trainer.global_step, second.seconds, timer.time_elapsed("train"), seat.worked_seconds


def test_max_time_ends_a_member_after_its_own_seconds() -> None:
    steps, seconds, elapsed, worked = in_processes(trained)
    assert steps == 8, "of a second each, whatever the others took"
    assert seconds == pytest.approx([1.0] * 8, abs=1e-5)
    assert elapsed == pytest.approx(8.0, abs=1e-5)
    assert worked == pytest.approx(8.0, abs=1e-5)
