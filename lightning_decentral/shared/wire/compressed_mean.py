"""Compressed all-reduce of gradients: codes are reduced by owners of parts and gathered, error feedback on both sides.

    x_i = g_i + e_i            q_i = Q(x_i)    e_i <- x_i - q_i      worker i, on the parts that others own
    s = (1/n) sum_i q_i + f    r = Q(s)        f <- s - r            the owner of a part, on that part
    g = r                                                            every worker, bit for bit the same

The compression error of one step is added in the next, on the way to the owner (e) and on the way back (f), so that
nothing is lost for good (`residuals`). A worker sends 2 (n - 1) / n times the bytes of its codes, as an all-reduce
does with numbers.

Source: error feedback on both sides, Tang et al. 1905.05957 (DoubleSqueeze); by parts with owners, Tang et al.
2102.02888 (1-bit Adam)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.codec.codec import Codec, Frame
from lightning_decentral.shared.compute.codec.coded_parts import CodedParts, drop_if_sick
from lightning_decentral.shared.compute.device import CallQueue, call_queue
from lightning_decentral.shared.wire.averaging.residuals import Keys, Residual, Residuals, Row
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Message, Transport


def _nothing(*_: object, **__: object) -> None:
    """Do nothing, where there is no compression error."""


class FlatMean(ABC):
    """Averages flat tensors over workers; the base class keeps no state between means.

    Attributes:
        sent_bytes: bytes that this worker has sent so far (its part of a collective).
        lay, put_back, guard, updated, forget: methods of `Residuals`, where means are compressed.
    """

    sent_bytes: int = 0
    lay: Callable[[Sequence[Row]], None] = staticmethod(_nothing)
    put_back: Callable[[Tensor, int, Collection[int]], None] = staticmethod(_nothing)
    guard: Callable[..., None] = staticmethod(_nothing)
    updated: Callable[[Keys, bool], None] = staticmethod(_nothing)
    forget: Callable[[], None] = staticmethod(_nothing)

    @abstractmethod
    def start(self, flat: Tensor, place: int) -> Pending:
        """Start averaging `flat` in place; it is the mean after the wait. Every worker calls this in the same order.
        `place`: the tensor's index among those averaged in a step, by which compression errors are kept."""

    def state_dict(self, untaken: Collection[int] = ()) -> dict[str, Any]:
        """Return the state that exact resuming needs, as tensors and primitives. `untaken`: keys of tensors whose mean
        no update has used."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        return


@dataclass
class ExactMean(FlatMean):
    """Averages exactly: flat <- (1/n) sum_i flat_i by all-reduce."""

    over: Transport
    sent_bytes: int = 0

    def start(self, flat: Tensor, place: int) -> Pending:
        self.sent_bytes += 2 * (self.over.size - 1) * flat.numel() * flat.element_size() // self.over.size
        return self.total(flat.div_(self.over.size))

    def total(self, flat: Tensor) -> Pending:
        """Start summing `flat` over the workers, in place; it is the sum after the wait."""
        return self.over.all_reduce(flat)


def mean_by(codec: Codec, group: Callable[[], Transport], device: torch.device) -> FlatMean:
    """Return a mean that sends a codec's payloads; `group` makes a new group of the workers. Collective. ValueError for
    a codec that keeps estimates of its own."""
    refuse_estimates(codec)
    if not codec.encodes:
        return ExactMean(group())
    return CompressedMean(codec, group(), group(), device)


def refuse_estimates(codec: Codec) -> None:
    """Raise ValueError for a codec that encodes differences to an estimate."""
    if codec.remembers:
        raise ValueError(
            f"{codec} encodes differences to what neighbours know; an average of gradients has error feedback of its "
            "own: give the inner codec by itself"
        )


class CompressedMean(FlatMean):
    """Averages flat tensors by compressed all-reduce, concurrently with training: on host threads or CUDA streams.

    NaN or infinity on one worker (a loss scaler that searches) reaches all. Its residuals are dropped; where such
    updates are skipped, `residuals` restores the previous ones.

    Codes go to the parts' owners over the group `over`, codes of means over `back`; both groups carry nothing else."""

    def __init__(self, codec: Codec, over: Transport, back: Transport, device: torch.device) -> None:
        self.codec, self.over, self.back = codec, over, back
        # Two queues, as a bucket is encoded while the previous one's codes are still on their way.
        self.leaving: CallQueue = call_queue(device, "codes leave")
        self.owning: CallQueue = call_queue(device, "codes are reduced")
        self.flight: type[InFlight] = InFlight  # average and encode the own part, between the two transfers
        self.pool = Pool()
        self.parts = CodedParts(codec, over.rank, over.size, self.pool)
        self.sent_bytes = 0
        self.residuals = Residuals(self.parts)
        kept = self.residuals
        self.lay, self.put_back = kept.lay, kept.put_back
        self.guard, self.updated, self.forget = kept.guard, kept.updated, kept.forget

    def start(self, flat: Tensor, place: int) -> Pending:
        """Start the mean; until it arrives it holds a copy of `flat`, a worker's part, and its codes (half or less)."""
        self.residuals.settle()
        part = self.flight(self, flat, place, self.residuals.at(place, flat))
        part.left = self.leaving.send(part.leave)
        part.reduced = self.owning.send(part.reduce)
        return part

    def state_dict(self, untaken: Collection[int] = ()) -> dict[str, Any]:
        return {"codec": repr(self.codec), **self.residuals.state_dict(untaken)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the residuals are dropped under another codec."""
        self.residuals.forget()
        if state.get("codec") == repr(self.codec):
            self.residuals.load_state_dict(state)


@dataclass
class InFlight:
    """One tensor whose mean is in flight."""

    mean: CompressedMean
    flat: Tensor  # (elements,)
    place: int
    residual: Residual
    left: Any = None  # the call that encodes and sends
    reduced: Any = None  # the call that reduces the own part
    flats: list[Tensor] = field(default_factory=list)  # every worker's part of `flat`, views
    sent: list[Pending] = field(default_factory=list)
    # {worker: (messages under way, codes that they fill)}
    received: dict[int, tuple[list[Pending], list[Tensor]]] = field(default_factory=dict)
    used: list[Tensor] = field(default_factory=list)  # buffers of the pool
    round: int = 0

    def leave(self) -> None:
        """Encode the parts that others own, and send the codes to them."""
        parts = self.mean.parts
        self.round, self.residual.rounds = self.residual.rounds, self.residual.rounds + 1
        x = self.residual.add(self.flat)  # (elements,)
        self.flats = parts.views(self.flat)
        mine, kept = self.flats[parts.rank], parts.of(parts.rank, x)
        mine.copy_(kept)  # (elements of the own part,)
        kept.sub_(mine)  # the own part isn't encoded: no rounding error
        codes = parts.to_owners(x, self.mean.codec.residual, self.round, self.place)
        drop_if_sick(x)
        self._exchange(self.mean.over, codes, parts.from_others(self.flat))

    def reduce(self) -> None:
        """Average this worker's own part, encode the mean and send it to all."""
        self.left.result()
        parts, back, mine = self.mean.parts, self.mean.back, self.flats[self.mean.parts.rank]
        decoded = self.mean.pool.take(mine)  # codes of the own part, from one worker after another
        mine.mul_(parts.share)
        for arriving, codes in self.received.values():
            for pending in arriving:
                pending.wait()
            parts.codec.decode(codes, decoded, Frame())
            mine.add_(decoded, alpha=parts.share)
        for pending in self.sent:  # then the codes may be overwritten
            pending.wait()
        self.used.append(decoded)
        codes_of_all = parts.reduced(mine, self.residual.owned, self.round, self.place)
        others = [j for j in range(back.size) if j != back.rank]
        self._exchange(back, dict.fromkeys(others, codes_of_all) if codes_of_all else {}, parts.from_owners(self.flat))

    def wait(self) -> None:
        """Wait for the owners' codes of the other parts, and decode them."""
        self.reduced.result()
        for owner, (arriving, codes) in self.received.items():
            for pending in arriving:
                pending.wait()
            self.take(owner, codes)
        for pending in self.sent:
            pending.wait()
        # Only here: on a device the next user of the buffers waits for this stream, not for those of the other calls.
        self.mean.pool.give(self.used)
        self.used, self.sent, self.received = [], [], {}

    def take(self, owner: int, codes: list[Tensor]) -> None:
        """Decode the mean of an owner's part from its codes."""
        self.mean.codec.decode(codes, self.flats[owner], Frame())

    def done(self) -> bool:
        return bool(self.reduced.done()) and all(p.done() for arriving, _ in self.received.values() for p in arriving)

    def _exchange(self, over: Transport, out: Mapping[int, list[Tensor]], into: Mapping[int, list[Tensor]]) -> None:
        first = 16 * self.place  # the tag of a place's first tensor: a payload has fewer than 16
        sends = [Message(j, tensor, first + i) for j, row in out.items() for i, tensor in enumerate(row)]
        receives = [Message(j, tensor, first + i) for j, row in into.items() for i, tensor in enumerate(row)]
        self.mean.sent_bytes += sum(m.tensor.numel() * m.tensor.element_size() for m in sends)
        self.sent, arriving = over.exchange(sends, receives)
        rest = iter(arriving)
        self.received = {j: ([next(rest) for _ in row], row) for j, row in into.items()}
        rows = {id(row): row for row in (*out.values(), *into.values())}  # a tensor sent to several workers counts once
        self.used += [code for row in rows.values() for code in row]
