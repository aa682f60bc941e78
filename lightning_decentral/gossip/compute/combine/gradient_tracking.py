"""Update rules for workers with different data: gradient tracking, exact diffusion (D2), quasi-global momentum.

Gradient tracking and exact diffusion reach the exact optimum, however much the workers' data differ. Quasi-global
momentum follows a worker's displacement after mixing."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import MessageForm, Recovery, State, Turn, tied_by
from lightning_decentral.gossip.compute.combine.gossip import Rate, RatedRule, at, check_echo, check_stable
from lightning_decentral.gossip.plan.checks import check_symmetric
from lightning_decentral.gossip.plan.stability import RepeatedCorrection
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.shared.plan.arguments import checked


@checked
@dataclass(frozen=True, kw_only=True)
class ExactDiffusion(RatedRule):
    """x+ = W' (2 x - x_prev - eta (g - g_prev)),  W' = rate W + (1 - rate) I.

    Equivalently, every step adds c, the sum of all corrections so far:

        x <- x + u + c;  correction = rate (W - I) x;  x += correction;  c += memory correction,

    so that at rest c_i = -u_i: c_i is the difference of worker i's gradient from the others'. sum_i c_i stays 0.

    rate=0.5 is exact diffusion, rate=1 is D2. Overlapped (delay 1), rate=0.5 is EXTRA: x+ = x + u + (W - I) x +
    (1/2) sum over the past of (W - I) x.

    State: c, a copy of the parameters. Bytes: the parameters. A healed worker keeps c, which no refused message has
    changed on either end, so that sum_i c_i stays 0.

    Args:
        rate: mixing rate; 1 (D2) needs every eigenvalue of W above -1/3, 0.5 has no such condition.
        memory: share of a correction that c keeps. Below 1 c learns a difference more slowly, and is stable with delays
            over 1 or local steps: about 1/k for `Every(k, ...)`.

    Raises:
        ValueError: rate or memory not in (0, 1]; at set-up, if the matrix isn't symmetric or the rate isn't stable.

    Source: Yuan et al. 1702.05122 (exact diffusion), Tang et al. 1803.07068 (D2), Shi et al. 1404.6264 (EXTRA).
    """

    rate: float = 0.5
    memory: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.memory <= 1:
            raise ValueError(f"memory must be in (0, 1], got {self.memory}: 1 is exact diffusion, Gossip() has none")

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        super().check(topology, size, weights, delay)
        check_symmetric("ExactDiffusion", topology, size, weights, "combine=GradientTracking()")
        echo = RepeatedCorrection(gain=self.memory, keep=1.0)
        check_echo("ExactDiffusion", echo, self.rate, topology, size, weights, delay)

    @property
    def recovery(self) -> Recovery:
        return Recovery(self._begin_anew, tied=tied_by(("corrections",)), lasting=("corrections",))

    def init(self, x: Tensor) -> State:
        return {"corrections": torch.zeros_like(x)}  # (elements,), sum_i c_i = 0

    def adapt(self, x: Tensor, state: State, turn: Turn) -> None:
        x.add_(state["corrections"])  # x + u + c, in every step

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        correction = mixed.sub_(sent).mul_(self.rate)  # rate (W - I) x
        x.add_(correction)
        state["corrections"].add_(correction, alpha=self.memory)


@checked
@dataclass(frozen=True, kw_only=True)
class GradientTracking(RatedRule):
    """x+ = W x - eta y;  y+ = W y + g+ - g: y tracks the mean of all workers' gradients, and x descends along y.

    In displacements: v+ = W v + u+ - u, x+ = W x + v (delay 1) or W (x + v) (delay 0). sum_i v_i = sum_i u_i holds
    also when the learning rate changes, with any optimizer and on any doubly stochastic sequence of matrices.

    State: x after the last update, u, and e = v - u, the part of v that mixing added: three copies of the parameters.
    Bytes: twice the parameters. The v of a poisoned worker counts as 0, on both ends of each link; the worker keeps e,
    and adds what it received. So sum_i e_i stays 0 on any communication graph.

    Args:
        rate: mixing rate, as in `Gossip`.

    Raises:
        ValueError: rate is not in (0, 1].

    Source: Di Lorenzo and Scutari 1602.00591; Nedic, Olshevsky and Shi 1607.03218 (DIGing, which delay 1 is).
    """

    form = MessageForm(copies=2)
    rate: Rate = 1.0

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        super().check(topology, size, weights, delay)
        # As for Gossip: v mixes as x does and doesn't depend on it.
        check_stable("GradientTracking", self.rate, topology, size, weights, delay)

    @property
    def recovery(self) -> Recovery:
        return Recovery(
            self._begin_anew,
            tied=tied_by(("last", "update", "exchanged")),
            lasting=("exchanged",),
            stand_in=self._stand_in,
            refused=self._refused,
        )

    def init(self, x: Tensor) -> State:
        return {"last": x.detach().clone(), "update": torch.zeros_like(x), "exchanged": torch.zeros_like(x)}

    def adapt(self, x: Tensor, state: State, turn: Turn) -> None:
        """v = u + e; x <- x + e = last + v."""
        torch.sub(x.detach(), state["last"], out=state["update"])
        x.add_(state["exchanged"])
        state["last"].copy_(x)

    def message(self, x: Tensor, state: State) -> Tensor:
        return torch.cat((x.detach(), state["update"] + state["exchanged"]), dim=-1)  # (2 elements,): x, v

    def values(self, message: Tensor) -> Tensor:
        return message.tensor_split(2, dim=-1)[0]

    def _stand_in(self, other: Tensor) -> Tensor:
        x, v = other.tensor_split(2, dim=-1)  # (elements,) each
        return torch.cat((x, torch.zeros_like(v)), dim=-1)  # v counts as 0, on both ends of a link

    def _refused(self, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        _, tracked = (mixed - sent).tensor_split(2, dim=-1)
        state["exchanged"].add_(tracked, alpha=at(self.rate, turn))

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        correction, tracked = mixed.sub_(sent).mul_(at(self.rate, turn)).tensor_split(2, dim=-1)  # of x and of v
        x.add_(correction)
        # `last` gets the correction, too: it is no update.
        state["last"].add_(correction)
        state["exchanged"].add_(tracked)  # e = v - u


@checked
@dataclass(frozen=True, kw_only=True)
class QuasiGlobalMomentum(RatedRule):
    """m~ = mu m + g;  x+ = W (x - eta m~);  m+ = mu m + (1 - mu) (x - x+) / eta.

    The state is M = eta m, a displacement, which needs no division:  M <- mu M + (1 - mu) (x - x+). When the learning
    rate eta falls, M falls in proportion, as in the formula. When eta rises, M stays: corrections by mixing don't
    shrink as eta does, so after an eta near 0, before a restart, M would become far too large.

    m follows the displacement after mixing, which is nearly the same on all workers, while an optimizer's momentum
    follows a worker's own gradients. With SGD without momentum this rule is QG-DSGDm. With Adam (first beta 0)
    m is a momentum of Adam's direction, whose second moment comes from the worker's own gradients.

    State: x after the last update and m, two copies of the parameters. Bytes: the parameters. A healed worker begins
    with m = 0, as at the start: its momentum is back after 1 / (1 - mu) steps.

    Args:
        momentum: mu, in [0, 1).
        rate: mixing rate, as in `Gossip`.

    Raises:
        ValueError: momentum or rate out of range.

    Source: Lin et al. 2102.04761, algorithm 1.
    """

    momentum: float = 0.9
    rate: Rate = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}: 0.9 is usual, 0 is Gossip()")

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        super().check(topology, size, weights, delay)
        mu = self.momentum
        echo = RepeatedCorrection(gain=mu * (1 - mu), keep=mu * (2 - mu))
        check_echo("QuasiGlobalMomentum", echo, self.rate, topology, size, weights, delay)

    @property
    def recovery(self) -> Recovery:
        return Recovery(self._begin_anew)

    def init(self, x: Tensor) -> State:
        eta = torch.zeros((), dtype=torch.float64, device=x.device)  # a scalar, as a checkpoint keeps it
        return {"last": x.detach().clone(), "momentum": torch.zeros_like(x), "learning_rate": eta}

    def adapt(self, x: Tensor, state: State, turn: Turn) -> None:
        """x -= mu M;  M <- mu M - (1 - mu) (x - last), the part before mixing."""
        last, m, mu = state["last"], state["momentum"], self.momentum
        self._follow(state, turn.learning_rate)
        x.sub_(m, alpha=mu)  # (elements,)
        # The displacement before mixing; `apply` adds the correction.
        m.mul_(mu).sub_(x - last, alpha=1 - mu)
        last.copy_(x)
        # With learning rate 0 only mixing changes x.
        m.mul_(float(turn.learning_rate > 0))

    def _follow(self, state: State, eta: float) -> None:
        """M <- M min(1, eta / eta of the step before)."""
        if "learning_rate" not in state:  # a checkpoint from before M was kept has m
            state["momentum"].mul_(eta)
            state["learning_rate"] = torch.full((), eta, dtype=torch.float64, device=state["momentum"].device)
        before = state["learning_rate"]
        # On the device, so that the host doesn't wait.
        state["momentum"].mul_((eta / before.clamp(min=1e-300)).clamp(max=1).to(state["momentum"].dtype))
        before.fill_(eta)  # eta of this step, read in the next

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        correction = mixed.sub_(sent).mul_(at(self.rate, turn))
        x.add_(correction)
        # `last` gets the correction, too: it is no part of the next update.
        state["last"].add_(correction)
        if turn.learning_rate > 0:
            # A correction is a displacement, too.
            state["momentum"].sub_(correction, alpha=1 - self.momentum)
