"""LAW: committed rounds are those of one process that adds up the counted displacements; members' states are equal."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_decentral.elastic.plan.view import View
from lightning_decentral.elastic.wire.rounds.commits import Commits
from lightning_decentral.elastic.wire.rounds.exchange import ElasticExchange
from lightning_decentral.gossip import (
    Codec,
    Complete,
    Every,
    Int2,
    Int4,
    Int8,
    Outer,
    OuterNesterov,
    Own,
    Plain,
    PseudoGradient,
    TopK,
)
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.shared.compute.worker_state import digest
from tests.elastic.wire.rounds.test_fixed_view import members
from tests.gossip.wire.test_exchange import Row

pytestmark = pytest.mark.threads

DIM, H, LR = 40, 2, 0.05
RULES = [Outer(lr=0.7, momentum=0.5), OuterNesterov(lr=0.6, momentum=0.8), PseudoGradient(lr=1.0, momentum=0.0)]
CODECS: list[Codec] = [Plain(), Int8(), Int4(), Int2(), TopK(fraction=0.1)]
CASES = [(rule, codec) for rule in RULES for codec in CODECS if codec.complete or isinstance(rule, PseudoGradient)]


class Members:
    """Threads as members of one view; the test says who isn't expected any more."""

    def __init__(self, workers: list[Any], view: View, rule: Any, codec: Codec, delay: int, dtype: Any) -> None:
        self.gone = set[str]()
        self.view, self.workers, self.mixers, self.exchanges = view, workers, list[Mixer](), list[ElasticExchange]()
        for worker in workers:
            state = SimpleNamespace(
                expects=lambda view, round, name: name not in self.gone,
                out="",
                mine=SimpleNamespace(view=view, sender=worker.name),
            )
            worker.lobby_client = SimpleNamespace(state=state, changed=worker.mesh.changed)
            commits = Commits(worker, seconds=20)
            exchange = ElasticExchange(Every(H, Complete()), Own(), worker, codec, commits=commits)
            exchange.enter(view, 0)
            mixer = Mixer([], rule.aligned, exchange, delay)
            mixer.extend([Row(torch.zeros(DIM, dtype=dtype)), Row(torch.zeros(7, dtype=dtype))])
            self.mixers.append(mixer)
            self.exchanges.append(exchange)

    def each(self, do: Callable[[int], None], who: list[int]) -> None:
        errors = list[BaseException]()

        def guarded(rank: int) -> None:
            try:
                do(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in who]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        if errors:
            raise errors[0]

    def step(self, who: list[int], step: int) -> None:
        def one(rank: int) -> None:
            for bucket in self.mixers[rank].buckets:
                bucket.flat.sub_(gradient(rank, bucket.flat, step), alpha=LR)
            self.mixers[rank].step(LR)

        self.each(one, who)

    def counted(self, round: int) -> list[int]:
        """Where the machine is so busy that a connection isn't made in time, not all."""
        commits: Any = self.exchanges[0].commits
        return [
            self.view.members.index(name) for name in commits.rounds.states[self.view.key, round, 0].decided.counted
        ]

    def states(self, rank: int) -> list[str]:
        return [digest(state) for state in self.mixers[rank]._states] + [str(self.exchanges[rank].chain)]


def gradient(rank: int, x: Tensor, step: int) -> Tensor:
    return (1 + 0.2 * rank) * (x - rank - torch.arange(len(x), dtype=x.dtype) / 7) + 0.1 * step


class Reference:
    """DiLoCo in one process, of given counted members: x, anchors and momenta, without the package's rules."""

    def __init__(self, size: int, rule: Any, codec: Codec, dim: int, dtype: Any) -> None:
        self.rule, self.codec = rule, codec
        self.x = [torch.zeros(dim, dtype=dtype) for _ in range(size)]
        self.anchor, self.m = torch.zeros(dim, dtype=dtype), torch.zeros(dim, dtype=dtype)

    def local(self, who: list[int], step: int) -> None:
        for rank in who:
            self.x[rank] = self.x[rank] - LR * gradient(rank, self.x[rank], step)

    def sent(self, who: list[int]) -> dict[int, Tensor]:
        return {rank: self.x[rank] - self.anchor for rank in who}

    def commit(self, sent: dict[int, Tensor], counted: list[int], who: list[int]) -> None:
        if not counted:
            return
        d = torch.stack([sent[rank] for rank in counted]).mean(0)
        self.m = self.rule.momentum * self.m + d
        step = self.m if type(self.rule) is Outer else d + self.rule.momentum * self.m
        self.anchor = self.anchor + self.rule.lr * step
        for rank in who:
            own = sent[rank] if rank in counted else torch.zeros_like(d)
            self.x[rank] = self.x[rank] + self.rule.lr * step - own


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_rounds_are_those_of_one_process(size: int, rule: Any, delay: int) -> None:
    ranks = [*range(size)]
    with members(size) as (workers, view):
        run = Members(workers, view, rule, Plain(), delay, torch.float64)
        alone, flying = Reference(size, rule, Plain(), DIM, torch.float64), None
        for step in range(7):
            run.step(ranks, step)
            alone.local(ranks, step)
            if flying is not None:
                alone.commit(flying, run.counted(step - 1), ranks)
            flying = alone.sent(ranks) if (step + 1) % H == 0 else None
            if flying is not None and not delay:
                alone.commit(flying, run.counted(step), ranks)
                flying = None
            for rank in ranks:
                torch.testing.assert_close(run.mixers[rank].buckets[0].flat, alone.x[rank], rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(run.mixers[rank]._states[0]["anchor"], alone.anchor, rtol=1e-12, atol=1e-12)
            assert all(run.states(rank) == run.states(0) for rank in ranks)
    assert bool(alone.anchor.abs().sum() > 0)


@pytest.mark.parametrize(("rule", "codec"), CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_states_are_equal_bit_for_bit_under_every_codec(rule: Any, codec: Codec, dtype: Any) -> None:
    """And what a codec loses of a displacement stays in its sender's parameters."""
    with members(3) as (workers, view):
        run = Members(workers, view, rule, codec, 1, dtype)
        found = set[str]()
        for step in range(8):
            run.step([0, 1, 2], step)
            assert run.states(0) == run.states(1) == run.states(2)
            found.add(run.states(0)[0])
    assert len(found) == 4  # three rounds have landed


@pytest.mark.parametrize("reached", [0, 1, 2])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_one_dies_in_the_middle_of_a_round_and_the_others_stay_equal(codec: Codec, reached: int) -> None:
    """Its message is counted by both or by none, as one process does that is told which."""
    rule, both = PseudoGradient(lr=0.9, momentum=0.0), [0, 1]
    with members(3) as (workers, view):
        run = Members(workers, view, rule, codec, 0, torch.float64)
        alone = Reference(3, rule, codec, DIM, torch.float64)
        for step in range(8):
            who = [0, 1, 2] if step < 4 else both
            if step == 3:
                dies_after_sending(run, workers[2], [worker.name for worker in workers[:reached]])
            alone.local(who, step)
            run.step(who, step)
            assert run.states(0) == run.states(1), step
            if (step + 1) % H == 0:
                counted = run.counted(step)
                assert step != 3 or reached == 2 or 2 not in counted
                alone.commit(alone.sent(who), counted, who)
        if codec == Plain():
            torch.testing.assert_close(run.mixers[0]._states[0]["anchor"], alone.anchor, rtol=1e-12, atol=1e-12)


def dies_after_sending(run: Members, worker: Any, reached: list[str]) -> None:
    """The next time that it sends, to these; then nobody expects anything of it."""
    mixer, send = run.mixers[run.workers.index(worker)], worker.mesh.send

    def sends(to: str, *message: Any) -> Any:
        return send(to, *message) if to in reached else SimpleNamespace(wait=bool, done=bool)

    def decided(*_: Any) -> list[int]:
        time.sleep(0.5)  # what it has sent has arrived by then
        run.gone.add(worker.name)
        for other in run.workers:
            with other.mesh.changed:
                other.mesh.changed.notify_all()
        return []

    worker.mesh.send, run.exchanges[run.workers.index(worker)]._decide = sends, decided
    mixer.exchange._since[-1][1].decide = decided
