"""RelaySum (RelaySGD): exact sums, relayed along a spanning tree."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.combine.rule import MessageForm, Recovery, State, Turn, tied_by
from lightning_decentral.gossip.plan.checks import check_one_flight, check_tree
from lightning_decentral.gossip.plan.topology.topology import Topology, at_least_one
from lightning_decentral.gossip.plan.weights import Dyadic, Weights
from lightning_decentral.shared.plan.arguments import checked


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

    restart: int = 200

    def __post_init__(self) -> None:
        at_least_one("RelaySum's restart", self.restart, "200 serve a diameter of 20")

    @property
    def weights(self) -> Weights:
        # Powers of two, from which sums come back without an error of one sign.
        return Dyadic()

    @property
    def form(self) -> MessageForm:
        return MessageForm(exact=1)  # the count

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
        nothing = torch.zeros_like(torch.cat((x, x[..., :1]), dim=-1))
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
        was = sent - before
        total = heard + was
        x.add_(total[..., :-1] / total[..., -1:] - was[..., :-1])
        rest.copy_(before - degree * sent)
        before.copy_(heard)
        self._restart(state, turn.round // self.restart)

    def _heal(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        x.copy_((sent - state["sum"])[..., :-1])
        self.apply(x, sent, mixed, state, turn)

    def _restart(self, state: State, block: int) -> None:
        # An error in S neither grows nor fades (the recursion's roots are 1, -1 and 0): rounding adds up as a
        # random walk until it is forgotten. Decided on the device, for which nobody waits.
        same = state["block"] == block
        for name in ("sum", "rest"):
            state[name].masked_fill_(~same, 0)
        state["block"].fill_(block)
