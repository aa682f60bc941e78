"""Every rule against the recursion of its paper, written anew in plain matrices; and the laws that all rules keep."""

import io
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_decentral.gossip import (
    Combine,
    Complete,
    ConsensusControl,
    Every,
    ExactDiffusion,
    Gossip,
    GradientTracking,
    Hypercube,
    LearningRatePower,
    LinearRate,
    OnePeerExponential,
    OutDegree,
    Outer,
    OuterNesterov,
    Own,
    PeriodicAverage,
    PseudoGradient,
    PushSum,
    QuasiGlobalMomentum,
    RandomMatching,
    RelaySum,
    Ring,
    Star,
    Topology,
    Tree,
    Uniform,
    simulate,
)
from lightning_decentral.gossip.compute.combine.combine import State, Turn
from lightning_decentral.gossip.plan.weights import mixing_matrix, talking_steps
from lightning_decentral.gossip.wire.consensus import mixer_of
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.gossip.wire.simulation import MatrixExchange
from tests.gossip.rules import IRREGULAR, Rule, every_rule, instances
from tests.gossip.wire.test_exchange import start

STEPS = 12
Array = np.ndarray[Any, Any]


@dataclass
class Rows:
    flat: Tensor

    def adopt(self) -> None:
        """Nothing else holds them."""


def minima(size: int) -> Array:
    return np.arange(size)[:, None] * np.array([1.0, -0.5, 2.0, 0.1, 3.0])


def slopes(x: Any) -> Any:
    """Gradients of quadratics with another minimum and curvature on each worker."""
    size = len(x)
    curvature = 1 + 0.2 * np.arange(size)[:, None]
    if isinstance(x, Tensor):
        return torch.from_numpy(curvature) * (x - torch.from_numpy(minima(size)))
    return curvature * (x - minima(size))


def gradient(x: Tensor, step: int) -> Tensor:
    return slopes(x)


def optimum(size: int) -> Array:
    curvature = 1 + 0.2 * np.arange(size)[:, None]
    return (curvature * minima(size)).sum(0) / curvature.sum()


def eta(step: int) -> float:
    """A learning rate that warms up and falls."""
    return 0.1 * min(1.0, (step + 1) / 3) / (1 + 0.1 * step)


def assert_path(rule: Combine, topology: Topology, x0: Array, delay: int, expected: list[Array], rates: Any) -> None:
    measured = simulate(topology, rule, gradient, torch.from_numpy(x0), len(expected) - 1, rates, delay)
    np.testing.assert_allclose(measured.numpy(), np.stack(expected), rtol=1e-11, atol=1e-11)


# ---- rates -----------------------------------------------------------------------------------------------------------


def test_rates_follow_their_formula() -> None:
    """gamma W + (1 - gamma) I with gamma = (lr / lr_max)^2 and with a line over the rounds."""
    x0, W = start(5).numpy(), mixing_matrix(Ring(), 5, 0)
    peak, powers = 0.0, []
    for step in range(STEPS):
        peak = max(peak, eta(step))
        powers.append((eta(step) / peak) ** 2)
    assert powers[1] == 1 > powers[5] > powers[9]
    lines = [1 - 0.7 * min(1, step / 8) for step in range(STEPS)]
    rules = {LearningRatePower(power=2.0): powers, LinearRate(last=0.3, rounds=8): lines}
    for rate, gammas in rules.items():
        x, expected = x0, [x0]
        for step, gamma in enumerate(gammas):
            x = (gamma * W + (1 - gamma) * np.eye(5)) @ (x - eta(step) * slopes(x))
            expected.append(x)
        assert_path(Gossip(rate=rate), Ring(), x0, 0, expected, eta)


# ---- rules against their papers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rates", [lambda _: 0.05, lambda step: 0.1 / (1 + 0.1 * step), eta])
def test_quasi_global_momentum(rates: Any) -> None:
    """2102.04761, algorithm 1; but that displacements don't grow where the learning rate does."""
    mu, W = 0.8, mixing_matrix(Ring(), 5, 0)
    x = start(5).numpy()
    m, expected = np.zeros_like(x), [x]
    for step in range(STEPS):
        m = m * min(1.0, rates(step - 1) / rates(step)) if step else m
        half = x - rates(step) * (mu * m + slopes(x))
        new = W @ half
        m = mu * m + (1 - mu) * (x - new) / rates(step)
        x = new
        expected.append(x)
    assert_path(QuasiGlobalMomentum(momentum=mu), Ring(), expected[0], 0, expected, rates)


@pytest.mark.parametrize("floor", [1e-2, 1e-6, 1e-12, 0.0])
@pytest.mark.parametrize("shape", ["restarts", "cycles", "one step"])
@pytest.mark.parametrize("delay", [0, 1])
def test_quasi_global_momentum_bears_rates_that_nearly_vanish_and_rise_again(
    floor: float, shape: str, delay: int
) -> None:
    """As near to the optimum, and as far away at worst, as without momentum."""
    share: dict[str, Callable[[int], float]] = {
        "restarts": lambda step: (1 + np.cos(np.pi * (step % 20) / 19)) / 2,
        "cycles": lambda step: abs((step % 20) - 10) / 10,
        "one step": lambda step: float(step % 20 != 19),
    }

    def rates(step: int) -> float:
        return floor + (0.1 - floor) * float(share[shape](step))

    apart = []
    for rule in (Gossip(), QuasiGlobalMomentum(momentum=0.9)):
        path = simulate(Ring(), rule, gradient, torch.zeros(5, 5, dtype=torch.float64), 80, rates, delay)
        apart.append((path - torch.from_numpy(optimum(5))).abs())
    assert float(apart[1].max()) <= 1.3 * float(apart[0].max())
    assert float(apart[1][-1].max()) <= 1.3 * float(apart[0][-1].max())


def test_quasi_global_momentum_goes_on_from_a_state_in_units_of_the_gradient() -> None:
    rule, x = QuasiGlobalMomentum(momentum=0.5), torch.ones(3, dtype=torch.float64)
    old = {"last": x.clone(), "momentum": torch.full_like(x, 2.0)}
    turn = Turn(7, 0.1, 0.1, lambda: torch.ones(()), lambda: torch.ones(()))
    rule.adapt(x, old, turn)
    torch.testing.assert_close(x, torch.full_like(x, 1 - 0.1 * 0.5 * 2.0))


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_d2_and_exact_diffusion(rate: float) -> None:
    """1803.07068, algorithm 1; with (W + I) / 2 it is 1702.05122."""
    W = rate * mixing_matrix(Ring(), 5, 0) + (1 - rate) * np.eye(5)
    before, lr = start(5).numpy(), 0.1
    x = W @ (before - lr * slopes(before))
    expected = [before, x]
    for _ in range(STEPS):
        before, x = x, W @ (2 * x - before - lr * (slopes(x) - slopes(before)))
        expected.append(x)
    assert_path(ExactDiffusion(rate=rate), Ring(), expected[0], 0, expected, 0.1)


def test_overlapped_exact_diffusion_is_extra() -> None:
    """1404.6264, eq. 2.13: x(t+2) = (I + W) x(t+1) - (I + W) / 2 x(t) - a (g(t+1) - g(t)).

    A round at delay 1 mixes what was sent one step before, so the first step is the plain update.
    """
    W, lr = mixing_matrix(Ring(), 5, 0), 0.1
    first = start(5).numpy()
    before = first - lr * slopes(first)
    x = W @ before - lr * slopes(before)
    expected = [first, before, x]
    for _ in range(STEPS):
        new = (np.eye(5) + W) @ x - (np.eye(5) + W) / 2 @ before - lr * (slopes(x) - slopes(before))
        before, x = x, new
        expected.append(x)
    assert_path(ExactDiffusion(), Ring(), first, 1, expected, 0.1)


@pytest.mark.parametrize("delay", [0, 1])
def test_gradient_tracking(delay: int) -> None:
    """delay 1: x+ = W x - a y, y+ = W y + g+ - g (1607.03218, after a first step alone); delay 0: x+ = W (x - a y)."""
    W, lr = mixing_matrix(OnePeerExponential(), 4, 0), 0.1
    topology = OnePeerExponential()
    x = start(4).numpy()
    g = slopes(x)
    y, expected = g, [x]
    for step in range(STEPS):
        if delay:
            mix = np.eye(4) if step == 0 else mixing_matrix(topology, 4, step - 1)
            y = y if step == 0 else mix @ y + slopes(x) - g
            g = slopes(x)
            x = mix @ x - lr * y
        else:
            W = mixing_matrix(topology, 4, step)
            y = y if step == 0 else mixing_matrix(topology, 4, step - 1) @ y + slopes(x) - g
            g = slopes(x)
            x = W @ (x - lr * y)
        expected.append(x)
    assert_path(GradientTracking(), topology, expected[0], delay, expected, 0.1)


@pytest.mark.parametrize("delay", range(5))
def test_push_sum(delay: int) -> None:
    """1811.10792, algorithm 2: what j gives away leaves X_j at once and arrives `delay` steps later."""
    size, lr = 5, 0.05
    P = [[0.0] * size for _ in range(size)]
    for j in range(size):
        hearers = [i for i in range(size) if j in IRREGULAR.sources(i, size, 0)]
        for i in [j, *hearers]:
            P[i][j] = 1 / (1 + len(hearers))
    X, w = list(start(size).numpy()), [1.0] * size
    expected, wire = [np.stack(X)], deque[Any]()
    for _ in range(STEPS):
        g = slopes(np.stack([X[i] / w[i] for i in range(size)]))
        X = [X[i] - lr * g[i] for i in range(size)]
        arriving = wire.popleft() if delay and len(wire) == delay else None
        if arriving:
            X, w = [X[i] + arriving[i][0] for i in range(size)], [w[i] + arriving[i][1] for i in range(size)]
        sent = [
            (sum(P[i][j] * X[j] for j in range(size) if j != i), sum(P[i][j] * w[j] for j in range(size) if j != i))
            for i in range(size)
        ]
        X, w = [P[i][i] * X[i] for i in range(size)], [P[i][i] * w[i] for i in range(size)]
        if delay:
            wire.append(sent)
        else:
            X, w = [X[i] + sent[i][0] for i in range(size)], [w[i] + sent[i][1] for i in range(size)]
        expected.append(np.stack([X[i] / w[i] for i in range(size)]))
    assert_path(PushSum(), IRREGULAR, expected[0], delay, expected, lr)


@pytest.mark.parametrize("delay", [0, 2])
def test_outer_steps_over_random_pairs_are_noloco(delay: int) -> None:
    """2506.10911: with D_i = theta_i - phi_i and means over the pair (or alone),
    m_i = a m_i + b mean D - b (phi_i - mean phi),  phi_i += m_i, pair by pair; what is learnt on the way is added."""
    size, every, a, b, lr = 5, 3, 0.5, 0.7, 0.05
    topology = Every(every, RandomMatching(rounds=5))
    phi, m, x = start(size).numpy(), np.zeros((size, 5)), start(size).numpy()
    expected, flying = [x], deque[tuple[int, Array]]()
    for step in range(STEPS):
        x = x - lr * slopes(x)
        if (step + 1) % every == 0:
            flying.append((step, x))
        if flying and flying[0][0] == step - delay:
            launched, theta = flying.popleft()
            new = phi.copy()
            for i in range(size):
                for j in topology.sources(i, size, launched):
                    pull = phi[i] - (phi[i] + phi[j]) / 2
                    m[i] = a * m[i] + b * ((theta[i] - phi[i]) + (theta[j] - phi[j])) / 2 - b * pull
                    new[i] = phi[i] + m[i]
            moved = np.any(new != phi, axis=1, keepdims=True)
            x = np.where(moved, x + new - theta, x)
            phi = new
        expected.append(x)
    assert_path(Outer(lr=b, momentum=a), topology, expected[0], delay, expected, lr)


def test_outer_nesterov_over_all_is_diloco_with_torchs_sgd() -> None:
    """2311.08105: the outer optimizer is torch's own, its gradient the anchor minus the mean of the workers."""
    size, every, lr = 4, 4, 0.05
    anchor = torch.nn.Parameter(start(size).mean(0).clone())
    outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
    x = np.repeat(anchor.detach().numpy()[None], size, axis=0)
    expected = [x]
    for step in range(16):
        x = x - lr * slopes(x)
        if (step + 1) % every == 0:
            anchor.grad = anchor.detach() - torch.from_numpy(x.mean(0))
            outer.step()
            x = np.repeat(anchor.detach().numpy()[None], size, axis=0)
        expected.append(x)
    assert_path(OuterNesterov(), Every(every, Complete()), expected[0], 0, expected, lr)


def relayed(topology: Topology, size: int, delay: int, restart: int, steps: int) -> list[Array]:
    """2110.04175, algorithm 1, with a message of its own to every neighbour, and the mean of what has been counted."""
    neighbours = [topology.sources(i, size, 0) for i in range(size)]
    x, expected = start(size).numpy(), [start(size).numpy()]
    edges = [(i, j) for i in range(size) for j in neighbours[i]]
    heard = {edge: (np.zeros(5), 0) for edge in edges}  # (j, i): what i heard from j last

    def launch(x: Array) -> Any:
        def relay(i: int, j: int) -> tuple[Array, int]:
            others = [heard[k, i] for k in neighbours[i] if k != j]
            return x[i] + sum((m for m, _ in others), np.zeros(5)), 1 + sum(c for _, c in others)

        return {(i, j): relay(i, j) for i, j in edges}

    flight: Any = None
    for step in range(steps):
        x = x - 0.1 * slopes(x)
        rounds = [(step, x, launch(x))] if delay == 0 else [flight] if flight else []
        for number, theta, messages in rounds:
            total = [theta[i] + sum(messages[j, i][0] for j in neighbours[i]) for i in range(size)]
            count = [1 + sum(messages[j, i][1] for j in neighbours[i]) for i in range(size)]
            x = x + np.stack([total[i] / count[i] - theta[i] for i in range(size)])
            begins = number // restart != (number - 1) // restart and number > 0
            heard = {edge: (np.zeros(5), 0) for edge in edges} if begins else messages
        flight = (step, x, launch(x)) if delay else None
        expected.append(x)
    return expected


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("restart", [1000, 9])
@pytest.mark.parametrize(("topology", "size"), [(Tree(), 7), (Tree(children=1), 5), (Star(), 5)], ids=str)
def test_relay_sum_is_relaysgd_message_by_message(topology: Topology, size: int, restart: int, delay: int) -> None:
    expected = relayed(topology, size, delay, restart, 24)
    assert_path(RelaySum(restart=restart), topology, expected[0], delay, expected, 0.1)


@pytest.mark.sampled
@pytest.mark.parametrize(("restart", "bound"), [(100, 3e-4), (10_000, 1e-2)])
def test_relayed_sums_in_single_precision_stay_near_those_in_double(restart: int, bound: float) -> None:
    """1500 rounds on a chain of 9 with gradients that don't fade: what rounding adds up to."""

    def wandering(x: Tensor, step: int) -> Tensor:
        noise = torch.randn(9, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        return noise.to(x.dtype)

    paths = [
        simulate(Tree(children=1), RelaySum(restart=restart), wandering, 10 + start(9).to(dtype), 1500, 0.01, 1)
        for dtype in (torch.float64, torch.float32)
    ]
    apart = (paths[0] - paths[1]).norm(dim=2).mean(1) / paths[0].norm(dim=2).mean(1)
    assert bound / 10 < float(apart.max()) < bound


def test_consensus_control_mixes_while_the_workers_are_far_apart() -> None:
    """Rounds are decided by theta two steps before; written anew with matrices."""
    W, target, lag = mixing_matrix(Ring(), 5, 0), 0.25, 2
    x, expected, thetas, taken, idle = start(5).numpy(), [start(5).numpy()], [], [], 0
    for step in range(40):
        x = x - 0.1 * slopes(x) * (1 if step < 20 else 0)
        known = [theta for theta in thetas[: max(0, step - lag)] if theta is not None]
        above = bool(known) and known[-1] > target
        rounds = 3 if above else int(idle + 1 >= 4)
        idle = 0 if rounds else idle + 1
        squares = np.zeros(2)
        for _ in range(rounds):
            squares += [np.square(W @ x - x).sum(), np.square(x).sum()]
            x = W @ x
        thetas.append(np.sqrt(squares[0] / squares[1]) if rounds else None)
        taken.append(rounds)
        expected.append(x)
    assert set(taken) == {0, 1, 3}
    path = simulate(
        Ring(),
        ConsensusControl(target=target, most=3, probe=4, lag=lag),
        lambda x, step: slopes(x) * (1 if step < 20 else 0),
        torch.from_numpy(expected[0]),
        40,
        0.1,
        0,
    )
    np.testing.assert_allclose(path.numpy(), np.stack(expected), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("delay", [0, 1])
def test_push_sum_is_gossip_where_both_sums_are_one(delay: int) -> None:
    x0 = start(4)
    paths = [
        simulate(OnePeerExponential(), rule, gradient, x0, STEPS, 0.1, delay, Own()) for rule in (PushSum(), Gossip())
    ]
    torch.testing.assert_close(*paths, rtol=1e-12, atol=1e-12)


def test_periodic_average_is_gossip_pga() -> None:
    """2105.09080, algorithm 1: the exact mean in every third step, W elsewhere."""
    W, mean = mixing_matrix(Ring(), 5, 0), np.full((5, 5), 1 / 5)
    x, expected = start(5).numpy(), [start(5).numpy()]
    for step in range(STEPS):
        x = (mean if step % 3 == 2 else W) @ (x - 0.1 * slopes(x))
        expected.append(x)
    assert_path(Gossip(), PeriodicAverage(3, Ring()), expected[0], 0, expected, 0.1)


# ---- what rules promise ----------------------------------------------------------------------------------------------


def distance_to_optimum(rule: Combine, topology: Topology, size: int, delay: int) -> float:
    x0 = torch.zeros(size, 5, dtype=torch.float64)
    path = simulate(topology, rule, gradient, x0, 1500, 0.05, delay)
    return float((path[-1] - torch.from_numpy(optimum(size))).abs().max())


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("rule", [ExactDiffusion(), ExactDiffusion(rate=0.4, memory=0.3), GradientTracking(rate=0.5)])
def test_exact_rules_reach_the_optimum_of_unequal_workers(rule: Combine, delay: int) -> None:
    used = ExactDiffusion(rate=0.3, memory=0.3) if delay == 2 and rule == ExactDiffusion() else rule
    assert distance_to_optimum(used, Ring(), 5, delay) < 1e-9
    assert distance_to_optimum(Gossip(rate=0.5), Ring(), 5, delay) > 1e-2


def test_gradient_tracking_is_exact_on_a_changing_directed_graph_and_with_local_steps() -> None:
    assert distance_to_optimum(GradientTracking(), OnePeerExponential(), 4, 1) < 1e-9
    assert distance_to_optimum(GradientTracking(rate=0.5), Every(3, Ring()), 5, 3) < 1e-9


@pytest.mark.thorough
def test_push_sum_weighs_all_workers_alike_where_gossip_with_those_rows_does_not() -> None:
    """Few hear worker 4, many hear worker 0: the plain mean of what is heard leans to whom many hear."""
    size, small = 5, 0.001
    x0 = torch.zeros(size, 5, dtype=torch.float64)
    best = torch.from_numpy(optimum(size))
    push = simulate(IRREGULAR, PushSum(), gradient, x0, 12000, small)[-1]
    uniform = simulate(IRREGULAR, Gossip(), gradient, x0, 12000, small, weights=Uniform())[-1]
    assert float((push - best).abs().max()) < 0.05
    assert float((uniform - best).abs().max()) > 0.3


# ---- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [r for r in instances() if isinstance(r, Combine)], ids=str)
def test_translation(rule: Combine) -> None:
    """apply(x + d) == apply(x) + d, also after a few steps have filled the state."""
    x0 = start(4)
    rows = Rows(x0.clone())
    mixer = Mixer([rows], rule, MatrixExchange(Ring(), rule.weights, 4), 1)
    for step in range(3):
        rows.flat.sub_(gradient(rows.flat, step), alpha=0.1)
        mixer.step(0.1)
    d = torch.randn_like(x0)
    flight = mixer.state_dict()["flights"][0]
    results = []
    for moved in (x0, x0 + d):
        x, state = moved.clone(), {k: v.clone() for k, v in mixer.state_dict()["states"][0].items()}
        rule.apply(x, flight["sent"][0].clone(), flight["mixed"][0][0].clone(), state, mixer.turn(3))
        results.append(x)
    assert not torch.equal(results[0], x0)
    torch.testing.assert_close(results[1], results[0] + d, rtol=1e-12, atol=1e-12)


def mixer_on(rows: Rows, rule: Rule, topology: Topology, size: int, delay: int) -> Mixer:
    mixer = mixer_of(rule, MatrixExchange(topology, rule.weights, size), delay, lambda: None)
    mixer.extend([rows])
    return mixer


def keeps_the_mean(rule: Rule, topology: Topology, size: int) -> bool:
    """Not where sums are relayed, nor where one of an outer pair is left alone."""
    alone = any(not topology.sources(i, size, t) for i in range(size) for t in talking_steps(topology, size))
    return not isinstance(rule, RelaySum) and not (isinstance(rule, Outer) and alone)


# Ways from anchors say nothing of these: workers that begin apart stay so.
REACHING = [case for case in every_rule((0, 1, 3)) if not isinstance(case[0], PseudoGradient)]


@pytest.mark.sampled
@pytest.mark.parametrize(("rule", "topology", "size", "delay"), REACHING, ids=str)
def test_mixing_alone_keeps_the_mean_and_reaches_it(rule: Rule, topology: Topology, size: int, delay: int) -> None:
    """Within 800 steps. Push-sum: the mean of what all have and of what is under way, sum_i w_i z_i / n once all has
    landed."""
    rows = Rows(start(size))
    mean = rows.flat.mean(0)
    near = 1e-2 * float((rows.flat - mean).norm())
    mixer = mixer_on(rows, rule, topology, size, delay)
    for steps in (7, 100, 100, 600):
        for _ in range(steps):
            mixer.step(1.0)
        mixer.drain()
        share = torch.cat([*mixer.shares(), torch.ones(size, 1)])[:size]
        if keeps_the_mean(rule, topology, size):
            torch.testing.assert_close((share * rows.flat).mean(0), mean, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(share.mean(), torch.ones((), dtype=share.dtype), rtol=1e-10, atol=1e-10)
        if steps >= 100 and float((rows.flat - rows.flat.mean(0)).norm()) < near:
            return
    pytest.fail("the workers are still apart")


@pytest.mark.sampled
@pytest.mark.parametrize(("rule", "topology", "size", "delay"), every_rule((0, 1, 3)), ids=str)
def test_a_resumed_mixer_goes_on_bit_for_bit(rule: Rule, topology: Topology, size: int, delay: int) -> None:
    """Saved, written, read and loaded after 5 of 12 steps."""

    def steps(rows: Rows, mixer: Mixer, first: int, last: int) -> None:
        for step in range(first, last):
            rows.flat.sub_(gradient(rows.flat, step), alpha=eta(step))
            mixer.step(eta(step))

    rows = Rows(start(size))
    mixer = mixer_on(rows, rule, topology, size, delay)
    steps(rows, mixer, 0, 5)
    file = io.BytesIO()
    torch.save({"x": rows.flat, "mixer": mixer.state_dict()}, file)
    steps(rows, mixer, 5, STEPS)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    again = Rows(saved["x"].clone())
    resumed = mixer_on(again, rule, topology, size, delay)
    resumed.load_state_dict(saved["mixer"])
    steps(again, resumed, 5, STEPS)
    assert torch.equal(again.flat, rows.flat)


# ---- stability -------------------------------------------------------------------------------------------------------


def growth(rule: Rule, topology: Topology, size: int, delay: int) -> float:
    """By running it without gradients: distance to the mean after 600 steps over that after 300."""
    x0 = start(size)
    path = simulate(topology, rule, lambda x, _: torch.zeros_like(x), x0 - x0.mean(0), 600, 1.0, delay)
    far = path.square().sum((1, 2)).sqrt()
    return float(far[550:].max() / far[250:300].max().clamp(min=1e-12))


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [1, 2, 3, 4])
@pytest.mark.parametrize("topology", [Ring(), Star(), Hypercube(), Every(2, Ring())], ids=str)
def test_rates_that_are_refused_diverge_and_those_below_do_not(topology: Topology, delay: int) -> None:
    refused = 0
    for build in (lambda rate: ExactDiffusion(rate=rate, memory=0.6), lambda rate: QuasiGlobalMomentum(rate=rate)):
        for rate in (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
            rule = build(rate)
            try:
                rule.check(topology, 4, rule.weights, delay)
            except ValueError:
                refused += 1
                assert growth(rule, topology, 4, delay) > 0.999  # 1 where a rate lies on the limit
            else:
                assert growth(rule, topology, 4, delay) < 1
    assert delay < 3 or refused > 0


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Gossip(rate=0.0), r"rate must be in \(0, 1\], got 0.0: 1 mixes fully, smaller values mix less"),
    (lambda: Gossip(rate=1.2), r"rate must be in \(0, 1\], got 1.2: 1 mixes fully"),
    (lambda: Gossip(rate=float("nan")), r"rate must be in \(0, 1\], got nan: 1 mixes fully"),
    (lambda: GradientTracking(rate=-1.0), r"rate must be in \(0, 1\], got -1.0"),
    (lambda: ExactDiffusion(rate=1.5), r"rate must be in \(0, 1\], got 1.5"),
    (lambda: ExactDiffusion(memory=0.0), r"memory must be in \(0, 1\], got 0.0"),
    (lambda: QuasiGlobalMomentum(rate=2.0), r"rate must be in \(0, 1\], got 2.0"),
    (lambda: QuasiGlobalMomentum(momentum=1.0), r"momentum must be in \[0, 1\), got 1.0"),
    (lambda: LinearRate(last=1.1, rounds=3), r"rate must be in \(0, 1\], got 1.1"),
    (lambda: LinearRate(last=0.5, rounds=0), r"rounds must be at least 1, got 0"),
    (lambda: LearningRatePower(power=0.0), r"power must be positive, got 0.0"),
    (lambda: Outer(lr=0.0), r"outer lr must be in \(0, 1\], got 0.0"),
    (lambda: OuterNesterov(momentum=1.0), r"outer momentum must be in \[0, 1\), got 1.0"),
    (lambda: RelaySum(restart=0), r"restart must be at least 1, got 0"),
    (lambda: Tree(children=0), r"children must be at least 1, got 0"),
    (lambda: ConsensusControl(target=0.0), r"target distance must be positive, got 0.0"),
    (lambda: ConsensusControl(target=1.0, most=0), r"most must be at least 1, got 0"),
    (lambda: ConsensusControl(target=1.0, lag=0), r"lag must be at least 1, got 0"),
    (lambda: PeriodicAverage(0, Ring()), r"every must be at least 1, got 0: 1 averages in every step"),
    (lambda: Every(0, Ring()), r"Every's steps must be at least 1, got 0: 1 sends messages in every step"),
])  # fmt: skip
def test_bad_numbers_are_refused_at_construction(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(("rule", "topology", "size", "delay", "message"), [
    (Gossip(), IRREGULAR, 5, 1, r"the mean would drift: .* or combine=PushSum\(\)"),
    (GradientTracking(), IRREGULAR, 5, 1, r"the mean would drift: .* or combine=PushSum\(\)"),
    (ExactDiffusion(), IRREGULAR, 5, 1, r"given to worker 1 at step 0 sum to 1.33333, .* or combine=PushSum\(\)"),
    (RelaySum(), IRREGULAR, 5, 1, r"RelaySum needs one tree on all 5 workers, .* isn't one: use topology=Tree\(\)"),
    (ExactDiffusion(), OnePeerExponential(), 4, 0, r"ExactDiffusion needs a symmetric mixing matrix, .*worker 0 gives "
     r"1 the weight 0 and 1 gives 0 0.5: use a symmetric graph, or combine=GradientTracking"),
    (ExactDiffusion(rate=1.0), Ring(), 4, 0, r"doesn't contract on Ring.* must stay below 0.999"),
    (ExactDiffusion(rate=1.0), Hypercube(), 4, 0, r"ExactDiffusion at rate 1.0 with delay 0 doesn't contract"),
    (ExactDiffusion(), Ring(), 5, 3, r"doesn't contract on Ring.*use a shorter delay"),
    (Gossip(), Complete(), 4, 3, r"rate 1.0 with delay 3 doesn't contract .* below 0.618; use Gossip\(rate=0.31\)"),
    (Gossip(rate=LinearRate(first=0.2, last=0.9, rounds=9)), Complete(), 4, 3, r"rate 0.9 with delay 3"),
    (Gossip(rate=LearningRatePower()), Complete(), 4, 3, r"rate 1.0 with delay 3"),
    (Outer(), Ring(), 4, 2, r"Outer must mix each message before .*delay 2 2 are in flight"),
    (RelaySum(), Ring(), 4, 1, r"RelaySum needs one tree on all 4 workers, Ring isn't"),
    (RelaySum(), PeriodicAverage(2, Star()), 4, 1, r"RelaySum needs one tree"),
    (RelaySum(), Tree(), 4, 2, r"use delay=1, or topology=Every\(2"),
    (ConsensusControl(target=1.0), Complete(), 4, 3, r"use Gossip\(rate=0.3"),
    (QuasiGlobalMomentum(), Complete(), 4, 4, r"QuasiGlobalMomentum at rate 1.0 with delay 4 doesn't contract"),
])  # fmt: skip
def test_plans_that_a_rule_cannot_serve_are_refused(
    rule: Combine, topology: Topology, size: int, delay: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rule.check(topology, size, rule.weights, delay)


def test_push_sum_weights_without_push_sum_are_refused_and_the_other_way_round() -> None:
    with pytest.raises(ValueError, match=r"sum to .* \(combine=PushSum\(\) needs no such rows\)"):
        Gossip().check(IRREGULAR, 5, OutDegree(), 1)
    with pytest.raises(ValueError, match=r"with weights=OutDegree\(\)"):
        PushSum().check(IRREGULAR, 5, Own(), 1)


def test_the_limit_of_d2_is_an_eigenvalue_of_minus_a_third() -> None:
    """Ring of 4: eigenvalues 1, 1/3, 1/3, -1/3; of 5: the least is 1/3 + 2/3 cos(4 pi / 5) = -0.206."""
    assert np.linalg.eigvalsh(mixing_matrix(Ring(), 4, 0))[0] == pytest.approx(-1 / 3)
    with pytest.raises(ValueError, match="doesn't contract"):
        ExactDiffusion(rate=1.0).check(Ring(), 4, Own(), 0)
    ExactDiffusion(rate=1.0).check(Ring(), 5, Own(), 0)


@pytest.mark.parametrize("rule", [PushSum(), RelaySum()])
def test_rules_that_count_refuse_half_precision(rule: Combine) -> None:
    with pytest.raises(ValueError, match=r"at least 32 bits, got torch.bfloat16: use precision='bf16-mixed'"):
        rule.init(torch.zeros(4, dtype=torch.bfloat16))


def test_relay_sum_refuses_weights_from_which_no_sum_comes_back() -> None:
    with pytest.raises(ValueError, match=r"use weights=Dyadic\(\)"):
        RelaySum().check(Tree(), 5, Own(), 1)


class Halves(Gossip):
    """Keeps a number that one element doesn't have."""

    def init(self, x: Tensor) -> State:
        return {"second": x[1].clone().view(1)}

    recovery = Combine.recovery


def test_a_rule_that_keeps_something_of_several_elements_is_said_to_keep_it() -> None:
    assert Halves().recovery.incurable == "it keeps a state, which no neighbour could give"
    assert "none may leave" in Halves().recovery.tied
