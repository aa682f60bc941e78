"""Ends of a link: the interface to encode, decode and forget what travels on it.

A coder turns messages, of one bucket each, into payloads and back. `Coder` sends them as they are;
`error_feedback.Coded` holds a codec's error-feedback state.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine, Rule
from lightning_decentral.gossip.plan.planned_traffic import Cliques, partitions
from lightning_decentral.gossip.plan.topology.topology import Topology
from lightning_decentral.gossip.plan.weights import Weights
from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.compute.device import AsyncRead

Buffers = list[Tensor]  # Tensors that a payload consists of.


class CodecError:
    """||message - decoded|| / ||message - estimate|| of measured rounds; `report` gets it and its round."""

    def __init__(self, report: Callable[[float, int], None] = lambda lost, step: None) -> None:
        self._report, self._sums = report, list[Tensor]()
        self._last: float | None = None
        self._open: tuple[AsyncRead, int] | None = None

    def add(self, error: Tensor, gap: Tensor) -> None:
        """Add the squares of one of a round's buckets."""
        self._sums.append(torch.stack([error, gap]))  # (2,)

    def complete(self, step: int) -> None:
        """All of the round's are there."""
        self._read()
        self._open, self._sums = (AsyncRead(torch.stack(self._sums).sum(0)), step), []
        # A device's are read when somebody asks, or at the next measurement.
        if self._open[0].on_host:
            self._read()

    def value(self) -> float | None:
        """Relative error as last measured; None before."""
        self._read()
        return self._last

    def _read(self) -> None:
        if self._open is not None:
            (sums, step), self._open = self._open, None
            error, gap = sums.read().tolist()  # squares
            if gap > 0:  # else nothing new was to be sent, or NaN
                self._last = (error / gap) ** 0.5
                self._report(self._last, step)


class Memory(ABC):
    """State of an exchange's coder, as others see and save it."""

    encodes: ClassVar[bool] = True  # True where messages travel otherwise than as they are.

    bytes: int = 0  # Bytes of one message of all admitted buckets on the wire, without headers.

    lost = CodecError()  # one that nobody measures, where nothing is encoded

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The codec, and what both ends of a link remember of each other."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. ValueError: it was taken under another codec."""


class Coder(Memory):
    """A worker's ends of all its links; here the buckets travel as they are, and no copy is made.

    `place` is that of a message's bucket among those admitted.
    """

    encodes = False

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def admit(self, references: Sequence[Tensor], combine: Combine) -> None:
        """Add buckets. `references` are as long, and where there are estimates equal on all workers; the rule sets how
        much of a message is not encoded."""
        self.bytes += sum(r.numel() * r.element_size() for r in references)

    def encode(self, message: Tensor, targets: Mapping[int, float], step: int, place: int) -> dict[int, Buffers]:
        """{target: what it gets}, of the pool where it isn't the message itself; targets of one audience share it.

        The message is overwritten by what those targets decode: sum_k w_ki decoded_ik / sum_k w_ki where they differ.
        """
        return {target: [message] for target in targets}

    def buffers(self, sources: Iterable[int], message: Tensor, place: int) -> dict[int, Buffers]:
        """{source: where what it sends is received}"""
        return {j: [self._pool.take(message)] for j in sources}

    def decode(self, received: Mapping[int, Buffers], message: Tensor, place: int) -> dict[int, Tensor]:
        """{source: the bucket that it meant}; what was received is used up."""
        return {j: whole for j, (whole,) in received.items()}  # (elements,) each: received as it is

    def remember(self, decoded: Mapping[int, Tensor], healthy: Iterable[Tensor], place: int) -> None:
        """Keep each source's bucket as the estimate of it if its flag in `healthy` is set, where there are any."""
        return

    def state_dict(self) -> dict[str, Any]:
        return {"codec": "Plain()"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_codec(state, "Plain()")


def cliques_of(codec: Codec, combine: Rule, topology: Topology, weights: Weights, size: int) -> Cliques:
    """The way in which cliques exchange.

    Owners of parts add up codes where in each step with messages all workers receive all with equal weights, and there
    are more than two; these are codes of differences: what their mean loses, encoded once more, is sent later
    (`shared.compute.codec.coded_parts`). Other codes go from each worker to all of its receivers.
    """
    if not codec.encodes:
        return Cliques.RING
    cuts = not codec.remembers and combine.form.differences and combine.form.copies == 1
    steps = partitions(topology, weights, size) if cuts else None
    together = steps is not None and all(step is not None and len(step) in (1, size) for step in steps)
    return Cliques.OWNERS if together else Cliques.TOLD


class Everyone(Memory):
    """The coders of all workers, as one."""

    def __init__(self, codec: Codec, coders: Sequence[Memory]) -> None:
        self._codec, self._coders = repr(codec), coders

    def state_dict(self) -> dict[str, Any]:
        return {"codec": self._codec, "workers": [worker.state_dict() for worker in self._coders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_codec(state, self._codec)
        for worker, own in zip(self._coders, state["workers"], strict=True):
            worker.load_state_dict(own)


def check_codec(state: Mapping[str, Any], codec: str) -> None:
    """ValueError unless the state was saved under this codec."""
    if state["codec"] != codec:
        raise ValueError(
            f"the checkpoint's messages were encoded by {state['codec']}, this run has {codec}: resume with the same "
            "codec, or delete the checkpoint's .workers folder to start from the mean"
        )
