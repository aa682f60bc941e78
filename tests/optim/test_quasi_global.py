"""QuasiGlobalAdam under gossip against its formula in plain numpy: simulated, trained, sharded, saved and resumed."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import (
    AllReduce,
    Auto,
    Complete,
    FullyShard,
    Gossip,
    Island,
    OnePeerExponential,
    Own,
    Ring,
    Topology,
)
from lightning_decentral.gossip.plan.weights import mixing_matrix
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.simulation import MatrixExchange
from lightning_decentral.optim import QuasiGlobalAdam
from tests.gossip.compute.test_combine import Rows, slopes
from tests.gossip.wire.test_exchange import start
from tests.tiny import QUIET, Quadratic, Record, in_processes, recorded

STEPS = 12
OPTIONS: dict[str, Any] = {"lr": 0.03, "betas": (0.7, 0.9), "eps": 1e-6, "weight_decay": 0.1}
Array = np.ndarray[Any, Any]


def by_formula(gradient: Any, x: Array, mixings: list[Array], delay: int, decay: float = 0.1) -> Array:
    """[steps + 1, size, dim], a worker and an equation at a time. mixings[t]: of the round after update t."""
    b1, b2, lr, eps = 0.7, 0.9, 0.03, 1e-6
    size = len(x)
    m, v = np.zeros_like(x), np.zeros_like(x)
    path, sent = [x.copy()], x
    for t, W in enumerate(mixings, 1):
        before, g = x.copy(), gradient(x, t - 1)
        new = np.empty_like(x)
        for i in range(size):
            own = g[i] + decay * x[i]
            mean, square = b1 * m[i] + own, b2 * v[i] + (1 - b2) * own**2
            new[i] = x[i] - lr * (mean / (1 - b1**t)) / (np.sqrt(square / (1 - b2**t)) + eps)
        if delay == 0:
            x = W @ new
        else:
            earlier = mixings[t - 2] if t > 1 else np.eye(size)
            x = new + (earlier @ sent - sent)
            sent = x
        for i in range(size):
            d = before[i] - x[i]
            d = d / (math.sqrt((d**2).sum()) + 1e-8)
            m[i], v[i] = b1 * m[i] + (1 - b1) * d, b2 * v[i] + (1 - b2) * d**2
        path.append(x)
    return np.stack(path)


def simulated(topology: Topology, size: int, delay: int, restart_at: int | None = None) -> Tensor:
    """An optimizer for each worker, its parameters two pieces of a row; saved and loaded anew before a step."""
    rows = Rows(start(size).clone())
    mixer = Mixer([rows], Gossip(), MatrixExchange(topology, Own(), size), delay)
    workers = [[nn.Parameter(row[:2]), nn.Parameter(row[2:])] for row in rows.flat]
    optimizers = [QuasiGlobalAdam(pieces, **OPTIONS) for pieces in workers]
    path = [rows.flat.clone()]
    for step in range(STEPS):
        if step == restart_at:
            optimizers = [reloaded(o, pieces) for o, pieces in zip(optimizers, workers, strict=True)]
        gradient = slopes(rows.flat)
        for pieces, optimizer, g in zip(workers, optimizers, gradient, strict=True):
            pieces[0].grad, pieces[1].grad = g[:2].clone(), g[2:].clone()
            optimizer.step()
        mixer.step()
        path.append(rows.flat.clone())
    return torch.stack(path)


def reloaded(optimizer: QuasiGlobalAdam, parameters: list[nn.Parameter]) -> QuasiGlobalAdam:
    """From a file that holds no code."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    again = QuasiGlobalAdam(parameters)
    again.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    return again


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(("topology", "size"), [(Ring(), 5), (OnePeerExponential(), 4), (Complete(), 3)], ids=str)
def test_formula(topology: Topology, size: int, delay: int) -> None:
    mixings = [mixing_matrix(topology, size, step) for step in range(STEPS)]
    expected = by_formula(lambda x, _: slopes(x), start(size).numpy(), mixings, delay)
    np.testing.assert_allclose(simulated(topology, size, delay).numpy(), expected, rtol=1e-11, atol=1e-11)


def test_goes_on_bit_for_bit_from_its_state() -> None:
    assert torch.equal(simulated(Ring(), 5, 1, restart_at=6), simulated(Ring(), 5, 1))


class Pulled(Quadratic):
    """Every island's devices have its gradient; two parameters, for the norm over both."""

    def __init__(self, devices: int = 1) -> None:
        super().__init__()
        self.devices = devices
        self.y = nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        worker = self.global_rank // self.devices
        both = torch.cat([self.x, self.y])
        return 0.5 * (1 + 0.1 * worker) * (both - worker - 0.3 * self.global_step).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return QuasiGlobalAdam(self.parameters(), **OPTIONS)


def pull(x: Array, step: int) -> Array:
    worker = np.arange(len(x))[:, None]
    return (1 + 0.1 * worker) * (x - worker - 0.3 * step)


def train(folder: Path, size: int, delay: int, island: Island | None) -> None:
    strategy = GossipStrategy(start_method="fork", delay=delay, island=island)
    settings = {**QUIET, "max_steps": STEPS, "devices": size}
    devices = island.devices if island else 1
    Trainer(**settings, strategy=strategy, callbacks=[Record(folder)]).fit(Pulled(devices))


@pytest.mark.sampled
@pytest.mark.parametrize(("size", "delay", "island"), [
    (3, 0, None), (3, 1, None), (4, 1, AllReduce(2)), (4, 1, FullyShard(2)),
], ids=str)  # fmt: skip
def test_trainer_equals_the_formula(tmp_path: Path, size: int, delay: int, island: Island | None) -> None:
    """Under FullyShard the norm is over all shards of the island."""
    in_processes(train, tmp_path, size, delay, island)
    devices = island.devices if island else 1
    workers = size // devices
    mixings = [mixing_matrix(Auto(), workers, step) for step in range(STEPS)]
    x0 = nn.utils.parameters_to_vector(Pulled().parameters()).detach().expand(workers, -1).numpy()
    expected = by_formula(pull, x0, mixings, delay)[1:].repeat(devices, axis=1)
    np.testing.assert_allclose(recorded(tmp_path, size).numpy(), expected, rtol=1e-10, atol=1e-10)
    assert np.abs(expected[-1, 0] - expected[-1, -1]).max() > 1e-3, "the workers were never apart"


def test_alone_it_follows_its_own_steps() -> None:
    """One worker: W = 1, as under ddp, where nothing moves parameters between two steps."""
    x = nn.Parameter(torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64))
    expected = by_formula(lambda x, step: np.cos(x + step), x.detach().numpy()[None], [np.eye(1)] * STEPS, 0)
    optimizer = QuasiGlobalAdam([x], **OPTIONS)
    for step in range(STEPS):
        x.grad = torch.cos(x.detach() + step)
        optimizer.step()
    np.testing.assert_allclose(x.detach().numpy(), expected[-1, 0], rtol=1e-12)


def test_complex_numbers_are_pairs_of_coordinates_and_a_parameter_without_gradient_waits() -> None:
    number, pair = nn.Parameter(torch.tensor([1 + 2j])), nn.Parameter(torch.tensor([[1.0, 2.0]]))
    late = nn.Parameter(torch.ones(2))
    optimizers = [QuasiGlobalAdam([number, late]), QuasiGlobalAdam([pair])]
    for step in range(1, 6):
        number.grad, pair.grad = torch.tensor([complex(step, -1)]), torch.tensor([[float(step), -1.0]])
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.view_as_real(number), pair)
    assert torch.equal(late, torch.ones(2))
    assert late not in optimizers[0].state


@pytest.mark.parametrize(("option", "message"), [
    ({"lr": -1.0}, "lr must be a number from 0 up, got -1.0"),
    ({"eps": math.inf}, "eps must be a number from 0 up, got inf"),
    ({"weight_decay": -0.1}, "weight_decay must be a number from 0 up, got -0.1"),
    ({"betas": (1.0, 0.9)}, r"betas\[0\] must be in \[0, 1\), got 1.0"),
])  # fmt: skip
def test_refuses(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuasiGlobalAdam([nn.Parameter(torch.zeros(1))], **option)


def test_refuses_sparse_gradients() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"QuasiGlobalAdam takes no sparse gradients: use torch\.optim\.SparseAdam"):
        QuasiGlobalAdam(table.parameters()).step()


@pytest.mark.gpu
def test_on_a_device_it_is_the_same_and_the_host_waits_for_nothing() -> None:
    here, there = nn.Parameter(torch.linspace(-1, 1, 9)), nn.Parameter(torch.linspace(-1, 1, 9, device="cuda"))
    for parameter in (here, there):
        optimizer = QuasiGlobalAdam([parameter], **OPTIONS)
        gradients = [torch.linspace(step, 1, 9, device=parameter.device) for step in range(6)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for gradient in gradients:
                parameter.grad = gradient
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(there.cpu(), here)
