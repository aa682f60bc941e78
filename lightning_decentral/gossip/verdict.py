"""What a worker thinks of the messages of a round: right round, finite numbers; and what follows."""

import warnings
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_decentral.arriving import Arriving
from lightning_decentral.gossip.coding import Coding

LAG = 2
"""Rounds until the host reads a device's verdict."""


class Verdicts:
    """Checks the rounds of one exchange.

    On the host the verdict falls at once. On a device it is copied to pinned memory and read two rounds later, long
    after the device passed it: nobody waits for it, and a message is accepted or refused on the device itself. One
    round later would be too soon for a round that lands on a second stream, beside the step.

    Args:
        rank: of this worker, for the texts.
        codec: of the messages, for the texts.
    """

    def __init__(self, rank: int, codec: Coding | None = None) -> None:
        self.refused = 0
        self._rank = rank
        self._beyond = f", or more than {codec} can express," if codec is not None else ""
        self._open: deque[tuple[Sequence[int], Arriving]] = deque()

    def add(self, rows: Mapping[int, Tensor]) -> None:
        """Judge one round by a row (round, elements, finite) of integers for this worker and each that it heard.

        Raises:
            RuntimeError: a source is in another round, or its model has another size.
            FloatingPointError: this worker's own message is not finite.
        """
        workers, flags = tuple(rows), Arriving(torch.stack(list(rows.values())))
        if flags.on_host:
            self._judge(workers, flags)
            return
        self._open.append((workers, flags))
        if len(self._open) > LAG:
            self._judge(*self._open.popleft())

    def _judge(self, workers: Sequence[int], flags: Arriving) -> None:
        rows = dict(zip(workers, flags.read().tolist(), strict=True))
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
                self.refused += 1
                warnings.warn(
                    f"worker {self._rank} refused a message from worker {source} in round {step}: "
                    f"it holds NaN or infinity ({self.refused} refused so far)",
                    stacklevel=2,
                )
        if not finite:
            raise FloatingPointError(
                f"worker {self._rank}: its parameters hold NaN or infinity{self._beyond} in round {step}; its "
                "neighbours refused them. Lower the learning rate, clip gradients (gradient_clip_val) or find the "
                "operation with detect_anomaly=True"
            )


def refuse(heard: Sequence[Tensor], own: Sequence[Tensor], healthy: Tensor) -> None:
    """heard <- own unless `healthy`, in place: NaN times a weight of zero would still be NaN.

    A device decides by itself; on the host a healthy message is left alone.
    """
    if not healthy.is_cuda and bool(healthy):
        return
    for tensor, mine in zip(heard, own, strict=True):
        torch.where(healthy, tensor, mine, out=tensor)
