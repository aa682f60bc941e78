"""All workers in one process: the same rule and mixer over the matrix exchange."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.codec.codec import Coding, check_codec
from lightning_decentral.gossip.compute.codec.coded import coder
from lightning_decentral.gossip.compute.codec.quantize import Plain
from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.plan.topology.topology import Topology, at_least_one
from lightning_decentral.gossip.plan.weights import Entries, Weights, compressed, entries, links
from lightning_decentral.gossip.wire.exchange import Exchange, Land
from lightning_decentral.gossip.wire.mixer import Mixer
from lightning_decentral.shared.compute.buckets import Matrix, Pool

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


@dataclass
class LinkExchange(Exchange):
    """What `MatrixExchange` is for messages as they are: every link of every worker in turn."""

    topology: Topology
    weights: Weights
    size: int
    codec: Coding
    pool: Pool = field(default_factory=Pool, init=False)

    def __post_init__(self) -> None:
        everyone = range(self.size)
        self._coders = [coder(self.codec, self.topology, rank, self.size, self.pool) for rank in everyone]

    def admit(self, buckets: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        """Estimates start at worker 0's parameters."""
        for worker in self._coders:
            worker.admit([bucket[0].clone() for bucket in buckets], matrices, combine)

    def silent(self, step: int) -> bool:
        """Whether nobody talks at this step."""
        return not any(self.topology.sources(rank, self.size, step) for rank in range(self.size))

    def own(self, step: int) -> Tensor:
        """The diagonal of W_t as a column."""
        return own_column(self.topology, self.weights, self.size, step)

    def degree(self, step: int) -> Tensor:
        """Of every worker, as a column."""
        return degree_column(self.topology, self.size, step)

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> Land:
        """Encode at once, decode and mix when it lands; nothing travels."""
        plans = [links(self.topology, self.weights, rank, self.size, step) for rank in range(self.size)]
        sent = [[m[rank] for m in message] for rank in range(self.size)]
        coders = list(zip(self._coders, sent, plans, strict=True))
        packets = [worker.encode(own, heard_by, step, first) for worker, own, (_, heard_by) in coders]

        def land() -> list[Tensor]:
            mixed = [self.pool.take(m) for m in message]
            for rank, (worker, own, (row, _)) in enumerate(coders):
                for total, m in zip(mixed, own, strict=True):
                    torch.mul(m, row[rank], out=total[rank])
                for j in sorted(set(row) - {rank}):
                    heard = worker.decode(j, [t.clone() for t in packets[j][rank]], own, first)
                    worker.remember(j, heard, torch.ones((), dtype=torch.bool), first)
                    for total, tensor in zip(mixed, heard, strict=True):
                        total[rank].add_(tensor, alpha=row[j])
            return mixed

        return land

    def state_dict(self) -> dict[str, Any]:
        """Of every worker."""
        return {"codec": repr(self.codec), "workers": [worker.state_dict() for worker in self._coders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """ValueError where they had another codec."""
        check_codec(state, repr(self.codec))
        for worker, own in zip(self._coders, state["workers"], strict=True):
            worker.load_state_dict(own)


HALVES = (torch.bfloat16, torch.float16)


@dataclass
class Mixing:
    """out = W @ x, the workers as the first axis, in the type of x.

    Half precision is computed in float32 and rounded once: weights like 1/3 rounded before would move the mean.
    """

    entries: Entries
    _matrices: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict, init=False)

    @property
    def silent(self) -> bool:
        """Whether nobody hears anybody."""
        return self.entries.identity

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Write W @ x to `out`, both [size, dim], and return it."""
        if x.dtype in HALVES:
            return out.copy_(torch.mm(self._matrix(torch.float32, x.device), x.float()))
        return torch.mm(self._matrix(x.dtype, x.device), x, out=out)

    def _matrix(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = dtype, device
        if key not in self._matrices:
            self._matrices[key] = (self._sparse() if self.entries.mostly_zero else self._dense()).to(device, dtype)
        return self._matrices[key]

    def _dense(self) -> Tensor:
        return torch.from_numpy(self.entries.dense())

    def _sparse(self) -> Tensor:
        parts = (self.entries.starts, self.entries.columns, self.entries.values)
        starts, columns, values = map(torch.from_numpy, parts)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR", UserWarning)  # torch calls the layout beta
            shape = (self.entries.size, self.entries.size)
            return torch.sparse_csr_tensor(starts, columns, values, shape, check_invariants=False)


class Mixings:
    """W_t for every step t of a plan; steps that are a period apart share one, silent steps all share one."""

    def __init__(self, topology: Topology, weights: Weights, size: int) -> None:
        self._topology, self._weights, self._size = topology, weights, size
        self._phases: dict[int, Mixing] = {}
        self._silence = Mixing(compressed([{rank: 1.0} for rank in range(size)]))

    def at(self, step: int) -> Mixing:
        """The operator of this step."""
        phase = step % self._topology.period(self._size)
        if phase not in self._phases:
            mixing = Mixing(entries(self._topology, self._size, phase, self._weights))
            self._phases[phase] = self._silence if mixing.silent else mixing
        return self._phases[phase]


@dataclass
class MatrixExchange(Exchange):
    """mixed = W_t @ message, the workers as the first axis: the simulator's exchange."""

    topology: Topology
    weights: Weights
    size: int
    pool: Pool = field(default_factory=Pool, init=False)

    def __post_init__(self) -> None:
        self._mixings = Mixings(self.topology, self.weights, self.size)

    def silent(self, step: int) -> bool:
        """Whether nobody talks at this step."""
        return self._mixings.at(step).silent

    def own(self, step: int) -> Tensor:
        """The diagonal of W_t as a column."""
        return torch.from_numpy(self._mixings.at(step).entries.diagonal).unsqueeze(1)

    def degree(self, step: int) -> Tensor:
        """Of every worker, as a column."""
        return degree_column(self.topology, self.size, step)

    def start(self, message: Sequence[Tensor], step: int, first: int = 0) -> Land:
        """Multiply at once; nothing travels."""
        mixed = [self._mixings.at(step)(m, out=self.pool.take(m)) for m in message]
        return lambda: mixed


def own_column(topology: Topology, weights: Weights, size: int, step: int) -> Tensor:
    """[size, 1]: w_ii of every worker, the diagonal of W_t."""
    diagonal = [weights.row(topology, rank, size, step)[rank] for rank in range(size)]
    return torch.tensor(diagonal, dtype=torch.float64).unsqueeze(1)


def degree_column(topology: Topology, size: int, step: int) -> Tensor:
    """[size, 1]: how many others each worker hears."""
    degrees = [len(topology.sources(rank, size, step)) for rank in range(size)]
    return torch.tensor(degrees, dtype=torch.float64).unsqueeze(1)
