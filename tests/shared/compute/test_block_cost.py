"""Costs of blocks against what they are known to save and to compute; seconds on a clock that the blocks move."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_decentral.shared.compute import block_cost
from lightning_decentral.shared.compute.block_cost import TIMED_RUNS, BlockPass, measure, parameter_bytes
from tests.clocks import Clock

CPU = torch.device("cpu")
ROWS, WIDTH = 3, 8


class Works(torch.autograd.Function):
    """x, and moves the clock there and twice as much back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        Clock.now += seconds
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        Clock.now += 2 * ctx.seconds
        return gradient, None


class Scaled(nn.Module):
    """w * x, which saves its input and the parameter."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Works.apply(x, self.seconds) * self.weight


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cost, "laps", lambda device: Clock())


def chain() -> nn.Sequential:
    return nn.Sequential(Scaled(1.0), Scaled(2.0), Scaled(4.0))


def test_seconds_and_bytes_of_every_block() -> None:
    net, runs = chain(), []

    def run() -> Tensor:
        runs.append(1)
        return net(torch.ones(ROWS, WIDTH)).sum()

    costs = measure(net, ["1", "2"], [10, 20, 30], run)
    assert [cost.name for cost in costs] == ["inputs", "1", "2"]
    assert [cost.forward_seconds for cost in costs] == [1.0, 2.0, 4.0]
    assert [cost.saved_bytes for cost in costs] == [4 * ROWS * WIDTH] * 3, "each its input; parameters are there anyway"
    assert [cost.parameter_bytes for cost in costs] == [10, 20, 30]
    assert len(runs) == 1 + TIMED_RUNS


class Shared(nn.Module):
    """Both blocks save the network's input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scaled(1.0), Scaled(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def test_what_two_blocks_save_counts_once_for_the_higher() -> None:
    net = Shared()
    costs = measure(net, ["a", "b"], [0, 0, 0], lambda: net(torch.ones(ROWS, WIDTH)).sum())
    assert [cost.saved_bytes for cost in costs] == [0, 0, 4 * ROWS * WIDTH]


@pytest.mark.parametrize(("names", "passed"), [(["2", "1"], "1, 2"), (["0", "1"], "0, 0, 1"), (["3"], "none of")])
def test_another_order_is_refused_and_leaves_no_hook(names: list[str], passed: str) -> None:
    net = nn.Sequential(*chain(), nn.Identity())
    net.forward = lambda x: net[2](net[1](net[0](net[0](x))))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=rf"in this order, each once: it passes {passed}"):
        measure(net, names, [0] * (len(names) + 1), lambda: net(torch.ones(ROWS, WIDTH)).sum())
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_a_network_that_runs_twice_in_a_step_costs_twice() -> None:
    """Two views of an image, say."""
    net, x = chain(), torch.ones(ROWS, WIDTH)
    found = BlockPass(net, ["1", "2"], CPU)
    found.run_forward(lambda: (net(x) + net(x)).sum())
    found.refuse_another_order()
    assert found.passes == 2
    assert found.forward() == [1.0, 4.0, 9.0], "what lies before the second pass's first boundary is the last block's"
    assert [cost.parameter_bytes for cost in measure(net, ["1"], [3, 5], lambda: (net(x) + net(x)).sum())] == [3, 5]


def test_a_forward_that_fails_leaves_no_hook() -> None:
    net: Any = chain()
    with pytest.raises(RuntimeError):
        measure(net, ["1"], [0, 0], lambda: net(torch.ones(ROWS, WIDTH + 1)).sum())
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_there_and_back() -> None:
    net = chain()
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    found = BlockPass(net, ["1", "2"], CPU)
    found.run(lambda: net(2 * x).sum())
    assert found.forward() == [1.0, 2.0, 4.0]
    assert found.backward() == [2.0, 4.0, 8.0]
    assert found.output_bytes == [0, 4 * ROWS * WIDTH, 4 * ROWS * WIDTH]


def test_a_parameter_counts_once() -> None:
    one = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    assert parameter_bytes([one, nn.Parameter(torch.zeros(5)), one]) == 24 + 20
