"""Push-sum (stochastic gradient push): averages over directed graphs whose weights don't sum to one both ways."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.combine.rule import MessageForm, Recovery, State, Turn, tied_by
from lightning_decentral.gossip.plan.checks import check_columns
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import OutDegree, Weights


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

    @property
    def weights(self) -> Weights:
        return OutDegree()

    @property
    def form(self) -> MessageForm:
        # w: rounded, it would scale all parameters.
        return MessageForm(exact=1)

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
        return {"last": x.detach().clone(), "weight": torch.ones_like(x[..., :1])}

    def adapt(self, x: Tensor, state: State, turn: Turn) -> None:
        """z <- last + u / w: the numerator gets the whole update."""
        x.sub_(state["last"]).div_(state["weight"]).add_(state["last"])
        state["last"].copy_(x)

    def message(self, x: Tensor, state: State) -> Tensor:
        return torch.cat((x.detach() * state["weight"], state["weight"]), dim=-1)

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
        state["weight"] = sent[..., -1:].clone()

    def _add(self, x: Tensor, mass: Tensor, state: State) -> None:
        """last <- (last w + X) / (w + v) for a mass (X, v); x gets the same correction and keeps what it learnt."""
        last, before = state["last"], state["weight"]
        weight = before + mass[..., -1:]
        corrected = last.mul(before).add_(mass[..., :-1]).div_(weight)
        x.add_(corrected - last)
        last.copy_(corrected)
        before.copy_(weight)
