"""The correction of a round, x += rate (mixed - sent), in as few passes as there are tensors.

    difference_    out <- sum_j w_j (heard_j - sent)             2 passes, and one for each j
    correct_       x <- x + rate sum_j w_j (heard_j - sent)      3 passes, and one for each j
    correct_and_state_                                           the same, a copy of x and its header: one pass more

over those j whose message is sound: the weight of the others stays with the receiver. Equal messages change no bit, in
any type: each difference is exactly zero. Computed in float32 where numbers have fewer bits, rounded once.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lightning_decentral.shared.compute.fused import operator
from lightning_decentral.shared.compute.health import state_

ROUNDING = 1e-12
"""Rounding error of a sum of weights."""


def difference(sent: Tensor, heard: Sequence[Tensor], weights: Sequence[float], sane: Tensor) -> Tensor:
    """sum_j w_j (heard_j - sent) over the sound j, in float32 at least.

    Args:
        sane: bool [1 + sources]: of this worker's own message, then of each that was received.
    """
    out = torch.empty_like(sent, dtype=torch.promote_types(sent.dtype, torch.float32))
    difference_(out, sent, heard, weights, sane)
    return out


def apply_difference(x: Tensor, of: Tensor, rate: float) -> None:
    """x <- x + rate of: the bits of `correct_`."""
    x.add_(of if rate == 1 else of * rate)


def mix(own: Tensor, heard: Sequence[Tensor], weights: Sequence[float]) -> None:
    """heard[0] <- w_0 own + sum_k w_k heard[k - 1]

    Step by step, each from the mean so far towards the next message: m <- m + w_k / (w_0 + ... + w_k) (heard_k - m). So
    equal messages give their very bits in any type, where products with 1/3 or 1/5 would each be rounded, and a worker
    at consensus would move. Weights that don't sum to one (of columns, as push-sum's) multiply in the end.

    Args:
        weights: of `own` and each of `heard`; none below 0.
    """
    total, sums = heard[0], list(accumulate(weights))
    mean = own
    for tensor, weight, so_far in zip(heard, weights[1:], sums[1:], strict=True):
        mean = torch.lerp(mean, tensor, weight / so_far if so_far else 0.0, out=total)
    if abs(sums[-1] - 1) > ROUNDING:
        total.mul_(sums[-1])


def _difference(out: Tensor, sent: Tensor, heard: Sequence[Tensor], weights: Sequence[float], sane: Tensor) -> None:
    for place, (tensor, weight) in enumerate(zip(heard, weights, strict=True), 1):
        # A device decides by itself: to ask it would make the host wait.
        part = torch.where(sane[place], tensor, sent).to(out.dtype).sub_(sent)
        part = part if weight == 1 else part.mul_(weight)
        if place == 1:
            out.copy_(part)
        else:
            out.add_(part)


def _correct(
    x: Tensor, sent: Tensor, heard: Sequence[Tensor], weights: Sequence[float], sane: Tensor, rate: float
) -> None:
    apply_difference(x, difference(sent, heard, weights, sane), rate)


def _correct_and_state(
    out: Tensor,
    header: Tensor,
    x: Tensor,
    sent: Tensor,
    heard: Sequence[Tensor],
    weights: Sequence[float],
    sane: Tensor,
    rate: float,
    step: int,
    elements: int,
) -> None:
    correct_(x, sent, heard, weights, sane, rate)
    state_(out, header, x, step, elements)


_HEARD = "Tensor sent, Tensor[] heard, float[] weights, Tensor sane"
correct_ = operator(f"correct_(Tensor(a!) x, {_HEARD}, float rate) -> ()", _correct)
difference_ = operator(f"difference_(Tensor(a!) out, {_HEARD}) -> ()", _difference)
correct_and_state_ = operator(
    f"correct_and_state_(Tensor(a!) out, Tensor(b!) header, Tensor(c!) x, {_HEARD}, float rate, int step, "
    "int elements) -> ()",
    _correct_and_state,
)
