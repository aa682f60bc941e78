"""Forecasts the seconds, bytes and memory of a training step of a method, with stragglers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from lightning_decentral.shared.plan.network import NO_NETWORK, Network, Price
from lightning_decentral.shared.plan.profile import Model
from lightning_decentral.shared.plan.timeline import Task, makespan, run

SIMULATED = 128  # workers at most: so many draws meet the slowest of a larger cluster, too
EXACT_POINTS = 12  # number of timelines to simulate


@dataclass(frozen=True)
class Cluster:
    """A cluster of `workers` devices, `per_node` on each node.

    Raises:
        ValueError: `workers` isn't a multiple of `per_node`, or one is below 1.
    """

    workers: int
    per_node: int = 1

    def __post_init__(self) -> None:
        if min(self.workers, self.per_node) < 1:
            raise ValueError(f"--workers {self.workers} and --per-node {self.per_node} must be at least 1")
        if self.workers % self.per_node:
            raise ValueError(
                f"--workers {self.workers} isn't a multiple of --per-node {self.per_node}: "
                "give a number of workers that fills every node"
            )

    @property
    def nodes(self) -> int:
        return self.workers // self.per_node

    @property
    def simulated(self) -> "Cluster":
        """Cluster to simulate instead of this one: itself, up to 128 workers. A larger one has a number of nodes
        that divides the cluster's if possible, and is a power of two if the cluster's is."""
        if self.workers <= SIMULATED:
            return self
        per_node = SIMULATED if self.nodes == 1 else self.per_node
        most, single = SIMULATED // per_node, self.nodes.bit_count() == 1
        fewer = range(max(1, most // 4), most + 1)
        alike = (nodes for nodes in fewer if not self.nodes % nodes and (nodes.bit_count() == 1) == single)
        return Cluster(per_node * max(alike, default=max(3, most - 1)), per_node)

    def reach(self, devices: int) -> str:
        """Return "inside" if so many devices, from a node's first on, lie in one node, else "between"."""
        return "between" if devices > self.per_node else "inside"


@dataclass(frozen=True)
class Setting:
    """Model, network and cluster of a training."""

    model: Model
    network: Network
    cluster: Cluster

    @property
    def without_network(self) -> "Setting":
        """The setting with a network on which all messages take no time."""
        return replace(self, network=NO_NETWORK)


Floats = npt.NDArray[np.float64]


class Method(ABC):
    """A method of training, as a value whose functions take the setting as an argument."""

    equal: ClassVar[bool] = True
    """True where a step trains as many parameters as ddp's; a method without is shown and never recommended."""

    @abstractmethod
    def prices(self, setting: Setting) -> tuple[Price, ...]:
        """Return the prices of the method's messages, which show whether they were measured."""

    @abstractmethod
    def seconds(self, setting: Setting, factors: Floats) -> Floats:
        """Return the mean seconds per step, [runs]. `factors`: [runs, steps, workers], slowdown of each computation;
        the first `WARM_STEPS` steps aren't counted."""

    @abstractmethod
    def tasks(self, setting: Setting) -> list[Task[str]]:
        """Return the tasks of a step (or of several, where one isn't representative) of equally fast workers."""

    @abstractmethod
    def card_bytes(self, setting: Setting) -> float:
        """Return the mean bytes that the busiest node sends through its network card in a step."""

    @abstractmethod
    def memory_bytes(self, setting: Setting) -> float:
        """Return bytes on one device: parameters, gradients, optimizer state, saved activations, message buffers."""


@dataclass(frozen=True)
class StepForecast:
    """Forecast of a step."""

    seconds: float  # mean seconds per step over runs with stragglers
    p50_seconds: float  # half of the runs need fewer seconds per step
    p95_seconds: float  # 19 of 20 runs need fewer seconds per step
    even_seconds: float  # seconds per step where all workers are equally fast
    exposed_seconds: float  # part of `even_seconds` that a network without delay would save
    card_bytes: float
    memory_bytes: float
    extrapolated: bool  # whether some price wasn't measured on such a group


def forecast(method: Method, setting: Setting, factors: Floats) -> StepForecast:
    """Forecast a step of a method in a setting, with stragglers: factors [runs, steps, workers]."""
    runs = method.seconds(setting, factors)
    alike = even(setting.cluster.simulated.workers)
    smooth = float(method.seconds(setting, alike)[0])
    free = float(method.seconds(setting.without_network, alike)[0])
    return StepForecast(
        float(runs.mean()),
        float(np.quantile(runs, 0.5)),
        float(np.quantile(runs, 0.95)),
        smooth,
        max(0.0, smooth - free),
        method.card_bytes(setting),
        method.memory_bytes(setting),
        any(price.extrapolated for price in method.prices(setting)),
    )


def at_factors(seconds: Callable[[float], float], factors: Floats) -> Floats:
    """Return seconds(factor), elementwise, from few evaluations: exact for few factors, else linear between 12."""
    found = np.unique(factors)
    points = found if len(found) <= EXACT_POINTS else np.linspace(found[0], found[-1], EXACT_POINTS)
    values = np.array([seconds(float(point)) for point in points])
    return np.asarray(np.interp(factors, points, values), dtype=np.float64)


def synchronous(seconds: Callable[[float], float], factors: Floats) -> Floats:
    """Return seconds per step [runs] where all wait for the slowest worker; `seconds(factor)`: of a step so slowed."""
    slowest = factors[:, WARM_STEPS:].max(axis=2)
    return np.asarray(at_factors(seconds, slowest).mean(axis=1), dtype=np.float64)


def passing_bytes(model: Model) -> int:
    """Return the bytes of the saved activations or of the optimizer's temporary memory, whichever is larger."""
    return max(sum(block.saved_bytes for block in model.blocks), model.stepping_bytes)


def replica_bytes(model: Model) -> int:
    """Return the bytes of parameters, gradients, optimizer state, and `passing_bytes`."""
    return 2 * model.parameter_bytes + model.state_bytes + passing_bytes(model)


class Synchronous(Method):
    """A method whose every step is one step of the slowest worker."""

    @abstractmethod
    def at(self, setting: Setting, factor: float) -> list[Task[str]]:
        """Return the tasks of a step of a worker whose computation takes `factor` times as long."""

    def seconds(self, setting: Setting, factors: Floats) -> Floats:
        return synchronous(lambda factor: makespan(run(self.at(setting, factor))), factors)

    def tasks(self, setting: Setting) -> list[Task[str]]:
        return self.at(setting, 1.0)


RUNS = 24
WARM_STEPS = 16  # steps until waves of waiting have spread, for delays up to as many steps
COUNTED_STEPS = 64


def even(workers: int, steps: int = WARM_STEPS + COUNTED_STEPS) -> Floats:
    """Return the factors of equally fast workers: ones, [1, steps, workers]."""
    return np.ones((1, steps, workers))


def drawn(variation: Sequence[float], workers: int, runs: int = RUNS, seed: int = 0) -> Floats:
    """Draw factors [runs, steps, workers] from the measured variation; ones where nothing was measured."""
    if not variation:
        return even(workers)
    shape = runs, WARM_STEPS + COUNTED_STEPS, workers
    return np.random.default_rng(seed).choice(np.asarray(variation, dtype=np.float64), shape)


def one_slow(factor: float, workers: int, steps: int, runs: int = 1, seed: int = 0) -> Floats:
    """Return factors [runs, steps, workers] where in each step one random worker takes `factor` times as long."""
    factors = np.ones((runs, steps, workers))
    slow = np.random.default_rng(seed).integers(workers, size=(runs, steps, 1))
    np.put_along_axis(factors, slow, factor, axis=2)
    return factors
