"""Outer rules against torchft's DiLoCo, against the written recursion, and what is their own: anchors, coarse ways."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchft import local_sgd

from lightning_decentral.gossip import (
    Complete,
    Every,
    Gossip,
    Int4,
    LearningRatePower,
    LinearRate,
    Outer,
    OuterNesterov,
    Own,
    PseudoGradient,
    Ring,
    Stream,
    TopK,
    Turn,
    simulate,
)
from lightning_decentral.gossip.compute.combine.outer import suited_lr, suited_momentum

SIZE, DIM, H = 3, 6, 4


def minima(size: int = SIZE) -> Tensor:
    return torch.arange(size).double()[:, None] * torch.tensor([1.0, -0.5, 2.0, 0.1, 3.0, 1.0]).double()


def gradient(x: Tensor, step: int) -> Tensor:
    """Of quadratics with another minimum and curvature on each worker."""
    return (1 + 0.2 * torch.arange(len(x)).double()[:, None]) * (x - minima(len(x)))


def equal_start(size: int = SIZE) -> Tensor:
    return torch.randn(DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64).expand(size, DIM).clone()


# ---- torchft's ----------------------------------------------------------------------------------------------------


class Crowd:
    """What torchft's DiLoCo asks of its manager, for workers that are threads: a mean, and commits that succeed."""

    def __init__(self, barrier: threading.Barrier, rows: list[Tensor | None], rank: int) -> None:
        self._use_async_quorum = False
        self._barrier, self._rows, self._rank, self._step = barrier, rows, rank, 0

    def register_state_dict_fn(self, *_: Any) -> None: ...
    def disallow_state_dict_read(self) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def start_quorum(self) -> None: ...

    def current_step(self) -> int:
        return self._step

    def should_commit(self) -> bool:
        self._step += 1
        return True

    def allreduce(self, tensor: Tensor, should_quantize: bool) -> Any:
        self._rows[self._rank] = tensor.clone()
        self._barrier.wait(10)
        tensor.copy_(torch.stack([row for row in self._rows if row is not None]).mean(0))
        self._barrier.wait(10)
        return SimpleNamespace(wait=lambda: True)


class Part(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values.clone())


def torchfts(parts: int, steps: int, lr: float, momentum: float) -> Tensor:
    """[steps + 1, size, dim] of SGD under torchft's DiLoCo, a thread for each worker."""
    barrier, rows = threading.Barrier(SIZE), [None] * SIZE

    def worker(rank: int) -> Tensor:
        fragments = [Part(part) for part in equal_start()[0].chunk(parts)]
        values = [fragment.values for fragment in fragments]
        inner = torch.optim.SGD(values, lr=0.05)
        outer = [torch.optim.SGD([v], lr=lr, momentum=momentum, nesterov=True) for v in values]
        path = [torch.cat([v.detach() for v in values])]
        with local_sgd.DiLoCo(Crowd(barrier, rows, rank), fragments, inner, outer, H, pin_memory=False):
            for step in range(steps):
                own = torch.zeros(SIZE, DIM, dtype=torch.float64)
                own[rank] = path[-1]
                for value, part in zip(values, gradient(own, step)[rank].chunk(parts), strict=True):
                    value.grad = part
                inner.step()
                path.append(torch.cat([v.detach() for v in values]))
        return torch.stack(path)

    with ThreadPoolExecutor(SIZE) as pool:
        return torch.stack([*pool.map(worker, range(SIZE))], dim=1)


@pytest.mark.threads
@pytest.mark.parametrize("rule", [OuterNesterov, PseudoGradient])
@pytest.mark.parametrize("parts", [1, 2])
def test_diloco_and_its_streaming_form_are_torchfts(rule: type[OuterNesterov], parts: int) -> None:
    """2311.08105 and 2501.18512, each fragment landing where it leaves."""
    topology = Every(H, Complete()) if parts == 1 else Stream(H, parts, Complete())
    measured = simulate(topology, rule(lr=0.7, momentum=0.9), gradient, equal_start(), 25, 0.05, 0)
    torch.testing.assert_close(measured, torchfts(parts, 25, 0.7, 0.9), rtol=1e-12, atol=1e-12)


# ---- the written recursion ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [OuterNesterov, PseudoGradient])
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_fragments_land_late_and_local_progress_is_kept(rule: type[OuterNesterov], delay: int) -> None:
    """b <- mu b + d; anchor <- anchor + eta (d + mu b); x <- x + (anchor - sent), fragment by fragment, H / P apart."""
    parts, eta, mu = 2, 0.6, 0.5
    x = equal_start().numpy()
    anchor, b = x[0].copy(), np.zeros(DIM)
    columns, expected, flying = np.split(np.arange(DIM), parts), [x], []
    for step in range(24):
        x = x - 0.05 * gradient(torch.from_numpy(x), step).numpy()
        for p, c in enumerate(columns):
            if (step + 1) % H == (p + 1) * H // parts % H:
                flying.append((step + delay, c, x[:, c]))
        for _, c, sent in [flight for flight in flying if flight[0] == step]:
            d = sent.mean(0) - anchor[c]
            b[c] = mu * b[c] + d
            anchor[c] += eta * (d + mu * b[c])
            x = x.copy()
            x[:, c] += anchor[c] - sent
        expected.append(x)
    measured = simulate(
        Stream(H, parts, Complete()), rule(lr=eta, momentum=mu), gradient, equal_start(), 24, 0.05, delay
    )
    np.testing.assert_allclose(measured.numpy(), np.stack(expected), rtol=1e-11, atol=1e-11)


def test_fragments_talk_apart_and_together_they_are_the_plan() -> None:
    plan = Stream(6, 3, Ring())
    talks = [[bool(part.sources(0, 4, step)) for step in range(12)] for part in plan.fragments]
    assert [[step + 1 for step in range(12) if row[step]] for row in talks] == [[2, 8], [4, 10], [6, 12]]
    assert [any(column) for column in zip(*talks, strict=True)] == [bool(plan.sources(0, 4, t)) for t in range(12)]
    assert Stream(5, 1, Ring()).fragments[0].sources(1, 4, 4) == Every(5, Ring()).sources(1, 4, 4)


# ---- coarse ways ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [Int4(block=3), TopK(fraction=0.34, block=3)], ids=str)
def test_what_a_coarse_codec_loses_is_sent_later(codec: Any) -> None:
    """After one update all meet at the mean of where it led them: nothing of a way is lost, there or back."""
    still: Callable[[Tensor, int], Tensor] = lambda x, step: gradient(x, step) * (step < 1)  # noqa: E731
    rule = PseudoGradient(lr=1.0, momentum=0.0)
    path = simulate(Every(2, Complete()), rule, still, equal_start(), 80, 0.05, 0, codec=codec)
    led = equal_start() - 0.05 * gradient(equal_start(), 0)
    torch.testing.assert_close(path[-1], led.mean(0).expand(SIZE, DIM), rtol=1e-6, atol=1e-6)
    assert float((path[2] - path[2].mean(0)).abs().max()) > 1e-3, "the codec lost nothing: the test could not fail"


def test_every_worker_must_hear_all() -> None:
    with pytest.raises(ValueError, match=r"averages all workers equally, .* worker 0 receives from 2 of 4"):
        PseudoGradient().check(Every(2, Ring()), 5, Own(), 0)


# ---- exact steps ----------------------------------------------------------------------------------------------------


def test_exact_steps_are_data_parallel_and_the_rule_begins_after_them() -> None:
    x0, rule, plan = equal_start(), OuterNesterov(), Every(H, Complete())
    path = simulate(plan, rule, gradient, x0, 16, 0.05, 0, exact_steps=8)
    x, expected = x0[0], [x0[0]]
    for step in range(8):
        x = x - 0.05 * gradient(x.expand(SIZE, DIM), step).mean(0)
        expected.append(x)
    torch.testing.assert_close(path[:9], torch.stack(expected)[:, None].expand(9, SIZE, DIM), rtol=1e-12, atol=1e-12)
    after = simulate(plan, rule, gradient, path[8], 8, 0.05, 0)
    torch.testing.assert_close(path[8:], after, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("delay", [0, 1])
def test_exact_steps_serve_every_rule(delay: int) -> None:
    x0 = equal_start()
    path = simulate(Ring(), Gossip(), gradient, x0, 6, 0.05, delay, exact_steps=6)
    assert float((path - path.mean(1, keepdim=True)).abs().max()) < 1e-12


# ---- settings -------------------------------------------------------------------------------------------------------


def test_what_suits_workers_and_local_steps() -> None:
    assert [round(suited_lr(n), 3) for n in (1, 2, 4, 8, 16, 64)] == [0.6, 0.6, 0.6, 0.8, 1.0, 1.0]
    assert [round(suited_momentum(h), 3) for h in (1, 10, 30, 500)] == [0.55, 0.55, 0.85, 0.85]
    assert 0.55 < suited_momentum(15) < suited_momentum(20) < 0.85
    rule = OuterNesterov(lr=None, momentum=None).placed(Stream(30, 5, Complete()).fragments[0], 8)
    assert rule == OuterNesterov(lr=0.8, momentum=LinearRate(first=0.85 / 2, last=0.85, rounds=300))
    assert Outer().placed(Every(30, Complete()), 8) == Outer(), "what is given stays"


def test_a_schedule_is_followed() -> None:
    """By the recursion with one eta and mu a round."""
    eta, mu = LearningRatePower(rate=0.8, power=0.5), LinearRate(first=0.1, last=0.7, rounds=12)
    rates = [0.05 / (1 + 0.2 * step) for step in range(16)]
    anchor, b, x = equal_start()[0], torch.zeros(DIM).double(), equal_start()
    for step, rate in enumerate(rates):
        x = x - rate * gradient(x, step)
        if (step + 1) % H == 0:
            m, way = 0.1 + 0.6 * min(1, step / 12), x.mean(0) - anchor
            b = m * b + way
            anchor = anchor + 0.8 * (rate / 0.05) ** 0.5 * (way + m * b)
            x = anchor.expand(SIZE, DIM)
    rule = OuterNesterov(lr=eta, momentum=mu)
    path = simulate(Every(H, Complete()), rule, gradient, equal_start(), 16, lambda step: rates[step], 0)
    torch.testing.assert_close(path[-1], x, rtol=1e-11, atol=1e-11)
    number = Turn(11, 0.02, 0.05, lambda: torch.ones(()), lambda: torch.ones(()))
    assert rule.mixing(number) == {"outer_lr": eta(number), "outer_momentum": mu(number)}


@pytest.mark.parametrize(("make", "said"), [
    (lambda: Stream(8, 3, Complete()), "parts must divide its steps, got 3 and 8: .* use steps=9"),
    (lambda: Stream(8, 0, Complete()), "Stream's parts must be at least 1"),
    (lambda: OuterNesterov(momentum=LinearRate(last=1.0, rounds=5)), r"momentum must be in \[0, 1\), got 1.0"),
    (lambda: LearningRatePower(rate=1.5), r"LearningRatePower's rate must be in \(0, 1\], got 1.5"),
], ids=["parts of steps", "no part", "momentum", "rate"])  # fmt: skip
def test_wrong_settings_are_one_line(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
