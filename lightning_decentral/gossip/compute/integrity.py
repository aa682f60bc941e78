"""Integrity of messages: a header check (right round, right size), NaN and infinity checks, and what follows."""

import warnings
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_decentral.shared.compute.device import AsyncRead

# One would be too soon for a round that lands on a second stream, beside the step.
LAG = 2
"""Rounds until the host reads a device's verdict."""


class Verdicts:
    """Checks the rounds of one exchange.

    On the host the verdict falls at once. On a device a message is accepted or refused by the device itself, and the
    host hears of it `LAG` rounds later: nobody waits.

    Args:
        rank: of this worker, for the texts.
        codec: of the messages, for the texts; empty where they travel as they are.
    """

    def __init__(self, rank: int, codec: str = "") -> None:
        self.refused = 0
        self._rank = rank
        self._beyond = f", or more than {codec} can express," if codec else ""
        self._open: deque[tuple[int, Sequence[int], AsyncRead]] = deque()
        self._refused_in: dict[int, int] = {}

    def judge(
        self,
        round: int,
        mine: Tensor,
        headers: Mapping[int, Tensor],
        heard: Mapping[int, Sequence[Tensor]],
        message: Sequence[Tensor],
    ) -> dict[int, Tensor]:
        """{source: whether what it said is finite}; what isn't becomes this worker's own message. Errors as `add`.

        Args:
            mine: the `verdict` on this worker's own message.
        """
        healthy = {j: finite(tensors) for j, tensors in heard.items()}
        rows = {j: torch.cat([headers[j], healthy[j].long().view(1)]) for j in headers}
        self.add(round, {self._rank: mine, **rows})
        for j, tensors in heard.items():
            refuse(tensors, message, healthy[j])
        return healthy

    def add(self, round: int, rows: Mapping[int, Tensor]) -> None:
        """Judge messages of a round by a row (round, elements, finite) of integers for this worker and each it heard.

        Raises:
            RuntimeError: a source is in another round, or its model has another size.
            FloatingPointError: this worker's own message is not finite.
        """
        workers, flags = tuple(rows), torch.stack(list(rows.values()))
        if not flags.is_cuda:
            self._judge(workers, flags)
            return
        while self._open and self._open[0][0] <= round - LAG:
            _, workers_then, flags_then = self._open.popleft()
            self._judge(workers_then, flags_then.read())
        # Copied to pinned memory, and read long after the device passed the verdict.
        self._open.append((round, workers, AsyncRead(flags)))

    def _judge(self, workers: Sequence[int], flags: Tensor) -> None:
        rows = dict(zip(workers, flags.tolist(), strict=True))
        step, elements, finite = rows.pop(self._rank)
        for source, (other_step, other_elements, healthy) in rows.items():
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
            if not healthy:
                self._count(source, step)
        if not finite:
            raise FloatingPointError(
                f"worker {self._rank}: its parameters hold NaN or infinity{self._beyond} in round {step}; its "
                "neighbours refused them. Lower the learning rate, clip gradients (gradient_clip_val) or find the "
                "operation with detect_anomaly=True"
            )

    def _count(self, source: int, step: int) -> None:
        # A source's refused buckets of one round are one refused message.
        if self._refused_in.get(source) == step:
            return
        self._refused_in[source] = step
        self.refused += 1
        warnings.warn(
            f"worker {self._rank} refused a message from worker {source} in round {step}: "
            f"it holds NaN or infinity ({self.refused} refused so far)",
            stacklevel=2,
        )


def refuse(heard: Sequence[Tensor], own: Sequence[Tensor], healthy: Tensor) -> None:
    """heard <- own unless `healthy`, in place."""
    # A device decides by itself: to ask it would make the host wait.
    if not healthy.is_cuda and bool(healthy):
        return
    for tensor, mine in zip(heard, own, strict=True):
        # Overwritten: NaN times a weight of zero would still be NaN.
        torch.where(healthy, tensor, mine, out=tensor)


def verdict(step: int, elements: int, message: Sequence[Tensor]) -> Tensor:
    """(round, elements of all buckets, whether the message is finite), int64 [3]; the first two are its header."""
    device = message[0].device
    # filled on the device: copying numbers there would make the host wait
    header = [torch.full((), n, dtype=torch.int64, device=device) for n in (step, elements)]
    return torch.stack([*header, finite(message).long()])


def finite(tensors: Sequence[Tensor]) -> Tensor:
    """A scalar: no element is NaN or infinite."""
    real = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    # The extremes carry both: one pass each and no copy.
    return torch.stack([torch.isfinite(extreme) for t in real for extreme in torch.aminmax(t)]).all()
