"""Checks tensors of several workers for NaN, infinity and numbers far larger than the others'; compares equal replicas.

Messages, the mean model and gradients are checked by one formula. Replicas that must be equal are compared bit by bit
and, where bits differ, by numbers that show by how much, and which worker differs. Norms are in float64, whatever the
type of the tensors."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_decentral.shared.compute.codec.blocks import scratch
from lightning_decentral.shared.compute.fused import FACTOR as FACTOR
from lightning_decentral.shared.compute.fused import operator
from lightning_decentral.shared.compute.worker_state import digest, fingerprint


def sound(scales: Tensor) -> Tensor:
    """s_i is finite and s_i <= FACTOR * max(1, m);  m = lower median of the finite s_j, column by column.

    The lower median is the smaller one of two, so that of two workers the one with far too large numbers is found; of
    more workers, where fewer than half have such numbers. Because of the 1 no worker is refused whose
    tensor has just left zero. The host waits for no device. `scales`: [workers, ...], largest magnitudes (`scale`)."""
    known = scales.nan_to_num(nan=torch.inf, posinf=torch.inf)
    if len(known) == 2:  # one message and its receiver's own: a fifth of the kernels
        median = known.amin(0)
    else:  # infinity where a column has no finite number
        middle = ((known < torch.inf).sum(0, keepdim=True) - 1).clamp(min=0) // 2
        median = known.sort(0).values.gather(0, middle)[0]  # (columns,)
    # At most half of the type's largest number: the product doesn't overflow, so infinity is never sound.
    return known <= median.clamp(1, torch.finfo(scales.dtype).max / FACTOR / 2) * FACTOR


def scale(tensors: Sequence[Tensor]) -> Tensor:
    """Return max |x| over all elements, a float64 scalar on their device; NaN or infinity where an element is."""
    ends = torch.stack([end for t in tensors for end in _ends(t)])  # (2 tensors,)
    largest: Tensor = torch.linalg.vector_norm(ends, torch.inf, dtype=torch.float64)
    return largest


def stated(numbers: Sequence[int], tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a message's header, (numbers, bits of `scale(tensors)`), int64 [numbers + 1], so that the receiver needn't
    read the whole message to check it."""
    # Filled on the device: copying numbers there would make the host wait.
    rows = [torch.full((1,), number, dtype=torch.int64, device=device) for number in numbers]
    return torch.cat([*rows, scale(tensors).view(1).view(torch.int64)])


def scales_in(stated: Tensor) -> Tensor:
    """Return the scales [...] in headers [..., numbers + 1]: a view, float64."""
    return stated.view(torch.float64)[..., -1]


def judged(stated: Tensor) -> Tensor:
    """Return which messages are `sound`, bool [rows], by their headers [rows, numbers + 1]."""
    if stated.device.type != "cuda":
        return sound(scales_in(stated))
    sane = torch.empty(len(stated), dtype=torch.bool, device=stated.device)
    judge_(sane, stated)
    return sane


def extremes(tensor: Tensor) -> Tensor:
    """Return the smallest and largest element, float64 [2]; NaN where an element is, zeros of an empty tensor."""
    return torch.stack(_ends(tensor)).double()


def _ends(tensor: Tensor) -> tuple[Tensor, Tensor]:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not real.numel():
        zero = torch.zeros((), dtype=real.dtype, device=real.device)
        return zero, zero
    # NaN and infinity show in the extremes: one pass, no copy. Torch can't compare floats of one byte.
    smallest, largest = torch.aminmax(real.float() if real.element_size() == 1 else real)
    return smallest, largest


def _state(out: Tensor, header: Tensor, message: Tensor, step: int, elements: int) -> None:
    out.copy_(message)
    header.copy_(stated([step, elements], [message], message.device))


def _judge(sane: Tensor, stated: Tensor) -> None:
    sane.copy_(sound(scales_in(stated)))


state_ = operator("state_(Tensor(a!) out, Tensor(b!) header, Tensor message, int step, int elements) -> ()", _state)
judge_ = operator("judge_(Tensor(a!) sane, Tensor stated) -> ()", _judge)

# ---- norms -----------------------------------------------------------------------------------------------------------

PIECE = 2**16  # elements that a host makes float64 at once: they stay in its cache


@torch.no_grad()
def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """sum_k ||t_k||^2 in float64, complex numbers as pairs; a scalar on the tensors' device. One pass over each on a
    device, where `t.double().square().sum()` would write two copies in float64. On a host torch's own norm writes one
    such copy, which took six times as long: here pieces are converted one after the other."""
    rows = []
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        whole = real.device.type != "cpu" or real.dtype == torch.float64 or real.numel() <= PIECE
        if not whole and real.is_contiguous():
            # Freed memory returns to the system: fresh pages for each piece took twice as long.
            pieces = real.view(-1).split(PIECE)
            real = torch.stack([_norm(scratch(len(p), torch.float64, p.device).copy_(p)) for p in pieces])
        rows.append(_norm(real))
    return torch.stack(rows).square().sum()


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm


# ---- replicas that must be the same ----------------------------------------------------------------------------------

TOLERANCE = 1e-2
"""Allowed difference relative to a tensor's largest magnitude: rounding is far below, a wrong update above."""

Look = tuple[int | None, float, float, float]
"""Fingerprint, smallest, largest and mean element of a tensor, for comparison between workers."""
ABSENT: Look = None, torch.inf, torch.inf, torch.inf


def rates(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return the numbers of the optimizers' parameter groups, {"lr of group 0 of optimizer 0": text, ...}."""
    found = {}
    for place, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                row = value.tolist() if isinstance(value, Tensor) else value
                if isinstance(row, int | float | tuple | list) and key not in ("params", "param_names"):
                    found[f"{key} of group {number} of optimizer {place}"] = repr(row)
    return found


@torch.no_grad()
def bits(named: Mapping[str, Tensor]) -> str:
    """Return one digest of names, types, shapes and every bit of these tensors."""
    return digest({name: [t.dtype, list(t.shape), int(fingerprint(t))] for name, t in named.items()})


@torch.no_grad()
def looks(named: Mapping[str, Tensor]) -> dict[str, Look]:
    """Return {name: `Look` of the tensor}, for comparison between workers."""
    found: dict[str, Look] = {}
    for name, tensor in named.items():
        parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        wide = parts.float() if parts.element_size() == 1 else parts  # torch can't compare floats of one byte
        mean = wide.sum(dtype=torch.float64) / max(1, wide.numel())
        low, high = extremes(wide).tolist()
        found[name] = int(fingerprint(tensor)), low, high, float(mean)
    return found


@dataclass(frozen=True)
class Unequal:
    """A tensor that differs between two workers, each as (worker, its look; `ABSENT` where it has no such tensor)."""

    name: str
    usual: tuple[int, Look]
    other: tuple[int, Look]  # the worker whose tensor is unusual
    # The largest difference between their smallest, largest and mean elements, relative to the usual magnitude.
    deviation: float

    @property
    def absurd(self) -> bool:
        """Return whether the difference is NaN, infinity, or over `FACTOR` times the usual magnitude."""
        return not self.deviation < FACTOR

    def __str__(self) -> str:
        (one, a), (two, b) = self.usual, self.other
        return f"worker {two}'s {self.name} {_seen(b)}, worker {one}'s {_seen(a)}"


def unequal(rows: Mapping[int, Mapping[str, Look]]) -> list[Unequal]:
    """Return every tensor whose bits differ between workers, the largest difference first.

        deviation = max |p_i - p_j| / max(1e-3, s)    p: smallest, largest, mean; s: the usual largest magnitude

    The usual look is the most frequent one; if none is more frequent, the lower median by magnitude, so that of two
    workers the larger stands out. `rows`: {worker: its looks}."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    found = [_compared(name, {worker: row.get(name, ABSENT) for worker, row in rows.items()}) for name in names]
    return sorted((one for one in found if one is not None), key=lambda one: -one.deviation)


def _compared(name: str, looks: Mapping[int, Look]) -> Unequal | None:
    seen = Counter(look[0] for look in looks.values())
    if len(seen) == 1:
        return None
    most = max(seen.values())
    frequent = sorted((w for w, look in looks.items() if seen[look[0]] == most), key=lambda w: (_size(looks[w]), w))
    usual = frequent[(len(frequent) - 1) // 2]  # the lower median
    differ = [w for w, look in looks.items() if look[0] != looks[usual][0]]
    deviations = {w: _deviation(looks[w], looks[usual]) for w in differ}
    other = max(differ, key=lambda w: deviations[w])
    return Unequal(name, (usual, looks[usual]), (other, looks[other]), deviations[other])


def _size(look: Look) -> float:
    """Return the largest magnitude; infinity for NaN and for an absent tensor."""
    return max(abs(end) if end == end else torch.inf for end in look[1:3])


def _deviation(look: Look, usual: Look) -> float:
    pairs = [(a, b) for a, b in zip(look[1:], usual[1:], strict=True) if a != b and (a == a or b == b)]
    deviation = max((abs(a - b) for a, b in pairs), key=lambda d: (d != d, d), default=0.0)
    return deviation / max(1e-3, _size(usual)) if deviation < torch.inf else torch.inf


def _seen(look: Look) -> str:
    return f"is from {look[1]:.7g} to {look[2]:.7g} with mean {look[3]:.7g}" if look != ABSENT else "doesn't exist"
