"""Encoding at both ends of a link: the interface of coders, which turn a bucket's message into a payload and back.

`Coder` sends messages unencoded; `error_feedback.Coded` keeps a codec's error-feedback state."""

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
    """Measures ||message - decoded|| / ||message - estimate||; calls `report` with that codec error and its round."""

    def __init__(self, report: Callable[[float, int], None] = lambda lost, step: None) -> None:
        self._report, self._sums = report, list[Tensor]()
        self._last: float | None = None
        self._open: tuple[AsyncRead, int] | None = None

    def add(self, error: Tensor, gap: Tensor) -> None:
        """Add the squared error and squared gap of one bucket of the round."""
        self._sums.append(torch.stack([error, gap]))  # (2,)

    def complete(self, step: int) -> None:
        """End a round: all of its buckets have been added."""
        self._read()
        self._open, self._sums = (AsyncRead(torch.stack(self._sums).sum(0)), step), []
        # Sums on a GPU are read by `value`, or at the next measurement.
        if self._open[0].on_host:
            self._read()

    def value(self) -> float | None:
        """Relative codec error as last measured; None before the first measurement."""
        self._read()
        return self._last

    def _read(self) -> None:
        if self._open is not None:
            (sums, step), self._open = self._open, None
            error, gap = sums.read().tolist()  # squares
            if gap > 0:  # otherwise there was nothing new to send, or NaN
                self._last = (error / gap) ** 0.5
                self._report(self._last, step)


class Memory(ABC):
    """Interface to the state of an exchange's coder, for monitors and checkpoints."""

    encodes: ClassVar[bool] = True  # True where messages are encoded.
    bytes: int = 0  # Bytes of one message of all admitted buckets on the wire, without headers.
    lost = CodecError()  # stays empty without a codec

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """State to save: the codec, and the estimates that both ends of a link keep."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. ValueError: the state was saved under another codec."""


class Coder(Memory):
    """Encodes and decodes messages at one worker's ends of its links; this base sends buckets unencoded, uncopied.
    `place` is the index of a message's bucket among the admitted buckets."""

    encodes = False

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def admit(self, references: Sequence[Tensor], combine: Combine) -> None:
        """Add buckets. `references` are of their sizes; a codec's estimates start there, so they are then equal on all
        workers. The rule sets how many elements of a message are not encoded."""
        self.bytes += sum(r.numel() * r.element_size() for r in references)

    def encode(self, message: Tensor, targets: Mapping[int, float], step: int, place: int) -> dict[int, Buffers]:
        """Encode to {target: payload}: buffers of the pool, or the message; targets of one audience share one.

        message <- what the targets decode: sum_k w_ki decoded_ik / sum_k w_ki where the payloads differ."""
        return {target: [message] for target in targets}

    def buffers(self, sources: Iterable[int], message: Tensor, place: int) -> dict[int, Buffers]:
        """Take receive buffers for the payload of each source."""
        return {j: [self._pool.take(message)] for j in sources}

    def decode(self, received: Mapping[int, Buffers], message: Tensor, place: int) -> dict[int, Tensor]:
        """Decode to {source: its bucket}; the received payloads are consumed."""
        return {j: whole for j, (whole,) in received.items()}  # (elements,) each: received unencoded

    def remember(self, decoded: Mapping[int, Tensor], healthy: Iterable[Tensor], place: int) -> None:
        """Keep each source's decoded bucket as the new estimate if its flag in `healthy` is set."""
        return

    def state_dict(self) -> dict[str, Any]:
        return {"codec": "Plain()"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_codec(state, "Plain()")


def cliques_of(codec: Codec, combine: Rule, topology: Topology, weights: Weights, size: int) -> Cliques:
    """Choose how workers of a clique exchange messages under this codec and rule. Each worker adds up the codes of the
    part that it owns where every step with messages averages all workers, more than two, with equal weights, and
    messages are differences: the compression error of their mean is sent later (`shared.compute.codec.coded_parts`).
    Other codes go from each worker to all of its receivers."""
    if not codec.encodes:
        return Cliques.RING
    cuts = not codec.remembers and combine.form.differences and combine.form.copies == 1
    steps = partitions(topology, weights, size) if cuts else None
    together = steps is not None and all(step is not None and len(step) in (1, size) for step in steps)
    return Cliques.OWNERS if together else Cliques.PEERS


class Everyone(Memory):
    """State of the coders of all workers, for a simulation."""

    def __init__(self, codec: Codec, coders: Sequence[Memory]) -> None:
        self._codec, self._coders = repr(codec), coders

    def state_dict(self) -> dict[str, Any]:
        return {"codec": self._codec, "workers": [worker.state_dict() for worker in self._coders]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_codec(state, self._codec)
        for worker, own in zip(self._coders, state["workers"], strict=True):
            worker.load_state_dict(own)


def check_codec(state: Mapping[str, Any], codec: str) -> None:
    """Raise ValueError unless the state was saved under this codec."""
    if state["codec"] != codec:
        raise ValueError(
            f"the checkpoint's messages were encoded by {state['codec']}, this run has {codec}: resume with the "
            "checkpoint's codec, or delete its .workers folder to start from the workers' mean"
        )
