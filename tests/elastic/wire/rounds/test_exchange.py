"""Workers as processes that kill themselves in each phase: the others go on, keep their mean, and let newcomers in."""

import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_decentral.elastic.plan.view import Times
from lightning_decentral.elastic.wire.joining import Endpoint
from lightning_decentral.elastic.wire.rounds.exchange import ElasticExchange
from lightning_decentral.elastic.wire.sockets import frames, mesh
from lightning_decentral.gossip.compute.combine.gossip import Gossip
from lightning_decentral.gossip.compute.combine.sums import PushSum
from lightning_decentral.gossip.plan.topology.static import Ring
from lightning_decentral.gossip.plan.weights import Own
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.shared.compute.buckets import Bucket
from lightning_decentral.shared.compute.worker_state import digest
from tests import world
from tests.elastic.wire.lobbies import DEAD, LobbyProcess, ends_with, losses

SECONDS = 100.0
FORK = multiprocessing.get_context("fork")


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_while_sending(armed: Any) -> None:
    """After `armed` was set, when the head of a message has left, and its tensor hasn't."""
    whole = mesh.frame

    def frame(message: Any) -> bytes:
        if "slot" in message and armed.is_set():
            mesh.Line._send = die  # type: ignore[method-assign]
        return whole(message)

    mesh.frame = frame  # type: ignore[attr-defined]


def dies_while_healing() -> None:
    frames.unpack = die  # type: ignore[attr-defined, assignment]


def dies_while_serving(armed: Any) -> None:
    """One worker, the first that is asked after `armed` was set: when the newcomer has the head and nothing else."""
    whole = frames.frame

    def frame(message: Any) -> bytes:
        if "origin" in message and armed.is_set():
            armed.clear()
            frames.raw_bytes = die  # type: ignore[attr-defined, assignment]
        return whole(message)

    frames.frame = frame  # type: ignore[attr-defined]


def train(parent: int, lobby: str, pipe: Any, stop: Any, dies: Any, prepare: Callable[[], None] | None) -> None:
    ends_with(parent)
    if prepare:
        prepare()
    while not stop.is_set():
        live(lobby, pipe, stop, dies)


def live(lobby: str, pipe: Any, stop: Any, dies: Any) -> None:
    """Mix until it is told to stop, or the run went on without it, and report every round; a first step sets the
    workers apart. Once `dies` is set it dies where a message would leave."""
    worker = Endpoint(lobby, "127.0.0.1", Times(DEAD))
    bucket = Bucket([nn.Parameter(torch.zeros(100, dtype=torch.float64))])
    exchange = ElasticExchange(Ring(), Own(), worker)
    mixer = Mixer([bucket], Gossip(), exchange, delay=0)
    copies, lost = list[str](), losses(worker.mesh)

    def copy() -> dict[str, Any]:
        value = {"x": bucket.flat.clone(), "of": worker.name}
        copies.append(digest(value))
        pipe.send(("copied", worker.name, copies[-1]))
        return value

    value = worker.healed(SECONDS)
    if value is not None:
        bucket.flat.copy_(value["x"])
        pipe.send(("healed", worker.name, value["of"], digest({**value, "x": bucket.flat})))
    first = True
    while not stop.is_set():
        try:
            view, round = worker.begin(0.02, copy, 0.5)
        except TimeoutError as waits:
            if worker.lobby_client.state.out:
                pipe.send(("out", worker.name, str(waits)))
                break
            continue
        exchange.enter(view, round)
        if first:
            bucket.flat.add_(torch.randn(len(bucket.flat), generator=torch.Generator().manual_seed(os.getpid())))
        if dies is not None and dies.is_set():
            exchange.depart = die  # type: ignore[method-assign]
        first, mixer.round = False, round
        mixer.step()
        pipe.send(("round", worker.name, view.number, view.members, round, bucket.flat.tolist(), len(lost)))
        time.sleep(0.02)
    worker.leave()


class Run:
    """Workers that the test starts, and what they report."""

    def __init__(self, lobby: LobbyProcess) -> None:
        self._lobby, self._stop = lobby, FORK.Event()
        self._ends: dict[Any, Any] = {}
        self.said: list[tuple[Any, ...]] = []
        self.end = time.monotonic() + SECONDS

    def start(self, dies: Any = None, prepare: Callable[[], None] | None = None) -> Any:
        own, other = FORK.Pipe(duplex=False)
        process = FORK.Process(target=train, args=(os.getpid(), self._lobby.place, other, self._stop, dies, prepare))
        process.start()
        other.close()
        self._ends[own] = process
        return process

    def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            assert time.monotonic() < self.end, self.said[-1:]
            self._read(0.05)

    def _read(self, seconds: float) -> None:
        for own in multiprocessing.connection.wait(list(self._ends), seconds):
            try:
                self.said.append(own.recv())  # type: ignore[union-attr]
            except EOFError:
                self._ends.pop(own).join()

    def members(self) -> int:
        """Of the last view that all its members have had a round in."""
        had = defaultdict(set)
        for kind, name, *rest in self.said:
            if kind == "round":
                had[rest[0], rest[1]].add(name)
        return next((len(key[1]) for key in sorted(had, reverse=True) if set(key[1]) == had[key]), 0)

    def healed(self) -> list[tuple[Any, ...]]:
        return [said for said in self.said if said[0] == "healed"]

    def trained(self) -> set[str]:
        return {said[1] for said in self.said if said[0] == "round"}

    def finish(self) -> None:
        self._stop.set()
        self.until(lambda: not self._ends)

    def kill(self) -> None:
        for process in self._ends.values():
            process.kill()


def means_kept(said: list[tuple[Any, ...]]) -> int:
    """How many pairs of consecutive rounds were landed by the same workers, whose mean is asserted to be the same."""
    rounds: dict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    first: dict[str, int] = {}
    for kind, name, *rest in said:
        if kind == "round":
            rounds[rest[2]][name] = torch.tensor(rest[3], dtype=torch.float64)
            first[name] = min(first.get(name, 10**9), rest[2])
    kept = 0
    for round in sorted(rounds):
        now, then = rounds[round], rounds.get(round + 1, {})
        if set(now) == set(then) and all(first[name] <= round for name in now):
            before, after = (torch.stack([xs[name] for name in sorted(now)]).mean(0) for xs in (now, then))
            torch.testing.assert_close(after, before, rtol=0, atol=1e-12)
            kept += 1
    return kept


def test_workers_die_in_each_phase_and_newcomers_come() -> None:
    assert not world.made
    armed, doomed = FORK.Event(), FORK.Event()

    def serves() -> None:
        dies_while_serving(armed)

    with LobbyProcess(least=2, most=5) as lobby:
        run = Run(lobby)
        try:
            stays = run.start(prepare=serves)
            for words in ({"prepare": serves}, {"prepare": serves}, {"dies": doomed}):
                run.start(**words)
            run.start(prepare=lambda: dies_while_sending(doomed))
            run.until(lambda: run.members() == 5)
            doomed.set()
            run.until(lambda: run.members() == 3)

            os.kill(stays.pid, signal.SIGSTOP)
            run.until(lambda: run.members() == 2)
            os.kill(stays.pid, signal.SIGCONT)
            run.until(lambda: run.members() == 3)

            victim = run.start(prepare=dies_while_healing)
            run.until(lambda: victim.exitcode is not None)
            lobby.kill()
            rounds = len(run.said)
            run.until(lambda: len(run.said) > rounds + 30)
            lobby.start()

            armed.set()
            run.start()
            run.start()
            run.until(lambda: not armed.is_set())
            run.until(lambda: len(run.healed()) == 7)  # four at the beginning, who was stopped, and these two
            run.until(lambda: {said[1] for said in run.healed()[-2:]} <= run.trained())
            run.finish()
        finally:
            run.kill()
    assert means_kept(run.said) > 50
    assert [said[0] for said in run.said].count("out") == 1
    assert any(said[0] == "round" and said[-1] for said in run.said)  # messages of the dead didn't come
    copies = {said[-1] for said in run.said if said[0] == "copied"}
    assert {said[-1] for said in run.healed()} <= copies


def test_a_rule_whose_numbers_belong_to_all_together_is_refused() -> None:
    exchange = ElasticExchange(Ring(), Own(), worker=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="PushSum isn't compatible with elastic: its state"):
        exchange.admit([torch.zeros(3)], PushSum())
