"""Whatever moves parameters past the strategy is found: at its step, or where the epoch ends."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_decentral import CompressedStrategy, GossipStrategy
from lightning_decentral.shared import updates as module
from lightning_decentral.shared.updates import Updates
from tests.tiny import QUIET, Quadratic, in_processes


class Party:
    """A strategy with one mixed parameter and one that is never mixed."""

    drifts = True

    def __init__(self, optimizers: Any = ()) -> None:
        self.lightning_module = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in ("mixed", "own")})
        self.optimizers: list[Optimizer] = [*optimizers]
        self.followed: Any = self
        self.rounds, self.told = 0, 0

    def mixed(self) -> list[Any]:
        return [(self.rounds, [self.lightning_module["mixed"]])]

    def replaced(self) -> None:
        self.told += 1


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(module, "rank_zero_warn", lines.append)
    return lines


@pytest.fixture
def party() -> Party:
    return Party()


@pytest.fixture
def watch(party: Party) -> Iterator[Updates]:
    updates = Updates(party)
    yield updates
    updates.close()


def move(party: Party, name: str, by: str = "data") -> None:
    tensor = party.lightning_module[name]
    (tensor.data if by == "data" else tensor.detach()).add_(0.5)


def test_what_moves_with_a_round_is_no_news(party: Party, watch: Updates, said: list[str]) -> None:
    for _ in range(3):
        move(party, "mixed")
        party.rounds += 1
        watch.moved.batch(last=True)
    watch.moved.batch(last=True)
    assert not said


@pytest.mark.parametrize("by", ["data", "detach"])
def test_what_moves_without_a_round_is_named_once_and_then_refused(
    party: Party, watch: Updates, said: list[str], by: str
) -> None:
    move(party, "mixed", by)
    watch.moved.batch(last=False)
    assert not said
    watch.moved.batch(last=True)
    (line,) = said
    assert line.startswith("mixed changed in the last 2 batches while no round was counted")
    assert "\n" not in line
    move(party, "mixed", by)
    with pytest.raises(RuntimeError, match="mixed changed in the last 1 batches"):
        watch.moved.batch(last=True)


def test_a_long_epoch_is_looked_at_within(party: Party, watch: Updates, said: list[str]) -> None:
    for _ in range(module.LOOK_BATCHES):
        move(party, "mixed")
        watch.moved.batch(last=False)
    assert len(said) == 1


def test_an_optimizer_of_nobody_is_named(party: Party, watch: Updates) -> None:
    parameter = party.lightning_module["mixed"]
    parameter.grad = torch.ones(3)
    SGD([parameter], lr=0.1).step()
    with pytest.raises(RuntimeError, match="SGD stepped past the strategy: mixed changed"):
        watch.moved.batch(last=True)


def test_inner_steps_that_an_update_with_a_round_follows_are_right(
    party: Party, watch: Updates, said: list[str]
) -> None:
    """As in Reptile: the user's own optimizer moves them, the strategy's update takes its direction from that."""
    parameter = party.lightning_module["mixed"]
    parameter.grad = torch.ones(3)
    SGD([parameter], lr=0.1).step()
    party.rounds += 1
    watch.moved.batch(last=True)
    assert not said


def test_what_no_optimizer_has_and_moves_is_named_once(party: Party, watch: Updates, said: list[str]) -> None:
    for _ in range(2):
        move(party, "own")
        watch.moved.batch(last=True)
    assert len(said) == 1
    assert said[0].startswith("own, one of 1 parameters, changes but belongs to no optimizer of the Trainer")


def test_nan_that_stays_doesnt_move(party: Party, said: list[str]) -> None:
    party.lightning_module["mixed"].data.fill_(torch.nan)
    watch = Updates(party)
    watch.moved.batch(last=True)
    watch.close()
    assert not said


def test_replaced_optimizers_are_told_before_their_first_update(party: Party, watch: Updates) -> None:
    for optimizers, told in (([], 0), ([SGD([torch.ones(1)], lr=0.1)], 1)):
        party.optimizers = optimizers
        for _ in range(2):
            with watch:
                assert party.told == told


class Two(Optimizer):
    """SAM by hand: `first`, `second`, whose update is an inner optimizer's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.inner = SGD(self.param_groups, lr=lr)
        self.param_groups = self.inner.param_groups

    def second(self) -> None:
        self.inner.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        self.second()


class Sharp(Quadratic):
    """Updates by a part of its optimizer, or by all of it."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.whole = False, whole

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()

        def closure() -> None:
            optimizer.zero_grad()
            self.manual_backward((self.x - self.global_rank).square().sum())

        if self.whole:
            optimizer.step(closure=closure)
        else:
            closure()
            optimizer.second()

    def configure_optimizers(self) -> Any:
        return Two(self.parameters(), 0.1)


def fit(strategy: Any, whole: bool) -> Tensor:
    module = Sharp(whole)
    settings = {**QUIET, "max_epochs": 1, "limit_train_batches": 6}
    Trainer(**settings, devices=2, strategy=strategy(start_method="fork")).fit(module)
    return module.x.detach().clone()


def test_a_part_of_an_optimizer_that_steps_alone_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"SGD stepped past the strategy as a part of Two.*step\(closure\)"):
        in_processes(fit, GossipStrategy, False)


def test_where_gradients_are_averaged_a_part_may_step_alone() -> None:
    assert torch.equal(in_processes(fit, CompressedStrategy, False), in_processes(fit, CompressedStrategy, True))


class Written(Quadratic):
    """The user's own update, without an optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(super().training_step(batch, batch_idx))
        with torch.no_grad():
            self.x -= 0.1 * self.x.grad


def fit_written() -> None:
    settings = {**QUIET, "max_epochs": 2, "limit_train_batches": 3}
    Trainer(**settings, devices=2, strategy=GossipStrategy(start_method="fork")).fit(Written())


def test_an_update_by_hand_is_named_after_one_epoch_and_ends_the_second(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="x changed in the last 3 batches while no round was counted"):
        in_processes(fit_written)
    assert "UserWarning: x changed" in capsys.readouterr().err
