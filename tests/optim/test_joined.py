"""Parameters that are updated together have the bits of each by itself, and optimizers that can't do that are left."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_decentral.optim import Muon
from lightning_decentral.optim.joined import ELEMENTWISE, MOST_ELEMENTS, JoinedUpdate
from lightning_decentral.shared.compute.buckets import Bucket

SHAPES = [(3,), (5, 7), (1,), (129,), (2, 3, 4), (MOST_ELEMENTS + 1,), (31, 33)]
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "AdamW": {"amsgrad": True},
    "RMSprop": {"momentum": 0.9, "centered": True},
}


def parameters() -> list[nn.Parameter]:
    chance = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=chance)) for shape in SHAPES]


def groups(of: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": [*of[:3]], "lr": 0.02}, {"params": [*of[3:]]}]


def gradients(step: int) -> list[Tensor]:
    chance = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=chance) * 10.0 ** (-step) for shape in SHAPES]


def pair(kind: type[Optimizer]) -> tuple[list[list[nn.Parameter]], list[Any]]:
    """(parameters, optimizer) by itself and joined."""
    own = [parameters(), parameters()]
    optimizers: list[Any] = [kind(groups(row), lr=0.01, **OPTIONS.get(kind.__name__, {})) for row in own]  # type: ignore[call-arg]
    return own, optimizers


def states(optimizer: Optimizer, row: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [dict(optimizer.state.get(p, {})) for p in row]


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_every_step_has_the_bits_of_the_optimizer_by_itself(kind: type[Optimizer]) -> None:
    own, (alone, other) = pair(kind)
    joined = JoinedUpdate(other)
    for step in range(8):
        for row in own:
            for place, (p, g) in enumerate(zip(row, gradients(step), strict=True)):
                p.grad = None if step == 6 and place == 1 else g.clone()  # from then on it steps by itself
        for optimizer in (alone, other):
            optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
        torch.nn.utils.clip_grad_norm_(own[0], 1.0)
        alone.step()
        joined.step(1.0)
        assert bool(joined._joined) is (step < 6)
        torch.testing.assert_close(own[1], own[0], rtol=0, atol=0)
        torch.testing.assert_close(states(other, own[1]), states(alone, own[0]), rtol=0, atol=0)
        assert [len(group["params"]) for group in other.param_groups] == [3, 4]
        assert set(other.state) <= set(own[1])


def test_states_that_are_moved_are_no_longer_joined() -> None:
    own, (alone, other) = pair(torch.optim.AdamW)
    joined = JoinedUpdate(other)
    for step in range(4):
        for row in own:
            for p, g in zip(row, gradients(step), strict=True):
                p.grad = g.clone()
        alone.step()
        joined.step()
        if step == 1:  # as a bucket of states that travel does it
            moved = other.state[own[1][0]]["exp_avg"]
            moved.data = moved.data.clone()
        for optimizer, row in zip((alone, other), own, strict=True):
            optimizer.state[row[0]]["exp_avg"].add_(0.1)
    torch.testing.assert_close(own[1], own[0], rtol=0, atol=0)
    assert joined._joined == []


@pytest.mark.parametrize("like", ["half", "fused", "muon", "sparse"])
def test_what_may_have_other_bits_is_left_as_it_is(like: str) -> None:
    row = [nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16 if like == "half" else torch.float32)) for _ in range(3)]
    for p in row:
        p.grad = torch.ones_like(p).to_sparse() if like == "sparse" else torch.ones_like(p)
    made = {"muon": lambda: Muon(row, lr=0.1), "fused": lambda: torch.optim.AdamW(row, fused=True)}
    joined = JoinedUpdate(made.get(like, lambda: torch.optim.SGD(row, lr=0.1))())
    joined.step()
    assert joined._joined == []


@pytest.mark.parametrize("clip", [0.5, 1e3])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD], ids=lambda kind: kind.__name__)
def test_parameters_of_a_bucket_are_clipped_and_updated_where_they_lie(kind: type[Optimizer], clip: float) -> None:
    own = [[nn.Parameter(torch.ones(shape)) for shape in [(32,), (4, 8), (3, 32)]] for _ in range(2)]
    alone, other = (kind(row, lr=0.01, **OPTIONS.get(kind.__name__, {})) for row in own)  # type: ignore[call-arg]
    bucket, joined = Bucket(own[1]), JoinedUpdate(other)
    for step in range(6):
        if step == 4:  # the user gives one another storage
            own[1][1].data = own[1][1].data.clone()
        for row in own:
            chance = torch.Generator().manual_seed(step)
            for p in row:
                p.grad = torch.randn(p.shape, generator=chance)
        torch.nn.utils.clip_grad_norm_(own[0], clip)
        alone.step()
        joined.step(clip)
        assert [one.flat.data_ptr() for one in joined._joined or []] == [bucket.flat.data_ptr()] * (step < 4)
        torch.testing.assert_close(own[1], own[0], rtol=0, atol=0)
        torch.testing.assert_close([p.grad for p in own[1]], [p.grad for p in own[0]], rtol=0, atol=0)
        torch.testing.assert_close(states(other, own[1]), states(alone, own[0]), rtol=0, atol=0)
