"""Stacked workers have, to rounding, what workers one after the other have; those that can't be stacked are told."""

import random
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_decentral import GossipStrategy, PartialBackpropStrategy
from lightning_decentral.planner.rehearsal import rehearse
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.loop import Loop
from lightning_decentral.planner.rehearsal.trial import stacked as tried
from tests.planner.rehearsal.test_crew import CASES, CLIP, STEPS, Grouped, given

ROUNDING = {"rtol": 1e-4, "atol": 1e-6}
CODE_STEP, FEW = 1e-3, 0.01
"""A number that rounding moves over the border between two codes is decoded a step of them apart: those are few."""


def trained(monkeypatch: pytest.MonkeyPatch, strategy: Strategy, size: int, stacked: bool) -> Crew:
    seed_everything(1, workers=True, verbose=False)
    asked: dict[str, Any] = {"loop": Loop(clip=CLIP), "stacked": stacked}
    with Crew(Grouped(dropout=0.0), lambda rank: given(monkeypatch, rank), strategy, size, STEPS, **asked) as crew:
        crew.train(STEPS)
        crew.release()
    return crew


CODED = ("codec", "momentum travels", "every other step", "coded ways", "compressed", "compressed to four bits")


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[1] is not PartialBackpropStrategy])
def test_stacked_workers_equal_those_one_after_the_other_to_rounding(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Who are, bit for bit, those of as many processes (`test_crew`)."""
    size, kind, options = CASES[name]
    apart, together = (trained(monkeypatch, kind(**options), size, stacked) for stacked in (False, True))
    assert together.stacks
    torch.testing.assert_close(torch.stack(together.losses), torch.stack(apart.losses), **ROUNDING)
    for one, other in zip(apart.workers, together.workers, strict=True):
        own, theirs = (dict(worker.module.state_dict()) for worker in (one, other))
        if name not in CODED:
            torch.testing.assert_close(theirs, own, **ROUNDING)
            continue
        right = [torch.isclose(theirs[key], own[key], **ROUNDING).flatten() for key in own]
        assert torch.cat(right).float().mean() >= 1 - FEW
        torch.testing.assert_close(theirs, own, rtol=0, atol=CODE_STEP)
    if not apart.alike:
        first, second, *_ = together.workers
        assert not torch.equal(first.module.head.weight, second.module.head.weight)


def test_partial_backprop_is_computed_worker_by_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    size, kind, options = CASES["partial backprop"]
    assert not trained(monkeypatch, kind(**options), size, stacked=True).stacks


class Plain(LightningModule):
    """Least squares over a batch of tensors and a word."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.unused = nn.Linear(2, 2).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 0.0)
        x, y = batch
        return {"loss": (self.layer(x) - y).square().mean()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=0.02)


class Scheduled(Plain):
    """By the length of the run."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        length = int(self.trainer.estimated_stepping_batches)  # of a run without an end: OverflowError
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, length)]


class Noisy(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch[0] + torch.randn_like(batch[0]), batch[1]], batch_idx)


class Branching(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch if float(batch[0].sum()) > 0 else [-batch[0], batch[1]], batch_idx)


class Chance(Plain):
    """Numbers that torch doesn't draw: vmap doesn't see that all workers get one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * random.random()


def loader(examples: int = 24) -> DataLoader[Any]:
    x = torch.randn(examples, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)


def test_what_can_be_stacked_is_timed() -> None:
    ratio, why = tried(Plain(), loader(), 3, Loop())
    assert ratio is not None
    assert ratio > 0
    assert not why


@pytest.mark.parametrize(
    ("module", "why"), [(Noisy(), "random"), (Branching(), "vmap"), (Chance(), "Chance drew random numbers")]
)
def test_what_cant_be_stacked_is_said(module: LightningModule, why: str) -> None:
    ratio, said = tried(module, loader(), 2, Loop())
    assert ratio is None
    assert why in said


def test_a_rehearsal_says_how_workers_are_computed() -> None:
    asked: dict[str, Any] = {"workers": [2], "target": 0.0, "methods": [], "steps": 10, "rates": (1.0,), "seeds": 1}
    found = {}
    for name, kind, stacked in (("plain", Scheduled, False), ("at once", Scheduled, True), ("noisy", Noisy, True)):
        heard: list[str] = []
        torch.manual_seed(0)
        found[name] = rehearse(kind(), loader(), validation=loader(8), stacked=stacked, say=heard.append, **asked)
        assert [text for text in heard if "computed" in text] == {
            "plain": [],
            "at once": [text for text in heard if text.startswith("2 workers are computed at once, in ")][:1],
            "noisy": [text for text in heard if "one after the other: RuntimeError: vmap" in text][:1],
        }[name], heard
    assert found["at once"].rows[0].loss == pytest.approx(found["plain"].rows[0].loss, rel=1e-4)


def test_batches_that_differ_are_computed_one_after_the_other() -> None:
    rows = [[[torch.ones(n, 4), torch.ones(n, 1)] for n in sizes] for sizes in ((4, 2), (4, 3))]
    module, losses = Plain(), []
    for stacked in (True, False):
        with Crew(module, lambda rank: iter(rows[rank]), GossipStrategy(), 2, 2, stacked=stacked) as crew:
            crew.train(2)
        losses.append(torch.stack(crew.losses))
    torch.testing.assert_close(*losses, **ROUNDING)
