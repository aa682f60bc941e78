"""Cost of disagreement: excess loss of gossip's workers over their mean's loss, predicted by a short probe.

    d_i(k)  = x_i - mean_j x_j            of n workers that began equal, after k updates without a message
    D_k     = mean_i |d_i(k)|^2           their spread
    E_1     = mean_i loss(x_i) - loss(mean_i x_i) = 1/2 c D_1       c: the curvature along the workers' differences
    D_k / D_1 = k + 2 sum_(t < k) (k - t) rho^t                     rho: correlation of successive updates
    excess  = 1/2 c s f,    s = D_1 n / (n - 1)                     s: the variance of a worker's update

f is the spread of workers under a method whose updates have the variance 1 and this rho, by the simulation of its own
rule, topology and codec. With one symmetric W of eigenvalues l_1 = 1, l_2 ... l_n it is, at a delay of 1,

    f = (1 / n) sum_(k > 1) (1 + l_k rho) / ((1 - l_k^2) (1 - l_k rho)).

It is 1/2 tr(H C) for the Hessian H and the workers' covariance C, as long as C has the shape of the updates' own
covariance: the curvature doesn't pull workers together between two rounds. Differences of losses replace products with
H, so that any module can be used. Updates grow with the learning rate, and the spread with its square."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_decentral.gossip.strategy import GossipStrategy
from lightning_decentral.gossip.wire.simulation import simulate
from lightning_decentral.planner.rehearsal.crew import Crew
from lightning_decentral.planner.rehearsal.evaluation import BATCHES, PAIRED, HeldOutEvaluation

ALONE = 8  # Updates of a probe without messages.
STEPS, ELEMENTS = 192, 1024  # Size of a simulation at one learning rate; the second half of its steps counts.
LARGEST = 0.99  # Largest correlation.


@dataclass(frozen=True)
class Drift:
    """Differences between workers that train without messages, as a probe measured them."""

    variance: float  # variance of a worker's update, summed over the parameters
    correlation: float  # correlation of an update with the update before
    curvature: float  # curvature of the loss along the workers' differences
    magnitude: float  # size of a parameter in units of its update's standard deviation, for codecs of parameters
    learning_rate: float  # learning rate of these updates
    rate: float  # factor of all learning rates

    def excess(
        self, strategy: GossipStrategy, workers: int, per_node: int, learning_rate: float | Sequence[float]
    ) -> float:
        """Excess loss: loss of the workers' own models minus the loss of their mean. `learning_rate`: a number: the
        mean over a long time at that rate; those of all steps: after the last one."""
        if isinstance(learning_rate, float):
            spread = (learning_rate / self.learning_rate) ** 2 * self.spread(strategy, workers, per_node)
        else:
            sizes = [rate / self.learning_rate for rate in learning_rate]
            spread = self.spread(strategy, workers, per_node, sizes)
        return 0.5 * self.curvature * self.variance * spread

    def spread(
        self, strategy: GossipStrategy, workers: int, per_node: int, sizes: Sequence[float] | None = None
    ) -> float:
        """mean_i |x_i - mean_j x_j|^2 / (variance of an update), of workers that gossip. `sizes`: of all steps'
        updates, after which the result holds; None: sizes of 1, and the mean over time."""
        chance, topology = torch.Generator().manual_seed(0), strategy.topology.placed(per_node)
        shape, rho = (workers, ELEMENTS * len(topology.fragments)), self.correlation
        noise = torch.randn(shape, generator=chance)

        def update(x: Tensor, step: int) -> Tensor:
            fresh = torch.randn(shape, generator=chance)
            return noise.mul_(rho).add_(fresh, alpha=sqrt(1 - rho**2))

        start = (self.magnitude * torch.randn((1, shape[1]), generator=chance)).expand(shape)
        steps, every, rate = (STEPS, 1, 1.0) if sizes is None else (len(sizes), len(sizes), sizes.__getitem__)
        options: Any = {"delay": strategy.delay, "weights": strategy.weights, "codec": strategy.codec, "every": every}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a codec that loses too much warns in the rehearsal itself
            rows = simulate(topology, strategy.combine, update, start, steps, rate, **options)
        late = rows[STEPS // 2 :] if sizes is None else rows[-1:]
        return float((late - late.mean(1, keepdim=True)).square().mean())


def probed(crew: Crew, evaluation: HeldOutEvaluation, rate: float) -> Drift | None:
    """Probe workers that drift, after their last round: they begin at their mean, and go on without messages. `rate`:
    factor of their learning rates. None: workers stay equal, or the curvature is too small to show in their losses."""
    modules, learning_rate = [worker.module for worker in crew.workers], crew.learning_rate
    agree(modules)
    size = _squares(list(modules[0].parameters()))
    crew.drift(1)
    # Measured now: later, as the workers drift on in one direction, curvature falls, which gossip prevents.
    first, excess = spread_of(modules), excess_now(crew, evaluation, BATCHES)
    crew.drift(ALONE - 1)
    last = spread_of(modules)
    if not (first > 0 and excess > 0):
        return None
    variance = first * len(modules) / (len(modules) - 1)
    alike = correlation(last / first, ALONE)
    return Drift(variance, alike, 2 * excess / first, sqrt(size / variance), learning_rate, rate)


def excess_now(crew: Crew, evaluation: HeldOutEvaluation, batches: int = PAIRED) -> float:
    """mean_i loss(x_i) - loss(mean_i x_i), 1/2 tr(H C) for curvature H and covariance C of the workers' models."""
    if crew.alike:
        return 0.0
    modules = [worker.module for worker in crew.workers]
    alone = [evaluation.loss([module], batches) for module in modules]
    return sum(alone) / len(alone) - evaluation.loss(modules, batches)


@torch.no_grad()
def agree(modules: Sequence[LightningModule]) -> None:
    """Set all modules to their mean: x_i <- mean_j x_j."""
    for members in zip(*(module.state_dict().values() for module in modules), strict=True):
        if isinstance(members[0], Tensor) and members[0].is_floating_point():
            mean = torch.stack(members).mean(0)
            for tensor in members:
                tensor.copy_(mean)


@torch.no_grad()
def spread_of(modules: Sequence[LightningModule]) -> float:
    """Spread of the modules' parameters: mean_i |x_i - mean_j x_j|^2."""
    total = 0.0
    for members in zip(*(module.parameters() for module in modules), strict=True):
        rows = torch.stack(members)
        total += _squares([rows - rows.mean(0)])
    return total / len(modules)


def correlation(growth: float, steps: int) -> float:
    """Return the correlation, -0.99 to 0.99, of updates if the sum of `steps` has `growth` times the square of one."""
    low, high = -LARGEST, LARGEST
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if grown(middle, steps) < growth else (low, middle)
    return (low + high) / 2


def grown(rho: float, steps: int) -> float:
    """Growth of the workers' spread over k updates: D_k / D_1."""
    return steps + 2 * sum((steps - t) * rho**t for t in range(1, steps))


def _squares(tensors: Sequence[Tensor]) -> float:
    return sum(float(tensor.detach().square().sum(dtype=torch.float64)) for tensor in tensors)
