"""Finds workers whose tensors have NaN, infinity or far too large numbers, and averages the others."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_decentral.shared.compute.health import FACTOR, extremes, scale, sound
from lightning_decentral.shared.compute.worker_state import fingerprint
from lightning_decentral.shared.wire.fsdp import local
from lightning_decentral.shared.wire.objects import gather_rows
from lightning_decentral.shared.wire.transport import Transport

Mean = Callable[[Sequence[Tensor]], list[Tensor]]
REMEDY = "Lower the learning rate, clip gradients (gradient_clip_val) or find the operation with detect_anomaly=True"


@dataclass(frozen=True)
class Ailment:
    """Reason to leave a worker out of a mean: its first bad tensor, by number, and the largest magnitude in it."""

    tensor: int
    scale: float

    def __str__(self) -> str:
        if self.scale != self.scale:
            return "holds NaN"
        if self.scale == float("inf"):
            return "holds infinity"
        return f"holds {self.scale:.2g}, over {FACTOR:.0e} times what is usual among the workers"


def real(tensor: Tensor) -> bool:
    """Return whether a tensor is averaged: floating point or complex."""
    return tensor.is_floating_point() or tensor.is_complex()


@torch.no_grad()
def constants(buffers: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return {fingerprint: kinds of its elements} of buffers with NaN or infinity before the first step: edges of bins,
    bounds, placeholders."""
    found = [_kinds(t) for t in buffers if real(t) and not bool(torch.isfinite(scale([t])))]
    return {int(fingerprint(kinds)): kinds for kinds in found}


def _kinds(tensor: Tensor) -> Tensor:
    """Return an int8 tensor of the same shape ((..., 2) for complex): 0 finite, 1 NaN, 2 infinity, 3 minus infinity."""
    wide = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    wide = wide.float() if wide.element_size() == 1 else wide
    return (wide.isnan() + 2 * wide.isposinf() + 3 * wide.isneginf()).to(torch.int8)


def _others(tensor: Tensor, known: Iterable[Tensor]) -> Tensor:
    """Return a tensor's elements without those that were never finite, by the `known` kinds for its shape."""
    kinds = _kinds(tensor)
    alike = [k for k in known if k.shape == kinds.shape]
    constant = torch.stack([kinds == k.to(kinds.device) for k in alike]).any(0) & (kinds > 0) if alike else kinds > 3
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor)[~constant]


def ailing(
    tensors: Sequence[Tensor], over: Transport, devices: int = 1, known: Collection[Tensor] = ()
) -> dict[int, Ailment]:
    """Return {worker: why its replica isn't healthy}, equal on all; by `compute.health.sound` for each tensor.

    Collective: gathers two numbers for each tensor. A tensor that has -inf, but no +inf, on most workers without NaN is
    taken for a mask; a tensor of nothing but +inf for a best score that isn't reached yet. Elements that weren't finite
    from the start count as healthy, each until it is written: a queue fills up. `devices`: number of devices of each
    worker, in consecutive ranks; their tensors may be shards. `known`: the result of `constants`, equal on all."""
    rows = [extremes(local(t.detach())) for t in tensors if real(t)]  # (lowest, highest) of each
    if known:
        for tensor, row in zip([t for t in tensors if real(t)], rows, strict=True):
            if not bool(row.isfinite().all()):
                row.copy_(extremes(_others(local(tensor.detach()), known)))
    if not rows:
        return {}
    gathered = gather_rows(over, torch.stack([row.to(rows[0].device) for row in rows]))
    low, high = gathered.cpu().unbind(-1)  # [workers x devices, tensors]
    masked = ((low == -torch.inf) & (high < torch.inf)) | (low == torch.inf)
    masks = masked & (2 * masked.sum(0) > (~high.isnan()).sum(0))
    scales = torch.maximum(-low, high).masked_fill(masks, 0.0)  # [workers x devices, tensors]
    places = [place for place, tensor in enumerate(tensors) if real(tensor)]
    found: dict[int, Ailment] = {}
    for device, column in (~sound(scales)).nonzero().tolist():
        found.setdefault(device // devices, Ailment(places[column], float(scales[device, column])))
    return found


@torch.no_grad()
def mean_of_others(tensors: Sequence[Tensor], mean_of: Mean, left_out: bool) -> list[Tensor]:
    """sum_i share_i x_i / sum_i share_i over the workers i that aren't left out. Collective."""
    device = next(t.device for t in tensors if real(t))
    # The sum of shares is averaged, too. Zeros replace tensors of share zero: zero times NaN is NaN.
    one = torch.full((1,), 0.0 if left_out else 1.0, dtype=torch.float64, device=device)
    *sums, share = mean_of([*(torch.zeros_like(t) if left_out and real(t) else t for t in tensors), one])
    return [total / float(share) if real(total) else total for total in sums]


def mean_of_sound(
    tensors: Sequence[Tensor], mean_of: Mean, over: Transport, devices: int = 1, shards: int = 1
) -> tuple[list[Tensor], str]:
    """Return (the mean of the healthy workers, the reason why this worker was left out or ""). Collective: one mean
    where all are healthy and none has shards. `over`: the group of all devices, `devices` of each worker; with `shards`
    each sees a part of a mean. FloatingPointError on all workers where no worker is healthy."""
    means = mean_of(tensors)
    if not means:
        return means, ""
    # An unhealthy number shows in the mean, which all have: no further message is needed.
    if shards == 1 and float(scale(means)) <= FACTOR / over.size:
        return means, ""
    if not (sick := ailing(tensors, over, devices)):
        return means, ""
    workers, own = over.size // devices, over.rank // devices
    if len(sick) == workers:
        raise FloatingPointError(f"none of the {workers} workers has sound parameters. {REMEDY}")
    means = mean_of_others(tensors, mean_of, own in sick)
    return means, f"worker {own}: a parameter {sick[own]}; the others are averaged. {REMEDY}" if own in sick else ""


@torch.no_grad()
def of_worker(source: int, tensors: Sequence[Tensor], over: Transport) -> list[Tensor]:
    """Return copies of the tensors of device number `source` of `over`, of any type. Collective."""
    values = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    for value in values:
        if value.numel():
            over.broadcast(value.view(-1).view(torch.uint8), source).wait()
    return values


@torch.no_grad()
def mend(tensors: Sequence[Tensor], means: Sequence[Tensor]) -> None:
    """Replace each tensor by its mean where it isn't healthy compared to the mean (a buffer with NaN, say)."""
    for own, of_others in zip(tensors, means, strict=True):
        if _unsound(own, of_others):
            local(own).copy_(local(of_others))


@torch.no_grad()
def mend_together(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Replace all tensors by these values if any tensor isn't healthy compared to its value: they belong together."""
    if any(_unsound(own, value) for own, value in zip(tensors, values, strict=True)):
        torch._foreach_copy_(list(tensors), list(values))


def _unsound(own: Tensor, reference: Tensor) -> bool:
    return real(own) and not bool(sound(torch.stack([scale([local(own)]), scale([local(reference)])]))[0])


def none_sound(sick: Mapping[int, Ailment], workers: int, named: Callable[[int], str]) -> str:
    """Return the reason why nothing is validated or saved where no worker is healthy; empty where a worker is. `named`
    returns a tensor's name, by its number."""
    if len(sick) < workers:
        return ""
    worker, ailment = next(iter(sick.items()))
    return (
        f"none of the {workers} workers has a sound model ({named(ailment.tensor)} of worker {worker} {ailment}), so "
        f"there is no mean to validate or save; earlier checkpoints stay. {REMEDY}"
    )
