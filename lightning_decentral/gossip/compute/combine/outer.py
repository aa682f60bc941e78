"""Outer steps after local ones (DiLoCo, its streaming form, MuLoCo, NoLoCo): an anchor moves where all went together.

The anchor is where the workers last began, and what is validated and saved.
"""

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

WARM_UP = 10  # Outer steps over which a momentum that suits the local steps rises from its half.


def suited_lr(workers: int) -> float:
    """0.6 for up to 4 workers, 0.2 more for each doubling, at most 1: the more go together, the less noise in the way.

    Source: rounded, after 2503.09799 and 2505.23725.
    """
    return min(1.0, max(0.6, 0.6 + 0.2 * log(workers / 4, 2)))


def suited_momentum(steps: int) -> float:
    """0.55 for up to 10 local steps, 0.85 from 30 on, by their logarithm between.

    Short ways are much alike one after the other, and momentum lengthens what is alike: the gain of aligned ways is
    lr (1 + mu / (1 - mu rho)), with rho the correlation of one with the next.
    """
    share = log(max(steps, 1) / 10) / log(3)
    return round(0.55 + 0.3 * min(1.0, max(0.0, share)), 3)


@checked
@dataclass(frozen=True, kw_only=True)
class Outer(Combine):
    """m <- momentum m + (mixed - anchor);  anchor <- anchor + lr m;  x <- x + (anchor - sent).

    anchor_i is where worker i last began; mixed - anchor_i = mean of (x_j - anchor_j) - (anchor_i - mean of anchor_j):
    the sources' mean displacement, and the pull towards them. Local steps come from the topology: over
    `Every(H, RandomMatching())` this is NoLoCo (with its gamma = beta = lr, as in its published code). Overlapped, x
    keeps what it learnt while the message was under way. A worker without a partner takes no outer step.

    Validated and saved is the mean of the anchors: what workers learnt since they last talked is not in it, so end a
    training with a talk.

    State: anchor and m, two copies of the parameters; under a codec that rounds a third while a message is under way:
    x as it left, so that mixed + (x - sent) stands for mixed and x for sent, and the mean of the workers doesn't move
    to the codec's nearest values. Bytes: the parameters, in every H-th step. A healed worker begins at its neighbours'
    parameters, with that anchor and without momentum: no sum over the workers depends on either.

    Args:
        lr: of the outer step, in (0, 1]; a number, a `RateSchedule`, or None: `suited_lr` of the workers.
        momentum: of the outer step, in [0, 1), likewise; None: `suited_momentum` of the local steps, warmed up.

    Raises:
        ValueError: lr or momentum outside of its range; at set-up, where a message would leave before the last landed.

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

    def init(self, x: Tensor) -> State:
        return {"anchor": x.detach().clone(), "momentum": torch.zeros_like(x)}  # (elements,) each

    def encoded(self, x: Tensor, state: State) -> None:
        # Against what was sent the anchor would move by what the codec made of it, up to the nearest code.
        state["left"] = x.detach().clone()

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        anchor, m = state["anchor"], state["momentum"]
        if "left" in state:
            left = state.pop("left")
            mixed, sent = mixed.add_(left - sent), left  # as if x itself had been sent
        lr, momentum = self._now(turn)
        # 0 for a worker without sources, which takes no outer step: a factor serves a worker and the rows of a
        # simulation.
        together = (turn.own() < 1).to(x)
        way = mixed.sub_(anchor).mul_(together)
        m.mul_(1 - together * (1 - momentum)).add_(way)
        anchor.add_(self._step(m, way, momentum).mul_(together), alpha=lr)
        x.add_((anchor - sent).mul_(together))  # x keeps what it learnt under way

    def shown(self, state: State) -> Tensor:
        return state["anchor"]

    def mixing(self, turn: Turn) -> dict[str, float]:
        lr, momentum = self._now(turn)
        return {"outer_lr": lr, "outer_momentum": momentum}

    def _now(self, turn: Turn) -> tuple[float, float]:
        assert self.lr is not None
        assert self.momentum is not None, "placed before it is used"
        return at(self.lr, turn), at(self.momentum, turn)

    def _step(self, m: Tensor, way: Tensor, momentum: float) -> Tensor:
        # A copy: the caller scales it in place.
        return m.clone()


@checked
@dataclass(frozen=True, kw_only=True)
class OuterNesterov(Outer):
    """m <- momentum m + (mixed - anchor);  anchor <- anchor + lr (mixed - anchor + momentum m);  x as in `Outer`.

    Over `Every(H, Complete())` all anchors are one and this is DiLoCo, Nesterov's momentum as torch's SGD has it; over
    `Stream(H, parts, Complete())` it is Streaming DiLoCo, and with Muon as the workers' optimizer MuLoCo.

    Source: Douillard et al. 2311.08105, algorithm 1; 2501.18512; Therien et al. 2505.23725.
    """

    momentum: Rate | None = 0.9

    def _step(self, m: Tensor, way: Tensor, momentum: float) -> Tensor:
        return way.add(m, alpha=momentum)


@checked
@dataclass(frozen=True, kw_only=True)
class PseudoGradient(OuterNesterov):
    """`OuterNesterov` whose messages are the ways from the anchor, which a coarse codec may round:

        way_i = x_i - anchor;  sent_i = Q(way_i);  s = (1/n) sum_j sent_j + f;  d = Q(s);  f <- s - d
        m <- momentum m + d;   anchor <- anchor + lr (d + momentum m) =: anchor + step;   x_i <- x_i + step - sent_i

    What the codec loses on the way to the mean stays in x_i - anchor and is sent with the next way: error feedback
    without the buffer that the source keeps for it next to x_i = anchor. What it loses on the way back, f, the owner of
    a part keeps (`shared.compute.codec.coded_parts`): all decode the same d, so that their anchors are one, bit for
    bit. All must average all with equal weights. With messages as they are it is `OuterNesterov`. A codec that
    sends a part of a way, the rest later (`TopK`), bears lr / (1 - momentum) up to 1.5: a longer step
    overshoots before the rest has come.

    Two workers, and codecs that look at what was sent before, send to each other: then d is the mean of
    what was sent, and anchors are one up to rounding.

    State: as `Outer`, and f, 1 / n of the parameters. Bytes, in every H-th step: 2 (n - 1) / n of the parameters,
    encoded; with `Int4()` an eighth of an all-reduce of float32. A poisoned worker's way counts as 0 on all, and it
    goes on from its anchor, which stays that of all. It ends where an all-reduce of messages as they are was given up
    by all, for an absurd number that was in the sum.

    Raises:
        ValueError: as `Outer`; at set-up, on a graph that doesn't link all, or under a codec that doesn't go with it.

    Source: outer gradients of 4 bits, 2501.18512; with error feedback, 2505.23725; by parts with owners, 2102.02888.
    """

    form = MessageForm(differences=True)

    @property
    def recovery(self) -> Recovery:
        return Recovery(
            self._heal,
            unheard="no sound message was heard, and its anchor would part from the others'",
            tied="a way that some have heard of a worker that died, and others not, parts their anchors for good",
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
        """Leave x as it is: the loss of a codec stays in it."""

    def message(self, x: Tensor, state: State) -> Tensor:
        return x.detach() - state["anchor"]  # (elements,): the way since the last talk

    def _heal(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        torch.add(state["anchor"], sent, out=x)  # sent stands in for the poisoned way: 0
        self.apply(x, sent, mixed, state, turn)

    def apply(self, x: Tensor, sent: Tensor, mixed: Tensor, state: State, turn: Turn) -> None:
        anchor, m = state["anchor"], state["momentum"]
        lr, momentum = self._now(turn)
        m.mul_(momentum).add_(mixed)  # (elements,): d, the mean way, the same bits on all
        step = self._step(m, mixed, momentum).mul_(lr)
        anchor.add_(step)
        x.add_(step.sub_(sent))  # what the codec lost of the own way stays in x
