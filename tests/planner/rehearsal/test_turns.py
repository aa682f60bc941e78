"""Workers whose gradients are computed at the same time have the bits of those one after the other."""

import time
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_decentral import GossipStrategy, PartialBackpropStrategy
from lightning_decentral.planner.rehearsal import rehearse
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.evaluation import HeldOutEvaluation
from lightning_decentral.planner.rehearsal.jobs import threads_ratio
from lightning_decentral.planner.rehearsal.loop_settings import LoopSettings
from lightning_decentral.planner.rehearsal.turns import Abreast, Way, map_on_threads
from tests.planner.rehearsal.test_crew import CASES, CLIP, STEPS, Grouped, given

MOMENT = 0.02
"""Seconds that a slow step sleeps."""


class Line(LightningModule):
    """Linear, and as slow and as random as asked."""

    def __init__(self, *, moment: float = 0.0, dropout: bool = False, always: bool = False) -> None:
        super().__init__()
        self.layer, self.moment, self.dropout, self.always = nn.Linear(3, 1), moment, dropout, always

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        time.sleep(self.moment)
        x = nn.functional.dropout(batch, training=self.always or (self.dropout and self.training))
        return (self.layer(x) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of torch's: on more, MKL may round in another order."""
    own = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(own)


def loader(rows: int = 64) -> DataLoader[Any]:
    return DataLoader(torch.randn(rows, 3, generator=torch.Generator().manual_seed(0)), batch_size=2)


def trained(monkeypatch: pytest.MonkeyPatch, strategy: Strategy, size: int, threads: int, dropout: float = 0.0) -> Crew:
    seed_everything(1, workers=True, verbose=False)
    asked: dict[str, Any] = {"loop": LoopSettings(clip=CLIP), "threads": threads}
    with Crew(Grouped(dropout=dropout), lambda rank: given(monkeypatch, rank), strategy, size, STEPS, **asked) as crew:
        crew.train(STEPS)
        crew.release()
    return crew


@pytest.mark.sampled
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[1] is not PartialBackpropStrategy])
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, name: str, threads: int) -> None:
    """One after the other they are, bit for bit, those of as many processes (`test_crew`)."""
    size, kind, options = CASES[name]
    apart, together = (trained(monkeypatch, kind(**options), size, count) for count in (1, threads))
    assert [isinstance(crew.way, Abreast) for crew in (apart, together)] == [False, True]
    assert torch.equal(torch.stack(together.losses), torch.stack(apart.losses))
    for one, other in zip(apart.workers, together.workers, strict=True):
        for key, value in one.module.state_dict().items():
            assert torch.equal(other.module.state_dict()[key], value), key


def test_partial_backprop_is_computed_worker_by_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    size, kind, options = CASES["partial backprop"]
    assert type(trained(monkeypatch, kind(**options), size, 2).way) is Way


def test_random_numbers_within_a_step_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"Grouped drew random numbers in step 0, .* give threads=1"):
        trained(monkeypatch, GossipStrategy(), 2, 2, dropout=0.5)


def test_a_trial_says_what_threads_gain() -> None:
    """Sleeping steps are hidden behind each other; those that draw random numbers, or fail, aren't computed so."""

    class Broken(Line):
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            raise RuntimeError("no")

    gained = threads_ratio(Line(moment=MOMENT), loader(), 4, LoopSettings(), 4)
    assert gained is not None
    assert gained < 0.9
    assert threads_ratio(Line(dropout=True), loader(), 4, LoopSettings(), 4) is None
    assert threads_ratio(Broken(), loader(), 2, LoopSettings(), 2) is None


def test_threads_share_torchs_own_and_leave_it_to_others() -> None:
    own, others = torch.get_num_threads(), []
    assert map_on_threads(lambda _: torch.get_num_threads(), range(2)) == [max(1, own // 2)] * 2
    other = Thread(target=lambda: others.append(torch.get_num_threads()))
    other.start()
    other.join()
    with pytest.raises(ZeroDivisionError):
        map_on_threads(lambda x: 1 // x, [1, 0])
    assert [torch.get_num_threads(), *others] == [own, own]


@pytest.mark.parametrize("always", [False, True])
def test_a_validation_on_threads_is_the_same(*, always: bool) -> None:
    """Also where a step draws random numbers: then it is taken one batch after the other from there on."""
    torch.manual_seed(0)
    models, batches = [Line(always=always) for _ in range(3)], list(loader(14))
    alone, shared = (HeldOutEvaluation(models[0], batches, threads=count) for count in (1, 3))
    before = torch.get_rng_state()
    for some in (models, models[:1], models[1:]):
        assert shared.loss(some) == alone.loss(some)
        assert shared.loss(some, 4) == alone.loss(some, 4)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(shared._copies) == (0 if always else 2)


def test_a_rehearsal_takes_threads_where_they_are_faster() -> None:
    """And finds the same, also of a schedule that asks for the length of the run."""

    class Scheduled(Line):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            length = int(self.trainer.estimated_stepping_batches)  # of a run without an end: OverflowError
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, length)]

    said: list[str] = []
    asked: dict[str, Any] = {"workers": [4], "methods": [], "target": 0.01, "steps": 10, "seeds": 1, "rates": [1.0]}
    torch.manual_seed(0)
    module = Scheduled(moment=MOMENT)
    some, one = (
        rehearse(module, loader(), validation=loader(8), threads=count, say=said.append, **asked) for count in (4, 1)
    )
    assert [line[:40] for line in said if "at a time" in line] == ["4 workers are computed 4 at a time, in 0"]
    assert [(row.title, row.curve) for row in some.rows] == [(row.title, row.curve) for row in one.rows]


def test_no_thread_is_refused() -> None:
    with pytest.raises(ValueError, match="threads must be 1 or more, got 0"):
        rehearse(Line(), loader(), workers=[2], target=1.0, threads=0)
