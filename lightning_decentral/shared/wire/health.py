"""Which replicas are sick (NaN, infinity, an absurd number) or, where all must be equal, differ from the others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_decentral.shared.compute.health import FACTOR, extremes, scale, sound
from lightning_decentral.shared.wire.fsdp import local
from lightning_decentral.shared.wire.transport import Transport

TOLERANCE = 1e-2
"""Of replicas that take the same updates, of a tensor's largest magnitude: rounding stays far below, a wrong update or
a flipped exponent doesn't."""
EXACT = 1e-12
"""What the order of a float64 sum may change in the mean of equal numbers, in the same measure."""


@dataclass(frozen=True)
class Ailment:
    """The first tensor for which a worker stays out, by its number, and the largest magnitude in it."""

    tensor: int
    scale: float

    def __str__(self) -> str:
        if self.scale != self.scale:
            return "holds NaN"
        if self.scale == float("inf"):
            return "holds infinity"
        return f"holds {self.scale:.2g}, over {FACTOR:.0e} times what is usual among the workers"


def real(tensor: Tensor) -> bool:
    """Whether it is averaged."""
    return tensor.is_floating_point() or tensor.is_complex()


def ailing(tensors: Sequence[Tensor], over: Transport, devices: int = 1) -> dict[int, Ailment]:
    """{worker: why its replica is not sound}, the same on all; `compute.health.sound` tensor by tensor.

    Collective: gathers two numbers for each tensor. A tensor with -inf, but neither NaN nor +inf, on most workers
    without NaN is a mask; one of nothing but +inf a best score that none has reached yet.

    Args:
        devices: of each worker, whose tensors may be shards; ranks follow each other.
    """
    rows = [extremes(local(t.detach())) for t in tensors if real(t)]
    if not rows:
        return {}
    pending, gathered = over.all_gather(torch.stack([row.to(rows[0].device) for row in rows]))
    pending.wait()
    low, high = torch.stack(list(gathered)).cpu().unbind(-1)  # [workers x devices, tensors]
    masked = ((low == -torch.inf) & (high < torch.inf)) | (low == torch.inf)
    masks = masked & (2 * masked.sum(0) > (~high.isnan()).sum(0))
    scales = torch.maximum(-low, high).masked_fill(masks, 0.0)
    places = [place for place, tensor in enumerate(tensors) if real(tensor)]
    found: dict[int, Ailment] = {}
    for device, column in (~sound(scales)).nonzero().tolist():
        found.setdefault(device // devices, Ailment(places[column], float(scales[device, column])))
    return found


@torch.no_grad()
def mean_of_others(
    tensors: Sequence[Tensor], mean_of: Callable[[Sequence[Tensor]], list[Tensor]], left_out: bool
) -> list[Tensor]:
    """sum_i share_i x_i / sum_i share_i over the workers i that aren't left out. Collective."""
    device = next(t.device for t in tensors if real(t))
    # The sum of shares travels along. Zeros instead of a share of zero: zero times NaN is NaN.
    one = torch.full((1,), 0.0 if left_out else 1.0, dtype=torch.float64, device=device)
    *sums, share = mean_of([*(torch.zeros_like(t) if left_out and real(t) else t for t in tensors), one])
    return [total / float(share) if real(total) else total for total in sums]


@torch.no_grad()
def mend(tensors: Sequence[Tensor], means: Sequence[Tensor]) -> None:
    """What isn't sound beside its mean (a poisoned buffer, say, which no neighbour sends) <- its mean."""
    for own, of_others in zip(tensors, means, strict=True):
        if real(own) and not bool(sound(torch.stack([scale([local(own)]), scale([local(of_others)])]))[0]):
            local(own).copy_(local(of_others))


def none_sound(sick: Mapping[int, Ailment], workers: int) -> str:
    """Why nothing is validated or saved where nobody is left, a mean over no workers; empty: somebody is."""
    if len(sick) < workers:
        return ""
    worker, ailment = next(iter(sick.items()))
    return (
        f"none of the {workers} workers has a sound model (worker {worker} {ailment}), so there is no mean to validate "
        "or save; earlier checkpoints stay. Lower the learning rate, clip gradients (gradient_clip_val) or find the "
        "operation with detect_anomaly=True"
    )


@dataclass(frozen=True)
class Unequal:
    """Two replicas that should be the same: (replica, its smallest, largest and mean value) of one tensor, by number.

    The second is the one that stands out.

    Attributes:
        slight: they differ by no more than replicas of unlike hardware may.
    """

    tensor: int
    slight: bool
    usual: tuple[int, tuple[float, float, float]]
    other: tuple[int, tuple[float, float, float]]

    def said(self, name: str, number_of: Callable[[int], int]) -> str:
        """One line.

        Args:
            number_of: the worker that a replica is.
        """
        (one, a), (two, b) = self.usual, self.other
        if self.slight:
            apart = max(abs(x - y) for x, y in zip(a, b, strict=True))
            return (
                f"worker {number_of(two)}'s {name} differs from worker {number_of(one)}'s by {apart:.2g}, and both take"
                " the same updates: rounding where processors are unlike, elsewhere something writes to one of them"
            )
        return (
            f"worker {number_of(two)}'s {name} is from {b[0]:.4g} to {b[1]:.4g} with mean {b[2]:.4g}, worker "
            f"{number_of(one)}'s from {a[0]:.4g} to {a[1]:.4g} with mean {a[2]:.4g}, and they must be equal: nothing "
            "is validated or saved, earlier checkpoints stay. Resume from the last one, and look at the worker's memory"
            " and at what writes to its parameters"
        )


@torch.no_grad()
def unequal(tensors: Sequence[Tensor], over: Transport) -> Unequal | None:
    """The first tensor that isn't the same on all workers; None: all are. The same answer on all.

        |p_i - p_j| > TOLERANCE max(1e-3, s)    p: smallest, largest, mean; s: the usual largest magnitude
                    > EXACT s                   slight: no tensor differs by more

    Collective: gathers three numbers for each tensor. Not their bits: workers of different hardware may honestly differ
    by rounding.
    """
    rows = [torch.cat([extremes(t.detach()), _mean(t.detach())]) for t in tensors if real(t)]
    if over.size == 1 or not rows:
        return None
    pending, gathered = over.all_gather(torch.stack(rows))
    pending.wait()
    values = torch.stack(list(gathered)).cpu()  # [workers, tensors, 3]
    scales = values[..., :2].abs().amax(-1).nan_to_num(torch.inf)
    order = scales.argsort(dim=0, stable=True)
    usual = order[(over.size - 1) // 2]  # the lower median, so that of two workers the larger one stands out
    middle = values.gather(0, usual.view(1, -1, 1).expand(1, -1, 3))
    apart = (values - middle).abs().masked_fill((values == middle) | (values.isnan() & middle.isnan()), 0.0)
    apart = apart.nan_to_num(torch.inf, torch.inf).amax(-1)
    usual_scale = scales.gather(0, usual[None])[0]
    wrong = (apart > TOLERANCE * usual_scale.clamp(min=1e-3)).any(0)
    differs = wrong if wrong.any() else (apart > EXACT * usual_scale).any(0)
    if not differs.any():
        return None
    column, places = int(differs.int().argmax()), [place for place, tensor in enumerate(tensors) if real(tensor)]
    pair = [int(usual[column]), int(apart[:, column].argmax())]
    said = [(worker, tuple(values[worker, column].tolist())) for worker in pair]
    return Unequal(places[column], not bool(wrong.any()), *said)


def _mean(tensor: Tensor) -> Tensor:
    """Float64 [1]; of complex numbers that of both parts."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    wide = parts.float() if parts.element_size() == 1 else parts
    return (wide.sum(dtype=torch.float64) / max(1, wide.numel())).view(1)
