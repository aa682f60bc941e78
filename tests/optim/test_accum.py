"""AccumAdam and AccumAdamW against torch's own (a window of 1) and against their formula, one number at a time."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_decentral.optim import AccumAdam, AccumAdamW
from tests.tiny import QUIET, Quadratic, Record, in_processes, recorded

STEPS = 11


def path(make: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """[steps, parameters]: where an optimizer takes a small network."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    optimizer, visited = make(net.parameters()), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(torch.randn(5, 3, dtype=dtype)).square().sum().backward()
        optimizer.step()
        visited.append(nn.utils.parameters_to_vector(net.parameters()).detach().clone())
    return torch.stack(visited)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("ours", "torchs"), [(AccumAdam, torch.optim.Adam), (AccumAdamW, torch.optim.AdamW)])
def test_a_window_of_one_is_torchs(ours: Any, torchs: Any, dtype: torch.dtype, foreach: bool) -> None:
    options = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    found = path(lambda p: ours(p, **options, window=1, foreach=foreach), dtype)
    torch.testing.assert_close(found, path(lambda p: torchs(p, **options), dtype))


@pytest.mark.parametrize(("ours", "torchs"), [(AccumAdam, torch.optim.Adam), (AccumAdamW, torch.optim.AdamW)])
def test_defaults_are_torchs(ours: Any, torchs: Any) -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    theirs = torchs(parameters).defaults
    shared = {name: value for name, value in ours(parameters).defaults.items() if name in theirs}
    assert shared == {name: theirs[name] for name in ("lr", "betas", "eps", "weight_decay", "foreach")}


def by_formula(gradients: list[float], x: float, *, s: int, decoupled: bool) -> list[float]:
    lr, b1, b2, eps, decay = 0.03, 0.7, 0.9, 1e-6, 0.1
    m = v = a = 0.0
    visited = []
    for t, raw in enumerate(gradients, 1):
        k = math.ceil(t / s)
        if decoupled:
            x *= 1 - lr * decay
        g = raw if decoupled else raw + decay * x
        m_hat, v_hat = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        x -= lr * (m_hat / (1 - b1**k)) / (math.sqrt(v_hat / (1 - b2**k)) + eps)
        a += g / s
        if t % s == 0:
            m, v, a = b1 * m + (1 - b1) * a, b2 * v + (1 - b2) * a * a, 0.0
        visited.append(x)
    return visited


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("window", [1, 2, 3, 50])
@pytest.mark.parametrize("ours", [AccumAdam, AccumAdamW])
def test_formula(ours: Any, window: int, foreach: bool) -> None:
    gradients = torch.randn(STEPS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = nn.Parameter(torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64))
    starts, visited = x.tolist(), []
    optimizer = ours([x], 0.03, (0.7, 0.9), 1e-6, 0.1, window=window, foreach=foreach)
    for gradient in gradients:
        x.grad = gradient.clone()
        optimizer.step()
        visited.append(x.detach().clone())
    expected = [
        by_formula(gradients[:, i].tolist(), start, s=window, decoupled=ours is AccumAdamW)
        for i, start in enumerate(starts)
    ]
    torch.testing.assert_close(torch.stack(visited), torch.tensor(expected, dtype=torch.float64).T)


@pytest.mark.parametrize("workers", [4, 16])
def test_a_window_of_n_sees_the_noise_of_the_mean_of_n_workers(workers: int) -> None:
    """Pure noise of deviation 1: E v = 1/s, where Adam on one worker's gradients has 1."""
    noise = torch.Generator().manual_seed(2)
    x = nn.Parameter(torch.zeros(2000))
    optimizer = AccumAdam([x], betas=(0.9, 0.9), window=workers)
    for _ in range(40 * workers):
        x.grad = torch.randn(2000, generator=noise)
        optimizer.step()
    assert optimizer.state[x]["exp_avg_sq"].mean().item() == pytest.approx(1 / workers, rel=0.05)


@pytest.mark.parametrize("foreach", [False, True])
def test_goes_on_bit_for_bit_from_its_state_within_a_window(foreach: bool) -> None:
    def make(parameters: Any) -> AccumAdamW:
        return AccumAdamW(parameters, 0.03, window=4, foreach=foreach)

    class Interrupted:
        """Another optimizer takes over after each step, through a state that holds no code."""

        def __init__(self, parameters: Any) -> None:
            self.parameters = list(parameters)
            self.optimizer = make(self.parameters)

        def zero_grad(self) -> None:
            self.optimizer.zero_grad()

        def step(self) -> None:
            self.optimizer.step()
            state = self.optimizer.state_dict()
            self.optimizer = make(self.parameters)
            self.optimizer.load_state_dict(state)

    assert torch.equal(path(Interrupted), path(make))


def test_a_parameter_unfrozen_later_has_a_window_of_its_own() -> None:
    early, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    alone = nn.Parameter(torch.ones(2))
    together = AccumAdam([early, late], foreach=True, window=3)
    by_itself = AccumAdam([alone], window=3)
    for step in range(9):
        early.grad = torch.full((2,), float(step))
        if step >= 4:
            late.grad, alone.grad = torch.tensor([1.0, step]), torch.tensor([1.0, step])
            by_itself.step()
        together.step()
    assert torch.equal(late, alone)
    assert together.state[late]["step"] == 5


def test_complex_numbers_are_pairs_of_coordinates() -> None:
    number = nn.Parameter(torch.tensor([1 + 2j]))
    pair = nn.Parameter(torch.tensor([[1.0, 2.0]]))
    optimizers = [AccumAdamW([p], 0.1, window=2) for p in (number, pair)]
    for step in range(1, 6):
        number.grad, pair.grad = torch.tensor([complex(step, -1)]), torch.tensor([[float(step), -1.0]])
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.view_as_real(number), pair)


def test_returns_what_the_closure_returns_and_lets_it_differentiate() -> None:
    x = nn.Parameter(torch.tensor([3.0]))
    optimizer = AccumAdam([x])

    def closure() -> Tensor:
        loss = (x * x).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 9.0
    assert x.item() < 3.0


@pytest.mark.parametrize(("option", "message"), [
    ({"lr": -1.0}, "lr must be a number from 0 up, got -1.0"),
    ({"eps": math.nan}, "eps must be a number from 0 up, got nan"),
    ({"weight_decay": -0.1}, "weight_decay must be a number from 0 up, got -0.1"),
    ({"betas": (0.9, 1.0)}, r"betas\[1\] must be in \[0, 1\), got 1.0"),
    ({"window": 0}, "window must be a whole number from 1 up, got 0"),
    ({"window": 2.5}, "window must be a whole number.*, got 2.5"),
])  # fmt: skip
@pytest.mark.parametrize("of_a_group", [False, True])
def test_refuses(option: dict[str, Any], message: str, of_a_group: bool) -> None:
    x = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=message):
        AccumAdam([{"params": [x], **option}]) if of_a_group else AccumAdam([x], **option)


def test_refuses_sparse_gradients() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"use torch.optim.SparseAdam"):
        AccumAdam(table.parameters()).step()


class Chosen(Quadratic):
    """With one of the package's optimizers."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters(), lr=0.05)


def train_under_ddp(folder: Path, make: Any) -> None:
    settings = {**QUIET, "max_steps": STEPS, "devices": 2}
    Trainer(**settings, strategy="ddp_fork", callbacks=[Record(folder)]).fit(Chosen(make))


@pytest.mark.sampled
@pytest.mark.parametrize("make", [AccumAdam, AccumAdamW])
def test_under_ddp_it_is_one_process_with_the_mean_gradient(tmp_path: Path, make: Any) -> None:
    in_processes(train_under_ddp, tmp_path, make)
    x, ranks = nn.Parameter(Quadratic().x.detach().clone()), torch.arange(2.0, dtype=torch.float64).unsqueeze(1)
    optimizer, expected = make([x], lr=0.05), []
    for step in range(STEPS):
        x.grad = ((1 + 0.1 * ranks) * (x.detach() - ranks - 0.3 * step)).mean(0)
        optimizer.step()
        expected.append(x.detach().clone().expand(2, -1))
    torch.testing.assert_close(recorded(tmp_path, 2), torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
def test_equal_on_a_device() -> None:
    """The default there is the foreach path."""
    here, there = nn.Parameter(torch.linspace(-1, 1, 9)), nn.Parameter(torch.linspace(-1, 1, 9, device="cuda"))
    optimizers = [AccumAdamW([p], 0.1, window=2) for p in (here, there)]
    for step in range(6):
        here.grad = torch.linspace(step, 1, 9)
        there.grad = here.grad.cuda()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(there.cpu(), here)
