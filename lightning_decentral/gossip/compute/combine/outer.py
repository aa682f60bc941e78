"""Outer optimizer steps after local steps: DiLoCo, Streaming DiLoCo, MuLoCo, NoLoCo.

An outer step moves the anchor, the parameters at which the local steps began, by the workers' mean displacement; the
anchor is validated and saved."""

from dataclasses import dataclass, replace
from math import log
from typing import Self

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine, MessageForm, Recovery, State, Turn
from lightning_decentral.gossip.compute.combine.gossip import LinearRate, Rate, at, check_rate, largest
from lightning_decentral.gossip.plan.checks import check_equals, check_one_flight
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights, local_steps
from lightning_decentral.shared.plan.arguments import checked

WARM_UP = 10  # Outer steps over which `suited_momentum` rises from half its value.


def suited_lr(workers: int) -> float:
    """Default outer learning rate: 0.6 for up to 4 workers, 0.2 more for each doubling, at most 1. Source: rounded,
    after 2503.09799 and 2505.23725."""
    return min(1.0, max(0.6, 0.6 + 0.2 * log(workers / 4, 2)))


def suited_momentum(steps: int) -> float:
    """Default outer momentum: 0.55 for up to 10 local steps, 0.85 from 30 on, linear in their logarithm between.
    Displacements over few local steps resemble each other, and momentum lengthens what is alike: the gain of aligned
    displacements is lr (1 + mu / (1 - mu rho)), with rho the correlation of consecutive displacements."""
    share = log(max(steps, 1) / 10) / log(3)
    return round(0.55 + 0.3 * min(1.0, max(0.0, share)), 3)


@checked
@dataclass(frozen=True, kw_only=True)
class Outer(Combine):
    """m <- momentum m + (mixed - anchor);  anchor <- anchor + lr m;  x <- x + (anchor - sent).

    anchor_i is x_i after the last outer step; mixed - anchor_i = mean of (x_j - anchor_j) - (anchor_i - mean of
    anchor_j): the sources' mean displacement, and a pull towards the sources. The topology sets the number of local
    steps: over `Every(H, RandomMatching())` this rule is NoLoCo (with gamma = beta = lr, as in its published code).
    Overlapped, x keeps the updates made while a message was in flight. A worker without a partner takes no outer step.
    The mean of the anchors is validated and saved. It lacks the updates since the last round, so end a training with a
    round.

    State: anchor and m, two copies of the parameters; with a codec that rounds a third copy while a message is in
    flight: x when sent. Then mixed + (x - sent) replaces mixed and x replaces sent, so that the codec's rounding
    doesn't shift the mean. Bytes: the parameters, in every H-th step. A healed worker begins at its neighbours'
    parameters, with these as its anchor and without momentum: no sum over the workers depends on either.

    Args:
        lr: outer learning rate in (0, 1]: a number, a `RateSchedule`, or None for `suited_lr` of the number of workers.
        momentum: outer momentum in [0, 1): a number, a `RateSchedule`, or None for `suited_momentum`, warmed up.

    Raises:
        ValueError: lr or momentum out of range; at set-up, if a message would be sent before the last one is mixed.

    Source: Kolehmainen et al. 2506.10911.
    """

    lr: Rate | None = 0.7
    momentum: Rate | None = 0.5

    def __post_init__(self) -> None:
        if self.lr is not None:
            check_rate(self.lr, "the outer lr")
        if self.momentum is not None and not 0 <= largest(self.momentum) < 1:
            raise ValueError(
                f"the outer momentum must be in [0, 1), got {largest(self.momentum)}: 0 is Gossip(rate=lr)"
            )

    def placed(self, topology: Topology, size: int) -> Self:
        steps = local_steps(topology, size)
        mu = suited_momentum(steps)
        warmed = LinearRate(first=mu / 2, last=mu, rounds=WARM_UP * steps)
        lr = suited_lr(size) if self.lr is None else self.lr
        return replace(self, lr=lr, momentum=warmed if self.momentum is None else self.momentum)

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        super().check(topology, size, weights, delay)
        check_one_flight(type(self).__name__, topology, size, delay)

    @property
    def recovery(self) -> Recovery:
        return Recovery(self._begin_anew)

    @property
    def aligned(self) -> "Combine | None":
        # A subclass may have another equation.
        return _Aligned(lr=self.lr, momentum=self.momentum) if type(self) is Outer else None

    def init(self, x: Tensor) -> State:
        return {"anchor": x.detach().clone(), "momentum": torch.zeros_like(x)}  # (elements,) each

    def encoded(self, x: Tensor, state: State) -> None:
        # Compared with the decoded message the anchor would move by the codec's rounding error, too.
        state["left"] = x.detach().clone()

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        anchor, m = state["anchor"], state["momentum"]
        if "left" in state:
            left = state.pop("left")
            mixed, sent = mixed.add_(left - sent), left  # as if x itself had been sent
        lr, momentum = self._now(turn)
        # 0 for a worker without sources, which takes no outer step: a factor works for a worker and for the rows of a
        # simulation.
        together = (turn.own() < 1).to(x)
        displacement = mixed.sub_(anchor).mul_(together)
        m.mul_(1 - together * (1 - momentum)).add_(displacement)
        anchor.add_(self._step(m, displacement, momentum).mul_(together), alpha=lr)
        x.add_((anchor - sent).mul_(together))  # x keeps the updates made while the message was in flight

    def shown(self, state: State) -> Tensor:
        return state["anchor"]

    def mixing(self, turn: Turn) -> dict[str, float]:
        lr, momentum = self._now(turn)
        return {"outer_lr": lr, "outer_momentum": momentum}

    def _now(self, turn: Turn) -> tuple[float, float]:
        assert self.lr is not None
        assert self.momentum is not None, "placed before it is used"
        return at(self.lr, turn), at(self.momentum, turn)

    def _step(self, m: Tensor, displacement: Tensor, momentum: float) -> Tensor:
        # A copy: the caller scales it in place.
        return m.clone()


@checked
@dataclass(frozen=True, kw_only=True)
class OuterNesterov(Outer):
    """m <- momentum m + (mixed - anchor);  anchor <- anchor + lr (mixed - anchor + momentum m);  x as in `Outer`.

    Over `Every(H, Complete())` all anchors are equal and this rule is DiLoCo, with Nesterov momentum as in torch's SGD.
    Over `Stream(H, parts, Complete())` the rule is Streaming DiLoCo; with Muon as the workers' optimizer, MuLoCo.

    Source: Douillard et al. 2311.08105, algorithm 1; 2501.18512; Therien et al. 2505.23725."""

    momentum: Rate | None = 0.9

    @property
    def aligned(self) -> Combine | None:
        return PseudoGradient(lr=self.lr, momentum=self.momentum) if type(self) is OuterNesterov else None

    def _step(self, m: Tensor, displacement: Tensor, momentum: float) -> Tensor:
        return displacement.add(m, alpha=momentum)


@checked
@dataclass(frozen=True, kw_only=True)
class PseudoGradient(OuterNesterov):
    """`OuterNesterov` that sends displacements from the anchor (pseudo-gradients), which a coarse codec may round:

        way_i = x_i - anchor;  sent_i = Q(way_i);  s = (1/n) sum_j sent_j + f;  d = Q(s);  f <- s - d
        m <- momentum m + d;   anchor <- anchor + lr (d + momentum m) =: anchor + step;   x_i <- x_i + step - sent_i

    What the codec loses of a displacement stays in x_i - anchor and is sent with the next one: error feedback without
    the extra buffer that the source paper keeps, where x_i = anchor. The owner of a part keeps f, what the codec loses
    of the mean (`shared.compute.codec.coded_parts`): all workers decode the same d, so that their anchors are equal bit
    for bit. Every worker must average all workers with equal weights. Without a codec the rule is `OuterNesterov`. A
    codec that sends a part of a displacement now and the rest later (`TopK`) allows lr / (1 - momentum) up to 1.5: a
    longer step overshoots before the rest arrives.

    Two workers, and codecs with estimates of earlier messages, send to each other: then d is the mean of the decoded
    messages, and anchors are equal up to rounding.

    State: as `Outer`, and f, 1 / n of the parameters. Bytes, in every H-th step: 2 (n - 1) / n of the parameters,
    encoded; with `Int4()` an eighth of a float32 all-reduce. A poisoned worker's displacement counts as 0 on all
    workers, and the worker continues from its anchor, which equals the others'. Training ends if an all-reduce without
    a codec was given up because a far too large number was in the sum.

    Raises:
        ValueError: as `Outer`; at set-up, for a graph that doesn't link all workers, or a codec that doesn't fit.

    Source: outer gradients of 4 bits, 2501.18512; with error feedback, 2505.23725; by parts with owners, 2102.02888.
    """

    form = MessageForm(differences=True)

    @property
    def aligned(self) -> Combine:
        return self

    @property
    def recovery(self) -> Recovery:
        return Recovery(
            self._heal,
            unheard="no sound message was received, and its anchor would diverge from the others'",
            lasting=("anchor", "momentum"),
            stand_in=torch.zeros_like,
        )

    @property
    def largest_rate(self) -> float:
        assert self.lr is not None
        assert self.momentum is not None, "placed before it is judged"
        return largest(self.lr) / (1 - largest(self.momentum))

    def check(self, topology: Topology, size: int, weights: Weights, delay: int) -> None:
        super().check(topology, size, weights, delay)
        check_equals("PseudoGradient", topology, size, weights)

    def encoded(self, x: Tensor, state: State) -> None:
        """Leave x unchanged: what a codec loses stays in x."""

    def message(self, x: Tensor, state: State) -> Tensor:
        return x.detach() - state["anchor"]  # (elements,): the displacement since the last round

    def _heal(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        torch.add(state["anchor"], sent, out=x)  # sent replaces the poisoned displacement: 0
        self.apply(x, sent, mixed, state, turn)

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        anchor, m = state["anchor"], state["momentum"]
        lr, momentum = self._now(turn)
        m.mul_(momentum).add_(mixed)  # (elements,): d, the mean displacement, the same bits on all
        step = self._step(m, mixed, momentum).mul_(lr)
        anchor.add_(step)
        x.add_(step.sub_(sent))  # what the codec lost of the own displacement stays in x


class _Aligned(PseudoGradient):
    """`PseudoGradient` with the step of `Outer`."""

    _step = Outer._step
