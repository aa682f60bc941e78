"""Rules that keep sums over all workers: push-sum on directed graphs (stochastic gradient push), RelaySum on trees."""

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

    P's columns sum to one: everybody splits what it has among its targets, and no more is asked of the graph than
    that it is strongly connected over time. Sum_i X_i and sum_i w_i = n keep, so that z reaches the mean.

    What a worker gives away leaves when it is sent and arrives when it lands. Whatever the delay, what is under way is
    only late: mixing is stable at every delay, without a rate. The mean of the workers is sum_i w_i z_i / sum_i w_i.

    State: z after the last update (a copy of the parameters) and w, which begins at 1. Bytes: the parameters and a
    number. Where P is doubly stochastic w stays 1, and at delays 0 and 1 it is Gossip().

    A healed worker takes z and w of its neighbours' mixture. sum_i w_i = n keeps where all w are 1; elsewhere it is
    off by as much as w_i is from its neighbours', and updates of the mean are n / sum_i w_i times as large. z still
    reaches one value.

    Raises:
        ValueError: at set-up, where parameters have half precision: w would be rounded, and scale all of them.

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
        """z <- last + u / w: the numerator gets the whole update."""
        x.sub_(state["last"]).div_(state["weight"]).add_(state["last"])  # u / w
        state["last"].copy_(x)

    def message(self, x: Tensor, state: State) -> Tensor:
        return torch.cat((x.detach() * state["weight"], state["weight"]), dim=-1)  # (elements + 1,): X, w

    def values(self, message: Tensor) -> Tensor:
        return message[..., :-1] / message[..., -1:]

    def launched(self, x: Tensor, sent: Callable[[], Tensor], state: State, turn: Turn) -> None:
        """Keep p_ii of it: X -= (1 - p_ii) X."""
        # By what a codec made of it: what leaves here is then what arrives there.
        mass = sent()
        self._add(x, mass * (turn.own().to(mass) - 1), state)

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        """X += what arrived from the others: mixed - p_ii sent."""
        self._add(x, mixed.sub_(sent * turn.own().to(sent)), state)

    def share(self, state: State) -> Tensor:
        return state["weight"]

    def _heal(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        self._begin_anew(x, sent, sent, state, turn)
        state["weight"] = sent[..., -1:].clone()  # w of the neighbours' mixture

    def _add(self, x: Tensor, mass: Tensor, state: State) -> None:
        """last <- (last w + X) / (w + v) for a mass (X, v); x gets the same correction and keeps what it learnt."""
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

    On a tree every worker's parameters reach every other once, as old as the path is long: a mean of all n with equal
    weights and delays up to the diameter. Counts travel likewise and fill up after as many rounds.

    One message serves all neighbours. With T_i(t) = x_i(t) + S_i(t-1), the sum of what i received obeys

        S_i(t) = sum_j m_{j->i}(t) = sum_j (T_j(t) - m_{i->j}(t-1)) = sum_j T_j(t) - d_i T_i(t-1) + S_i(t-2).

    All sums begin anew after `restart` rounds; for as many rounds as the diameter a worker then averages what it has
    received so far.

    A poisoned worker's neighbours take their own T for its; it takes the mean of theirs, which is the same for the
    sums: S_i(t) above is exact, and all that it relays from then on. So is x_i, but for its own place in the mean.
    Where two neighbours are poisoned in one round, S is off by what they differ, until it begins anew.

    Mixing does not keep the mean step by step. State: S and S(t-2) - d T(t-1), two copies of the parameters. Bytes: the
    parameters and a number.

    Args:
        restart: rounds between two beginnings, many times the diameter. A refused message (NaN) is forgotten then, too.

    Raises:
        ValueError: restart below 1; at set-up, where parameters have half precision, in which sums don't fit, the graph
            is no tree, the weights aren't `Dyadic`, or a message would leave before the last landed.

    Source: Vogels et al. 2110.04175, algorithm 1, normalized by counts.
    """

    weights = Dyadic()  # powers of two, from which sums come back without an error of one sign
    form = MessageForm(exact=1)  # the count
    restart: int = 200

    def __post_init__(self) -> None:
        at_least_one("RelaySum's restart", self.restart, "200 serve a diameter of 20")

    @property
    def recovery(self) -> Recovery:
        return Recovery(self._heal, tied=tied_by(("sum", "rest", "block")), of_links=True, lasting=("sum", "rest"))

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        check_tree("RelaySum", topology, size, weights)
        # S_i(t) is made of S_i(t-1) and S_i(t-2), which must have landed.
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
        """x += (mean of all received) - (x as it was sent); sum_j T_j = (mixed - w_ii T_i) / w_ij."""
        before, rest = state["sum"], state["rest"]
        own, degree = turn.own().to(sent), turn.degree().to(sent)
        heard = mixed.sub_(own * sent).mul_(degree / (1 - own)).add_(rest)
        was = sent - before  # T - S: x as it was sent, and 1
        total = heard + was  # (elements + 1,)
        x.add_(total[..., :-1] / total[..., -1:] - was[..., :-1])
        rest.copy_(before - degree * sent)  # S(t-1) - d T(t), for S(t+1)
        before.copy_(heard)
        # An error in S neither grows nor fades (the recursion's roots are 1, -1 and 0): rounding adds up as a
        # random walk until it is forgotten. Decided on the device, for which nobody waits.
        same = state["block"] == turn.round // self.restart
        for kept in (before, rest):
            kept.masked_fill_(~same, 0)
        state["block"].fill_(turn.round // self.restart)

    def _heal(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        x.copy_((sent - state["sum"])[..., :-1])  # T - S, without the count
        self.apply(x, sent, mixed, state, turn)
