"""The correction of a round, x += rate (mixed - sent), in as few passes as there are tensors.

    difference_    out <- sum_j w_j (heard_j - sent)             2 passes, and one for each j
    correct_       x <- x + rate sum_j w_j (heard_j - sent)      3 passes, and one for each j

over those j whose message is sound: the weight of the others stays with the receiver. Equal messages change no bit, in
any type: each difference is exactly zero. Computed in float32 where numbers have fewer bits, rounded once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_decentral.shared.compute.fused import operator


def difference(sent: Tensor, heard: Sequence[Tensor], weights: Sequence[float], sane: Tensor) -> Tensor:
    """sum_j w_j (heard_j - sent) over the sound j, in float32 at least.

    Args:
        sane: bool [1 + heard]: of this worker's own message, then of each that was heard.
    """
    out = torch.empty_like(sent, dtype=torch.promote_types(sent.dtype, torch.float32))
    difference_(out, sent, heard, weights, sane)
    return out


def apply_difference(x: Tensor, of: Tensor, rate: float) -> None:
    """x <- x + rate of: the bits of `correct_`."""
    x.add_(of if rate == 1 else of * rate)


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


_HEARD = "Tensor sent, Tensor[] heard, float[] weights, Tensor sane"
correct_ = operator(f"correct_(Tensor(a!) x, {_HEARD}, float rate) -> ()", _correct)
difference_ = operator(f"difference_(Tensor(a!) out, {_HEARD}) -> ()", _difference)
