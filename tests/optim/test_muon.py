"""Muon against torch's Muon and AdamW, alone and under Lightning; what it keeps, what it refuses."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral import GossipStrategy
from lightning_decentral.gossip import AllReduce, FullyShard, Island
from lightning_decentral.optim import Muon, muon_groups, newton_schulz
from lightning_decentral.spilled.compute.transfer import Counting, Ledger
from tests.tiny import QUIET, Quadratic, Record, in_processes, recorded

STEPS = 7
LIKE_TORCHS = {"lr": 0.03, "weight_decay": 0.1}
MOMENTUM = {"momentum": 0.95}  # torch's default


class Small(nn.Module):
    """Two hidden matrices of one shape, a filter, an embedding, a head, vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 6, bias=False)
        self.filters = nn.Conv1d(6, 5, 3)
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.second(self.first(self.table(tokens)).tanh())
        return self.head(self.filters(x.mT).mean(-1))


def path(make: Callable[[nn.Module], Optimizer], dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    """[steps, parameters]: where an optimizer takes the small network."""
    torch.manual_seed(0)
    net = Small().to(dtype)
    optimizer, visited = make(net), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        (scale * net(torch.randint(7, (4, 5))).square().sum()).backward()
        optimizer.step()
        visited.append(nn.utils.parameters_to_vector(net.parameters()).detach().clone())
    return torch.stack(visited)


def muon(net: nn.Module, **options: Any) -> Muon:
    return Muon(muon_groups(net), **{**LIKE_TORCHS, **MOMENTUM, **options})


class ByFormula(Optimizer):
    """The whole rule, written once more: one parameter at a time, by the singular value decomposition."""

    def __init__(self, net: Small) -> None:
        super().__init__(net.parameters(), {})
        self.hidden = {net.first.weight, net.second.weight, net.filters.weight}
        others = [p for p in net.parameters() if p not in self.hidden]
        matrices, vectors = [p for p in others if p.ndim > 1], [p for p in others if p.ndim == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), **LIKE_TORCHS)
        self.means = {p: torch.zeros_like(p) for p in self.hidden}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.adamw.step()
        for p, mean in self.means.items():
            mean.mul_(0.95).add_(0.05 * p.grad)
            update = 0.95 * mean + 0.05 * p.grad
            u, values, vh = torch.linalg.svd(update.flatten(1), full_matrices=False)
            values = values / values.square().sum().sqrt()
            for _ in range(5):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            turned = (u @ torch.diag(values) @ vh).view_as(p)
            longest = max(len(p), p.numel() // len(p))
            p.copy_((1 - 0.03 * 0.1) * p - 0.03 * 0.2 * math.sqrt(longest) * turned)


@pytest.mark.parametrize("foreach", [False, True])
def test_formula(foreach: bool) -> None:
    torch.testing.assert_close(path(lambda net: muon(net, foreach=foreach)), path(ByFormula), rtol=1e-9, atol=1e-9)


class Torchs(Optimizer):
    """torch's own two, each with its part of the small network without filters."""

    def __init__(self, net: Small) -> None:
        super().__init__(net.parameters(), {})
        hidden, matrices, vectors = (group["params"] for group in muon_groups(net, adamw=["filters.*"]))
        self.muon = torch.optim.Muon(hidden, **LIKE_TORCHS, **MOMENTUM, adjust_lr_fn="match_rms_adamw")
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), **LIKE_TORCHS)

    def step(self, closure: Any = None) -> None:
        self.muon.step()
        self.adamw.step()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_it_is_torchs_muon_and_adamw() -> None:
    """To the rounding of bfloat16, in which torch's always computes: 2**-8 of what was moved."""
    options = {**LIKE_TORCHS, **MOMENTUM, "dtype": "bfloat16"}
    found = path(lambda net: Muon(muon_groups(net, adamw=["filters.*"]), **options), torch.float32)
    expected = path(Torchs, torch.float32)
    moved = (expected[-1] - expected[0]).abs().mean()
    assert (found - expected).abs().mean() < 2**-8 * moved < 1e-3


@pytest.mark.parametrize("foreach", [False, True])
def test_what_is_not_hidden_takes_torchs_steps_bit_for_bit(foreach: bool) -> None:
    everything = ["*"]
    found = path(lambda net: Muon(muon_groups(net, adamw=everything), **LIKE_TORCHS, foreach=foreach), torch.float32)
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]

    def torchs(net: nn.Module) -> Optimizer:
        _, *rest = (group["params"] for group in muon_groups(net, adamw=everything))
        both = [{**group, "params": params} for group, params in zip(groups, rest, strict=True)]
        return torch.optim.AdamW(both, betas=(0.9, 0.95), **LIKE_TORCHS, foreach=foreach)

    assert torch.equal(found, path(torchs, torch.float32))


def test_a_step_is_as_long_whatever_the_loss_is_multiplied_by() -> None:
    options = {"weight_decay": 0.0, "eps": 1e-30}
    one, other = (path(lambda net: muon(net, **options), scale=scale) for scale in (1.0, 64.0))
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("overflow", [False, True])
def test_a_loss_scaler_divides_and_skips(overflow: bool) -> None:
    """Its scale is a power of two: the same bits as without it, and as without the step that overflows."""

    def trained(scaled: bool) -> Tensor:
        x = nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))
        optimizer, scaler = Muon([x]), torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=scaled)
        for step in range(4):
            optimizer.zero_grad()
            loss = (x * (x + step).sin()).sum() * (torch.inf if step == 2 and overflow else 1.0)
            if scaled or loss.isfinite():
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return x.detach()

    assert torch.equal(trained(True), trained(False))


def test_goes_on_bit_for_bit_from_its_state() -> None:
    class Interrupted:
        """Another optimizer takes over after each step, through a file that holds no code."""

        def __init__(self, net: nn.Module) -> None:
            self.net, self.optimizer = net, muon(net)

        def zero_grad(self) -> None:
            self.optimizer.zero_grad()

        def step(self) -> None:
            self.optimizer.step()
            file = io.BytesIO()
            torch.save(self.optimizer.state_dict(), file)
            self.optimizer = muon(self.net, lr=1.0)
            self.optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))

    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(path(Interrupted, dtype), path(muon, dtype))


def test_state_is_tensors_by_parameter() -> None:
    net = Small()
    optimizer = muon(net)
    net(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
    optimizer.step()
    assert set(optimizer.state) == set(net.parameters())
    assert {p: set(optimizer.state[p]) for p in optimizer.param_groups[0]["params"]} == {
        p: {"momentum_buffer"} for p in (net.first.weight, net.second.weight, net.filters.weight)
    }
    assert all(isinstance(value, Tensor) for state in optimizer.state.values() for value in state.values())
    held = sum(value.numel() for state in optimizer.state.values() for value in state.values() if value.dim())
    hidden = sum(p.numel() for p in optimizer.param_groups[0]["params"])
    assert held == 2 * sum(p.numel() for p in net.parameters()) - hidden


def test_a_parameter_without_gradient_waits() -> None:
    """Cut off by partial backpropagation, or frozen for now: neither decay nor momentum; then it goes on."""
    net, alone = Small(), Small()
    alone.load_state_dict(net.state_dict())
    optimizers = [muon(net), muon(alone)]
    before = [p.clone() for p in net.parameters()]
    late = {net.first.weight, net.table.weight}
    for step in range(4):
        for model in (net, alone):
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
        for parameter in late if step < 2 else ():
            parameter.grad = None
        optimizers[0].step()
        if step >= 2:
            optimizers[1].step()
        if step == 1:
            unmoved = [torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True)]
            assert unmoved == [p in late for p in net.parameters()]
            assert not late & set(optimizers[0].state)
    assert torch.equal(net.first.weight, alone.first.weight)
    assert torch.equal(net.table.weight, alone.table.weight)
    assert not torch.equal(net.second.weight, alone.second.weight)


@pytest.mark.parametrize(("count", "together"), [(8, 2), (1, 1)])
def test_memory_while_stepping(monkeypatch: pytest.MonkeyPatch, count: int, together: int) -> None:
    """A copy of the hidden matrices, and five of what one call has: square ones, whose products are as large."""
    parameters = [nn.Parameter(torch.randn(64, 64)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    given = [parameter.grad.clone() for parameter in parameters]
    optimizer, matrix, ledger = Muon(parameters), 4 * 64 * 64, Ledger()
    optimizer.step()
    monkeypatch.setattr(newton_schulz, "CACHE_BYTES", together * matrix)
    with Counting(ledger, {}):
        optimizer.step()
    most = (count + 5 * together) * matrix
    assert most - matrix < ledger.peak_bytes < most + 0.2 * matrix
    assert ledger.present_bytes == 0
    assert all(torch.equal(p.grad, was) for p, was in zip(parameters, given, strict=True)), "they are the user's"


@pytest.mark.parametrize(("option", "message"), [
    ({"lr": -1.0}, "lr must be a number from 0 up, got -1.0"),
    ({"weight_decay": math.nan}, "weight_decay must be a number from 0 up, got nan"),
    ({"betas": (0.9, 1.0)}, r"betas\[1\] must be in \[0, 1\), got 1.0"),
    ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0: in small .* ddp and 0.9 .* 0.95 is usual"),
    ({"dtype": "int8"}, "dtype must be .*bfloat16.* got 'int8'"),
    ({"steps": 0}, "steps must be a whole number from 1 up, got 0: 5 are usual"),
])  # fmt: skip
@pytest.mark.parametrize("of_a_group", [False, True])
def test_refuses(option: dict[str, Any], message: str, of_a_group: bool) -> None:
    x = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [x], **option}]) if of_a_group else Muon([x], **option)


@pytest.mark.parametrize("tensor", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.complex64)], ids=["vector", "pairs"])
def test_refuses_what_is_no_matrix(tensor: Tensor) -> None:
    with pytest.raises(
        ValueError,
        match=r"a hidden parameter of shape .* is no real matrix: give Muon\(muon_groups\(self\)\), or hidden=False in",
    ):
        Muon([nn.Parameter(tensor)])


def test_a_group_that_is_refused_is_not_added() -> None:
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    optimizer = Muon([matrix])
    forms: tuple[Any, ...] = (vector, iter([vector]), [("bias", vector)])
    for params in forms:
        with pytest.raises(ValueError, match="or hidden=False in its group"):
            optimizer.add_param_group({"params": params})
    with pytest.raises(TypeError, match="set"):
        optimizer.add_param_group({"params": {nn.Parameter(torch.zeros(2, 2))}})
    assert [group["params"] for group in optimizer.param_groups] == [[matrix]]
    optimizer.add_param_group({"params": iter([vector]), "hidden": False})
    assert optimizer.param_groups[1]["params"] == [vector]


def test_refuses_sparse_gradients() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"Muon takes no sparse gradients"):
        Muon(muon_groups(table)).step()


def test_returns_what_the_closure_returns_and_lets_it_differentiate() -> None:
    x = nn.Parameter(torch.eye(2))
    optimizer = Muon([x])

    def closure() -> Tensor:
        loss = x.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert x.norm() < math.sqrt(2)


def pull(net: nn.Module, worker: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * worker + step)
    return [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in net.parameters()]


class Pulled(Quadratic):
    """loss = <parameters, directions that depend on worker and step>: hidden matrices of several shapes, and a vector.

    Args:
        devices: of an island, which all have its worker's directions.
    """

    def __init__(self, devices: int = 1) -> None:
        super().__init__()
        shapes = [(5, 3), (3, 5), (4, 4), (7, 2), (4, 4), (6, 2, 3)]
        self.matrices = nn.ParameterList([torch.zeros(*shape, dtype=torch.float64) for shape in shapes[:-1]])
        self.filters = nn.Conv1d(2, 6, 3, bias=False, dtype=torch.float64)
        nn.init.ones_(self.filters.weight)
        self.devices = devices

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        directions = pull(self, self.global_rank // self.devices, self.global_step)
        pairs = zip(self.parameters(), directions, strict=True)
        return torch.stack([(p * direction).sum() for p, direction in pairs]).sum()

    def configure_optimizers(self) -> Optimizer:
        return Muon(muon_groups(self, hidden=["filters.*"]), lr=0.02)


def train(folder: Path, size: int, strategy: Any, devices: int) -> None:
    settings = {**QUIET, "max_steps": STEPS, "devices": size}
    Trainer(**settings, strategy=strategy, callbacks=[Record(folder)]).fit(Pulled(devices))


def alone(worker: Callable[[nn.Module, int], list[Tensor]]) -> Tensor:
    """[steps, parameters] of one process that is given these gradients."""
    net, visited = Pulled(), []
    optimizer = net.configure_optimizers()
    for step in range(STEPS):
        for parameter, gradient in zip(net.parameters(), worker(net, step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        visited.append(nn.utils.parameters_to_vector(net.parameters()).detach().clone())
    return torch.stack(visited)


def test_under_ddp_it_is_one_process_with_the_mean_gradient(tmp_path: Path) -> None:
    in_processes(train, tmp_path, 2, "ddp_fork", 1)
    expected = alone(
        lambda net, step: [(a + b) / 2 for a, b in zip(pull(net, 0, step), pull(net, 1, step), strict=True)]
    )
    torch.testing.assert_close(recorded(tmp_path, 2), expected[:, None].expand(-1, 2, -1), rtol=1e-9, atol=1e-9)


@pytest.mark.sampled
@pytest.mark.parametrize("island", [AllReduce(2), FullyShard(2), FullyShard(4)], ids=str)
def test_under_gossip_islands_update_as_one_process_does(tmp_path: Path, island: Island) -> None:
    """One island, so that nothing is mixed: shards, even and uneven, against the unsharded optimizer."""
    in_processes(train, tmp_path, island.devices, GossipStrategy(start_method="fork", island=island), island.devices)
    expected = alone(lambda net, step: pull(net, 0, step))[:, None].expand(-1, island.devices, -1)
    torch.testing.assert_close(recorded(tmp_path, island.devices), expected, rtol=1e-9, atol=1e-9)


def test_its_defaults_are_those_of_the_recipes() -> None:
    conf = OmegaConf.load("conf/optimizer/muon.yaml")
    defaults = Muon([torch.zeros(2, 2)]).defaults
    given = {name: conf[name] for name in conf if not name.startswith("_")}
    assert {name: defaults[name] for name in given} == {**given, "betas": tuple(given["betas"])}


def test_all_parameters_without_groups_end_in_a_line_with_the_remedy() -> None:
    with pytest.raises(
        ValueError,
        match=r"^a hidden .* no real matrix: give Muon\(muon_groups\(self\)\), or hidden=False in its group$",
    ):
        Muon(nn.Linear(3, 3).parameters())
