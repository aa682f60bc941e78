"""Gradients with NaN or infinity stop the step or leave it out; a scaler's are its own affair."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_decentral.shared.updates import GradientCheck, NonFinite

PLAIN: Any = SimpleNamespace()
SCALED: Any = SimpleNamespace(scaler=object())


def step(
    how: NonFinite, bad: float, precision: Any = PLAIN
) -> tuple[list[nn.Parameter], dict[Any, Any], GradientCheck]:
    """A good step, then one with a bad element in one gradient; parameters and the optimizer's state."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))]
    optimizer, check = torch.optim.AdamW(parameters, lr=0.1), GradientCheck(how)
    for value in (1.0, bad):

        def closure(value: float = value) -> None:
            parameters[0].grad, parameters[1].grad = torch.ones(3), torch.tensor([1.0, value])

        optimizer.step(check.after(closure, optimizer, precision))
    return parameters, optimizer.state_dict()["state"], check


@pytest.mark.filterwarnings("ignore:the gradients of a step")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_skipped_step_leaves_parameters_and_moments_alone(bad: float) -> None:
    parameters, state, check = step("skip", bad)
    wanted, wanted_state, _ = step("skip", 1.0)
    alone = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW(alone, lr=0.1)
    for parameter in alone:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, alone, strict=False))
    assert (state[0]["step"], wanted_state[0]["step"]) == (1, 2)
    assert not torch.equal(parameters[0], wanted[0])
    assert check.skipped == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_stops_with_the_remedies(bad: float) -> None:
    with pytest.raises(FloatingPointError, match=r"hold NaN or infinity on all workers: lower .* nonfinite='skip'"):
        step("stop", bad)


@pytest.mark.parametrize("closed", [True, False], ids=["in a closure", "before"])
def test_a_loop_of_the_users_own_is_judged_where_it_makes_its_gradients(closed: bool) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer, check = torch.optim.SGD([parameter], lr=0.1), GradientCheck("stop")

    def backward() -> float:
        parameter.grad = torch.tensor([float("nan")])
        return 0.0

    given: dict[str, Any] = {"closure": backward} if closed else {}
    if not closed:
        backward()
    with pytest.raises(FloatingPointError):
        optimizer.step(**check.of_step(given, optimizer, PLAIN))
    assert parameter.item() == 1.0


def test_a_scaler_decides_for_itself() -> None:
    parameters, _, check = step("stop", float("inf"), SCALED)
    assert check.skipped == 0
    assert not bool(torch.isfinite(parameters[1]).all())


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="nonfinite must be 'stop' or 'skip', got 'ignore'"):
        GradientCheck("ignore")  # type: ignore[arg-type]
