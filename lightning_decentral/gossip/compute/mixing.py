"""Mixing of received messages: checks that they are sound, their weighted mean, or the correction of x by that mean.

    Verdicts           right round, right size; NaN, infinity and far too large numbers are refused and counted
    mix                mixed <- w_ii sent_i + sum_j w_ij received_j
    difference_        out <- sum_j w_j (received_j - sent)             2 passes, and one for each j
    correct_           x <- x + rate sum_j w_j (received_j - sent)      3 passes, and one for each j
    correct_and_state_                                                  the same, a copy of x and its header: one more

The last three sum over those j whose message is sound: the weight of the others stays with the receiver. Equal messages
change no bit, in any type: each difference is exactly zero. Sums of numbers with fewer bits are computed in float32 and
rounded once."""

import warnings
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.shared.compute.device import AsyncRead
from lightning_decentral.shared.compute.fused import operator
from lightning_decentral.shared.compute.health import FACTOR, scales_in, sound, state_

# A lag of 1 would be too short for a round that is mixed on a second stream, during the step.
LAG = 2  # Rounds until the host reads a device's verdict.
_ABSURD = f"numbers over {FACTOR:.0e} times its neighbours'"


class Sick(FloatingPointError):
    """Raised when this worker's own message contained NaN, infinity or far too large numbers.

    Attributes:
        sent: replacement of the message (`Recovery.stand_in` of the mean of its neighbours' sound messages).
        mixed: the round's mixture with `sent`; not finite if no sound message was received.
        round: round in which the message was sent; a device finds out `LAG` rounds later.
        late: whether the message of the round that is mixed now was sound, and so is part of `mixed`."""

    def __init__(self, complaint: str, sent: Tensor, mixed: Tensor, round: int, late: bool = False) -> None:
        super().__init__(complaint)
        self.sent, self.mixed, self.round, self.late = sent, mixed, round, late

    def state_dict(self) -> dict[str, Any]:
        return {"complaint": str(self), **vars(self), "sent": [self.sent], "mixed": [self.mixed]}


class Verdicts:
    """Checks the messages of one exchange, round by round. On the CPU a message is checked at once. On a GPU the device
    itself accepts or refuses a message, and the host reads the verdict `LAG` rounds later, without waiting. `codec` is
    named in errors; empty where messages aren't encoded."""

    def __init__(self, rank: int, codec: str = "") -> None:
        self.refused = 0
        self._rank = rank
        self._beyond = f", or more than {codec} can express," if codec else ""
        self.complaint = ""
        self._sick_round = 0
        self._open: deque[tuple[int, Sequence[int], AsyncRead]] = deque()
        self._refused_in: dict[int, int] = {}

    def judge(self, round: int, workers: Sequence[int], headers: Tensor, sane: Tensor) -> None:
        """Check a round's headers; `complaint` then tells why this worker's own message isn't sound, as far as known.
        RuntimeError: a source is in another round, or its model has another size.

        `headers` has (round, elements of all buckets, scale) of each worker, as `health.stated` makes them; `sane`
        tells whether each one's message is sound next to the others: `health.sound(scales_in(headers))`."""
        if headers.device.type != "cuda":
            self._judge(workers, headers, sane)
            return
        while self._open and self._open[0][0] <= round - LAG:
            _, workers_then, arrived = self._open.popleft()
            then = arrived.read()  # int64 (workers, 3), on the host
            self._judge(workers_then, then, sound(scales_in(then)))  # the device's verdict, made by comparisons
        # Copied to pinned memory, and read long after the device passed the verdict.
        self._open.append((round, workers, AsyncRead(headers)))

    def refuse_own(self, sent: Tensor, mixed: Tensor, late: bool = False) -> None:
        """Raise `Sick` after mixing, with the neighbours' messages: this worker's own message wasn't sound."""
        complaint, self.complaint = self.complaint, ""
        raise Sick(complaint, sent, mixed, self._sick_round, late)

    def _judge(self, workers: Sequence[int], headers: Tensor, sane: Tensor) -> None:
        finite = headers.view(torch.float64)[:, 2] < torch.inf  # (workers,)
        numbers = zip(headers[:, :2].tolist(), finite.tolist(), sane.tolist(), strict=True)
        rows = {worker: (*row, *healthy) for worker, (row, *healthy) in zip(workers, numbers, strict=True)}
        step, elements, own_finite, own_sane = rows.pop(self._rank)
        for source, (other_step, other_elements, *healthy) in rows.items():
            if other_step != step:
                raise RuntimeError(
                    f"worker {self._rank} is in round {step} but received round {other_step} from worker {source}: "
                    "every worker must take the same number of optimizer steps"
                )
            if other_elements != elements:
                raise RuntimeError(
                    f"worker {self._rank} mixes {elements} elements, but worker {source} sent {other_elements}: "
                    "every worker must train the same parameters in the same step"
                )
            # A source's refused buckets of one round are one refused message.
            if not all(healthy) and self._refused_in.get(source) != step:
                self._refused_in[source] = step
                self.refused += 1
                warnings.warn(
                    f"worker {self._rank} refused a message from worker {source} in round {step}, which contains "
                    f"{_ABSURD if healthy[0] else 'NaN or infinity'} ({self.refused} refused so far)",
                    stacklevel=2,
                )
        if not own_sane:
            held = _ABSURD if own_finite else f"NaN or infinity{self._beyond}"
            self._sick_round = step
            self.complaint = (
                f"worker {self._rank}: its parameters hold {held} in round {step}; its neighbours refused them. Lower "
                "the learning rate, clip gradients (gradient_clip_val) or find the operation with detect_anomaly=True"
            )


def refuse(received: Tensor, instead: Tensor, healthy: Tensor) -> None:
    """received <- instead, in place, unless `healthy` (bool []); a healthy message costs no pass on the CPU."""
    # A GPU decides without the host, which would have to wait for the verdict.
    if healthy.device.type != "cuda" and bool(healthy):
        return
    # Overwritten: NaN times a weight of zero would still be NaN.
    torch.where(healthy, received, instead, out=received)


ROUNDING = 1e-12  # Rounding error of a sum of weights.


def difference(sent: Tensor, received: Sequence[Tensor], weights: Sequence[float], sane: Tensor) -> Tensor:
    """sum_j w_j (received_j - sent) over the sound j, in float32 at least. `sane`: bool [1 + sources], for this
    worker's own message, then for each received message."""
    out = torch.empty_like(sent, dtype=torch.promote_types(sent.dtype, torch.float32))  # (elements,)
    difference_(out, sent, received, weights, sane)
    return out


def apply_difference(x: Tensor, d: Tensor, rate: float) -> None:
    """x <- x + rate d, with the same bits as `correct_`."""
    x.add_(d if rate == 1 else d * rate)  # rounded once, to the type of x


def mix(own: Tensor, received: Sequence[Tensor], weights: Sequence[float]) -> None:
    """received[0] <- w_0 own + sum_k w_k received[k - 1]

    Each step moves the mean so far towards the next message: m <- m + w_k / (w_0 + ... + w_k) (received_k - m).
    So equal messages give exactly their own bits in any type, where products with 1/3 or 1/5 would each be rounded, and
    a worker at consensus would move. Weights that don't sum to one (columns, as push-sum's) multiply the result. They
    are of `own` and each of `received`, none below 0."""
    total, sums = received[0], list(accumulate(weights))
    mean = own
    for tensor, weight, so_far in zip(received, weights[1:], sums[1:], strict=True):
        mean = torch.lerp(mean, tensor, weight / so_far if so_far else 0.0, out=total)  # (elements,), in received[0]
    if abs(sums[-1] - 1) > ROUNDING:
        total.mul_(sums[-1])  # weights of a column need not sum to one


def _difference(out: Tensor, sent: Tensor, received: Sequence[Tensor], weights: Sequence[float], sane: Tensor) -> None:
    for place, (tensor, weight) in enumerate(zip(received, weights, strict=True), 1):
        # A GPU decides without the host, which would have to wait for the verdict.
        part = torch.where(sane[place], tensor, sent).to(out.dtype).sub_(sent)
        part = part if weight == 1 else part.mul_(weight)
        if place == 1:
            out.copy_(part)
        else:
            out.add_(part)


def _correct(x: Tensor, *terms_and_rate: Any) -> None:
    *terms, rate = terms_and_rate
    apply_difference(x, difference(*terms), rate)


def _correct_and_state(out: Tensor, header: Tensor, x: Tensor, *correction: Any) -> None:
    *terms_and_rate, step, elements = correction
    correct_(x, *terms_and_rate)
    state_(out, header, x, step, elements)


_TERMS = "Tensor sent, Tensor[] received, float[] weights, Tensor sane"
correct_ = operator(f"correct_(Tensor(a!) x, {_TERMS}, float rate) -> ()", _correct)
difference_ = operator(f"difference_(Tensor(a!) out, {_TERMS}) -> ()", _difference)
correct_and_state_ = operator(
    f"correct_and_state_(Tensor(a!) out, Tensor(b!) header, Tensor(c!) x, {_TERMS}, float rate, int step, "
    "int elements) -> ()",
    _correct_and_state,
)
