"""One fit's stopping and ending together, by itself: a single worker's world whose other worker is told what to say."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_decentral.shared import coordination as module
from lightning_decentral.shared.coordination import Coordination, Uncoordinated


class Party:
    """Takes rounds when it is asked to."""

    def __init__(self) -> None:
        self.taken = [3]

    def rounds(self) -> list[int]:
        return self.taken

    def wanted(self) -> list[int]:
        return self.taken

    def take_part(self, index: int) -> None:
        self.taken[index] += 1


class Flags:
    """Sums flags of this worker and of another, which raises its own from the start or never."""

    rank = 0

    def __init__(self, other: int) -> None:
        self.other, self.sums = other, 0

    def all_reduce(self, votes: torch.Tensor) -> Any:
        self.sums += 1
        votes += self.other
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to Lightning's loops."""
    done = ["patched"]
    monkeypatch.setattr(module, "LoopPatches", lambda *_: SimpleNamespace(restore=lambda: done.append("restored")))
    return done


def fit(party: Party, flags: Flags, optimizers: Any = ()) -> Coordination:
    store = SimpleNamespace(check=lambda keys: False, set=lambda key, value: None)
    wire: Any = SimpleNamespace(flags=flags, roll=SimpleNamespace(rank=0), store=store)
    trainer: Any = SimpleNamespace()
    return Coordination(wire, trainer, optimizers, party, sigterm_every=2, forward_signal=lambda _: None, name="fit-0")


def test_a_signal_at_another_worker_is_agreed_on_one_interval_later(loops: list[str]) -> None:
    flags = Flags(other=1)
    together = fit(Party(), flags)
    seen = []
    for _ in range(3):
        together.tick()
        seen.append(together.agreed)
    together.close()
    assert seen == [False, False, True]
    assert flags.sums == 2  # once in two rounds


def test_rounds_taken_for_others_count_for_the_flag_too(loops: list[str]) -> None:
    party, flags = Party(), Flags(other=0)
    together = fit(party, flags)
    together._take_part(0)
    together.close()
    assert (party.taken, flags.sums) == ([4], 1)


def test_collective_calls_are_counted_while_the_fit_lasts(loops: list[str]) -> None:
    together = fit(Party(), Flags(other=0))
    assert [together.meet(lambda: 7), together._met] == [7, 1]
    together.close()
    assert [together.meet(lambda: 8), together._met] == [8, 1]


def test_closing_twice_is_closing_once_and_who_agreed_has_agreed(loops: list[str]) -> None:
    together = fit(Party(), Flags(other=1))
    for _ in range(3):
        together.tick()
    together.close()
    together.close()
    assert loops == ["patched", "restored"]
    assert together.agreed


def test_an_optimizer_that_steps_past_the_strategy_is_refused(loops: list[str]) -> None:
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    together = fit(Party(), Flags(other=0), [optimizer])
    with together.updating:
        optimizer.step()
    with pytest.raises(RuntimeError, match="stepped past the strategy"):
        optimizer.step()
    together.close()
    optimizer.step()


def test_a_single_worker_waits_for_nobody() -> None:
    alone = Uncoordinated()
    with alone.waiting, alone.updating:
        alone.tick()
    assert alone.meet(lambda: 3) == 3
    assert not alone.agreed
