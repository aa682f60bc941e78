"""All workers in one process: the same rule and mixer over the matrix exchange."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_decentral.buckets import Matrix
from lightning_decentral.gossip.codec import Plain
from lightning_decentral.gossip.coding import Coding
from lightning_decentral.gossip.combine.rule import Combine
from lightning_decentral.gossip.exchange import Exchange, MatrixExchange
from lightning_decentral.gossip.graphs import at_least_one
from lightning_decentral.gossip.links import LinkExchange
from lightning_decentral.gossip.mixer import Mixer
from lightning_decentral.gossip.topology import Topology
from lightning_decentral.gossip.weights import Weights

Gradient = Callable[[Tensor, int], Tensor]


@dataclass
class _Rows:
    """The workers' parameters as the rows of one tensor [size, dim]."""

    flat: Tensor

    def adopt(self) -> None:
        """Nothing else holds them."""


def simulate(
    topology: Topology,
    combine: Combine,
    gradient: Gradient,
    x0: Tensor,
    steps: int,
    learning_rate: float | Callable[[int], float],
    delay: int = 1,
    weights: Weights | None = None,
    codec: Coding | None = None,
    matrices: Sequence[Matrix] = (),
    every: int = 1,
) -> Tensor:
    """x_i <- x_i - learning_rate * gradient(x, step)_i, then one round of the mixer, `steps` times.

    Args:
        gradient: (x [size, dim], step) -> [size, dim], row i the gradient of worker i at its own x_i.
        x0: [size, dim], row i where worker i starts.
        steps: updates to take.
        learning_rate: a number, or of the step.
        delay: updates between launch and landing, as in `Mixer`.
        weights: the rule's where None.
        codec: of every message; they travel as they are where None.
        matrices: those in a row of x0, for codecs that see them.
        every: keep the parameters after every so many steps only; `every=steps` keeps the last alone.

    Returns:
        [steps // every + 1, size, dim]: x0 and the parameters after each step, or after each `every`-th.

    Raises:
        ValueError: `every` below 1.
    """
    at_least_one("every", every, "1 keeps the parameters after each step, k after each k-th")
    size = x0.shape[0]
    rows = _Rows(x0.detach().clone())
    mixer = Mixer([], combine, _exchange(topology, weights or combine.weights, size, codec or Plain()), delay)
    mixer.extend([rows], [matrices])
    trajectory = [x0.detach().clone()]
    for step in range(steps):
        rate = learning_rate(step) if callable(learning_rate) else learning_rate
        rows.flat.sub_(gradient(rows.flat, step), alpha=rate)
        mixer.step(rate)
        if (step + 1) % every == 0:
            trajectory.append(rows.flat.clone())
    return torch.stack(trajectory)


def _exchange(topology: Topology, weights: Weights, size: int, codec: Coding) -> Exchange:
    if codec == Plain():
        return MatrixExchange(topology, weights, size)
    return LinkExchange(topology, weights, size, codec)
