"""Update rules that keep sums over all workers: push-sum on directed graphs (stochastic gradient push), RelaySum."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine, MessageForm, Recovery, State, Turn, tied_by
from lightning_decentral.gossip.plan.checks import check_columns, check_one_flight, check_tree
from lightning_decentral.gossip.plan.topology.topology import Topology, at_least_one
from lightning_decentral.gossip.plan.weights import Dyadic, OutDegree, Weights
from lightning_decentral.shared.plan.arguments import checked


@dataclass(frozen=True)
class PushSum(Combine):
    """X <- P (X + u), w <- P w, z = X / w: stochastic gradient push; the module computes with z.

    P's columns sum to one: each worker splits its X and w among its targets, and the graph only has to be strongly
    connected over time. Sum_i X_i and sum_i w_i = n never change, so that z reaches the mean.

    A worker's X shrinks when its message is sent, and the receiver's X grows when the message is mixed. A delay only
    makes a message late, so mixing is stable at every delay, without a rate. The mean is sum_i w_i z_i / sum_i w_i.

    State: z after the last update (a copy of the parameters) and w, which begins at 1. Bytes: the parameters and a
    number. Where P is doubly stochastic w stays 1, and at delays 0 and 1 the rule is Gossip().

    A healed worker takes z and w of its neighbours' mixture. If all w are 1, sum_i w_i stays n; else the sum is off by
    the difference of w_i from its neighbours' w, and updates of the mean are n / sum_i w_i times as large. z still
    reaches one value.

    Raises:
        ValueError: at set-up, if parameters have half precision: a rounded w would scale all parameters.

    Source: Assran et al. 1811.10792, algorithms 1 (delay 0) and 2 (overlapped, bounded delay).
    """

    weights = OutDegree()
    form = MessageForm(exact=1)  # w: rounded, it would scale all parameters

    @property
    def recovery(self) -> Recovery:
        return Recovery(self._heal, tied=tied_by(("last", "weight")))

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        check_columns(topology, size, weights)

    def init(self, x: Tensor) -> State:
        if x.dtype.itemsize < 4:
            raise ValueError(
                f"PushSum needs parameters of at least 32 bits, got {x.dtype}: use precision='bf16-mixed', "
                "or another rule on a symmetric graph"
            )
        return {"last": x.detach().clone(), "weight": torch.ones_like(x[..., :1])}  # (elements,), (1,): w begins at 1

    def adapt(self, x: Tensor, state: State, turn: Turn) -> None:
        """z <- last + u / w: the numerator X gets the whole update u."""
        x.sub_(state["last"]).div_(state["weight"]).add_(state["last"])  # u / w
        state["last"].copy_(x)

    def message(self, x: Tensor, state: State) -> Tensor:
        return torch.cat((x.detach() * state["weight"], state["weight"]), dim=-1)  # (elements + 1,): X, w

    def values(self, message: Tensor) -> Tensor:
        return message[..., :-1] / message[..., -1:]

    def launched(self, x: Tensor, sent: Callable[[], Tensor], state: State, turn: Turn) -> None:
        """X -= (1 - p_ii) X: keep the own share of what was sent."""
        # Uses the decoded message: X loses here exactly what arrives at the targets.
        mass = sent()
        self._add(x, mass * (turn.own().to(mass) - 1), state)

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        """X += mixed - p_ii sent: add the shares received from the sources."""
        self._add(x, mixed.sub_(sent * turn.own().to(sent)), state)

    def share(self, state: State) -> Tensor:
        return state["weight"]

    def _heal(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        self._begin_anew(x, sent, sent, state, turn)
        state["weight"] = sent[..., -1:].clone()  # w of the neighbours' mixture

    def _add(self, x: Tensor, mass: Tensor, state: State) -> None:
        """last <- (last w + X) / (w + v) for a mass (X, v); x gets the same correction, and keeps its last update."""
        last, before = state["last"], state["weight"]
        weight = before + mass[..., -1:]  # (1,); in a simulation (size, 1)
        corrected = last.mul(before).add_(mass[..., :-1]).div_(weight)
        x.add_(corrected - last)
        last.copy_(corrected)
        before.copy_(weight)


@checked
@dataclass(frozen=True, kw_only=True)
class RelaySum(Combine):
    """m_{i->j}(t) = x_i(t) + sum over k != j of m_{k->i}(t-1);  x_i <- (x_i + sum_j m_{j->i}) / (1 + their counts).

    On a tree every worker's parameters reach every other worker once, one round per link later: a mean of all n with
    equal weights and delays up to the diameter. Counts are relayed with the sums, and reach n after as many rounds.

    A worker sends one message to all neighbours. With T_i(t) = x_i(t) + S_i(t-1), the sum S_i of its received m obeys

        S_i(t) = sum_j m_{j->i}(t) = sum_j (T_j(t) - m_{i->j}(t-1)) = sum_j T_j(t) - d_i T_i(t-1) + S_i(t-2).

    All sums begin anew after `restart` rounds; for as many rounds as the diameter a worker then averages what it has
    received so far.

    If a worker is poisoned (NaN), its neighbours replace its T by their own, and the worker its T by the mean of
    theirs. Its S_i(t) above is then exact, as is all that it relays, and x_i except for its own term in the mean. If
    two neighbours are poisoned in one round, S is off by their difference until the sums begin anew.

    Mixing does not keep the mean step by step. State: S and S(t-2) - d T(t-1), two copies of the parameters. Bytes: the
    parameters and a number.

    Args:
        restart: rounds until all sums begin anew, many times the diameter. This also forgets refused messages (NaN).

    Raises:
        ValueError: restart below 1; at set-up, if parameters have half precision, which sums overflow, the graph is
            no tree, the weights aren't `Dyadic`, or a message would be sent before the last one is mixed.

    Source: Vogels et al. 2110.04175, algorithm 1, normalized by counts.
    """

    weights = Dyadic()  # powers of two, so that sums are recovered without a biased rounding error
    form = MessageForm(exact=1)  # the count
    restart: int = 200

    def __post_init__(self) -> None:
        at_least_one("RelaySum's restart", self.restart, "200 serve a diameter of 20")

    @property
    def recovery(self) -> Recovery:
        return Recovery(self._heal, tied=tied_by(("sum", "rest", "block")), of_links=True, lasting=("sum", "rest"))

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        check_tree("RelaySum", topology, size, weights)
        # S_i(t) is computed from S_i(t-1) and S_i(t-2), whose messages must have arrived.
        check_one_flight("RelaySum", topology, size, delay)

    def init(self, x: Tensor) -> State:
        if x.dtype.itemsize < 4:
            raise ValueError(
                f"RelaySum needs parameters of at least 32 bits, got {x.dtype}: use precision='bf16-mixed'"
            )
        nothing = torch.zeros_like(torch.cat((x, x[..., :1]), dim=-1))  # (elements + 1,): a sum, its count
        return {"sum": nothing, "rest": nothing.clone(), "block": torch.zeros((), dtype=torch.int64, device=x.device)}

    def message(self, x: Tensor, state: State) -> Tensor:
        return torch.cat((x.detach(), torch.ones_like(x[..., :1])), dim=-1).add_(state["sum"])

    def values(self, message: Tensor) -> Tensor:
        return message[..., :-1] / message[..., -1:]

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        """x += (mean of all received) - (x when sent), with sum_j T_j = (mixed - w_ii T_i) / w_ij."""
        before, rest = state["sum"], state["rest"]
        own, degree = turn.own().to(sent), turn.degree().to(sent)
        received = mixed.sub_(own * sent).mul_(degree / (1 - own)).add_(rest)
        was = sent - before  # T - S: x when sent, and 1
        total = received + was  # (elements + 1,)
        x.add_(total[..., :-1] / total[..., -1:] - was[..., :-1])
        rest.copy_(before - degree * sent)  # S(t-1) - d T(t), for S(t+1)
        before.copy_(received)
        # An error in S neither grows nor fades (the recursion's roots are 1, -1 and 0): rounding adds up as a
        # random walk until the restart. The device decides, so that the host doesn't wait.
        same = state["block"] == turn.round // self.restart
        for kept in (before, rest):
            kept.masked_fill_(~same, 0)
        state["block"].fill_(turn.round // self.restart)

    def _heal(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        x.copy_((sent - state["sum"])[..., :-1])  # T - S, without the count
        self.apply(x, sent, mixed, state, turn)
