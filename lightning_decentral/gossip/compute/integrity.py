"""Integrity of messages: a header check (right round, right size), NaN, infinity and absurd numbers, what follows."""

import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.shared.compute.device import AsyncRead
from lightning_decentral.shared.compute.health import FACTOR, scales_in, sound

# One would be too soon for a round that lands on a second stream, during the step.
LAG = 2
"""Rounds until the host reads a device's verdict."""


_ABSURD = f"numbers over {FACTOR:.0e} times its neighbours'"


class Sick(FloatingPointError):
    """This worker's own message was not sound.

    Attributes:
        sent: what counts in its place (`Recovery.stand_in` of the mean of its neighbours' sound messages).
        mixed: the round's mixture with it; not finite where no sound message was received.
        round: in which it left; on a device it is known `LAG` rounds later.
        late: whether the message of the round that lands was sound: it is in the mixture.
    """

    def __init__(
        self, complaint: str, sent: Sequence[Tensor], mixed: Sequence[Tensor], round: int, late: bool = False
    ) -> None:
        super().__init__(complaint)
        self.sent, self.mixed, self.round, self.late = list(sent), list(mixed), round, late

    def state_dict(self) -> dict[str, Any]:
        return {"complaint": str(self), **vars(self)}


class Verdicts:
    """Checks the rounds of one exchange.

    On the host the verdict falls at once. On a device a message is accepted or refused by the device itself, and the
    host reads it `LAG` rounds later: nobody waits.

    Args:
        rank: of this worker, for the texts.
        codec: of the messages, for the texts; empty where they travel as they are.
    """

    def __init__(self, rank: int, codec: str = "") -> None:
        self.refused = 0
        self._rank = rank
        self._beyond = f", or more than {codec} can express," if codec else ""
        self.complaint = ""
        self._sick_round = 0
        self._open: deque[tuple[int, Sequence[int], AsyncRead]] = deque()
        self._refused_in: dict[int, int] = {}

    def hear(self, round: int, workers: Sequence[int], headers: Tensor, sane: Tensor) -> None:
        """Judge a round's headers; `complaint` becomes why this worker's own message isn't sound, as far as known.

        Args:
            headers: (round, elements of all buckets, scale) as `health.stated` makes them, of each of `workers`.
            sane: whether each one's message is sound compared with the others', `health.sound(scales_in(headers))`.

        Raises:
            RuntimeError: a source is in another round, or its model has another size.
        """
        if headers.device.type != "cuda":
            self._judge(workers, headers, sane)
            return
        while self._open and self._open[0][0] <= round - LAG:
            _, workers_then, arrived = self._open.popleft()
            then = arrived.read()
            self._judge(workers_then, then, sound(scales_in(then)))  # the device's verdict: it's of comparisons
        # Copied to pinned memory, and read long after the device passed the verdict.
        self._open.append((round, workers, AsyncRead(headers)))

    def refuse_own(self, sent: Sequence[Tensor], mixed: Sequence[Tensor], late: bool = False) -> None:
        """Raise `Sick` after mixing, with what the neighbours sent, where this worker's own message wasn't sound."""
        complaint, self.complaint = self.complaint, ""
        if complaint:
            raise Sick(complaint, sent, mixed, self._sick_round, late)

    def _judge(self, workers: Sequence[int], headers: Tensor, sane: Tensor) -> None:
        finite = headers.view(torch.float64)[:, 2] < torch.inf
        said = zip(headers[:, :2].tolist(), finite.tolist(), sane.tolist(), strict=True)
        rows = {worker: (*numbers, *healthy) for worker, (numbers, *healthy) in zip(workers, said, strict=True)}
        step, elements, own_finite, own_sane = rows.pop(self._rank)
        for source, (other_step, other_elements, *healthy) in rows.items():
            if other_step != step:
                raise RuntimeError(
                    f"worker {self._rank} is in round {step} but heard round {other_step} from worker {source}: "
                    "every worker must take the same number of optimizer steps"
                )
            if other_elements != elements:
                raise RuntimeError(
                    f"worker {self._rank} mixes {elements} elements but worker {source} sent {other_elements}: "
                    "every worker must train the same parameters in the same step"
                )
            if not all(healthy):
                self._count(source, step, _ABSURD if healthy[0] else "NaN or infinity")
        if not own_sane:
            held = _ABSURD if own_finite else f"NaN or infinity{self._beyond}"
            self._sick_round = step
            self.complaint = (
                f"worker {self._rank}: its parameters hold {held} in round {step}; its "
                "neighbours refused them. Lower the learning rate, clip gradients (gradient_clip_val) or find the "
                "operation with detect_anomaly=True"
            )

    def _count(self, source: int, step: int, held: str) -> None:
        # A source's refused buckets of one round are one refused message.
        if self._refused_in.get(source) == step:
            return
        self._refused_in[source] = step
        self.refused += 1
        warnings.warn(
            f"worker {self._rank} refused a message from worker {source} in round {step}: "
            f"it holds {held} ({self.refused} refused so far)",
            stacklevel=2,
        )


def refuse(heard: Sequence[Tensor], instead: Sequence[Tensor], healthy: Tensor) -> None:
    """heard <- instead unless `healthy`, in place; what is healthy costs no pass on the host."""
    # A device decides by itself: to ask it would make the host wait.
    if healthy.device.type != "cuda" and bool(healthy):
        return
    # Overwritten: NaN times a weight of zero would still be NaN.
    for tensor, other in zip(heard, instead, strict=True):
        torch.where(healthy, tensor, other, out=tensor)
