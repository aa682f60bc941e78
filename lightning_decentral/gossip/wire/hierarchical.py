"""Hierarchical exchange: each device of an island exchanges a part of a bucket, then the island gathers the parts."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.mixing import Sick
from lightning_decentral.gossip.wire.exchange import Copied, Exchange, MessageInFlight, Traffic
from lightning_decentral.gossip.wire.island_member import MakeComparison, Meet, Several, inside
from lightning_decentral.shared.compute import cuda
from lightning_decentral.shared.compute.buckets import Bucket, Pool, pack
from lightning_decentral.shared.compute.codec.codec import Codec
from lightning_decentral.shared.compute.device import DeviceStopwatch, stopwatch
from lightning_decentral.shared.wire.averaging.gradient_average import GradientAverage
from lightning_decentral.shared.wire.averaging.residuals import scale_of
from lightning_decentral.shared.wire.compressed_mean import mean_by
from lightning_decentral.shared.wire.meeting.comparison import TrainedLayout
from lightning_decentral.shared.wire.objects import gather_rows
from lightning_decentral.shared.wire.transport import Transport, Wire


@dataclass
class GatherExchange(Exchange["Parts"]):
    """mixed[p] = sum_j w_ij sent_j[p] for this device's part p; then the island's devices all-gather the parts.

    A bucket of n elements has L equal parts for L devices: every byte of a message crosses the network card of the
    island's node once. Source: two-level exchange of parameters, Wang et al. 2410.11998, section 4."""

    inner: Exchange[Any]  # exchange between the devices of the same place in all islands
    inside: Transport  # the devices of this island, in order of place, for this exchange alone
    device: torch.device
    pool: Pool = field(default_factory=Pool, init=False)

    def __post_init__(self) -> None:
        self.coder, self.neighbours = self.inner.coder, self.inner.neighbours
        self._waited = stopwatch(self.device)
        # Under NCCL the gather, too, overlaps the next step; under gloo it runs when the round is mixed.
        self._order = SideStream(self.device) if self.inside.queued else AtLanding()

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        self.inner.admit([self._part(bucket) for bucket in buckets], combine)

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> "Parts":
        """Launch a message. Memory until mixed: a copy of the message, the inner exchange's memory for the part, and
        under NCCL another copy for the gather."""
        sent = self._copy(message, copied)
        return self._order.begin(lambda: self._begin(sent, step, place), self.inner, step)

    def _begin(self, sent: Tensor, step: int, place: int) -> "Parts":
        own = self._part(sent)
        launched = self.inner.launch(own, step, place, Copied(own))
        if self.coder.encodes:  # every device must have the decoded message, as receivers do
            launched.settle()
            # Cloned: the gather overwrites the message, of which the part is a view.
            self._share(sent, own.clone())

        def gather() -> Tensor:
            part, sick = self._order.land(launched, self.inside)
            mixed = self.pool.take(sent)
            self._share(mixed, part)
            self.inner.pool.give([part])
            if sick is not None:
                counted = torch.empty_like(sent)
                self._share(counted, own if sick.sent is None else sick.sent)
                for whole in (counted, mixed):
                    if not self._split(whole):  # each device exchanged all of it: all copy the refused device's
                        self.inside.broadcast(whole, sick.place).wait()
                raise Sick(sick.complaint, counted, mixed, sick.round)
            return mixed

        return Parts(sent, [launched], gather)

    def depart(self, launched: Sequence["Parts"], step: int) -> None:
        if waiting := [part for parts in launched for part in parts.waiting]:
            self.inner.depart(waiting, step)

    def _share(self, whole: Tensor, part: Tensor) -> None:
        """Gather every device's part: whole <- parts."""
        if self._split(whole):
            self._waited.during([self.inside.all_gather_into(whole, part).wait])
        else:
            whole.copy_(part)

    def _part(self, message: Tensor) -> Tensor:
        return message.view(self.inside.size, -1)[self.inside.rank] if self._split(message) else message

    def _split(self, message: Tensor) -> bool:
        # A tensor that can't be divided (a rule's scalar) is exchanged whole by every device.
        return message.numel() % self.inside.size == 0

    def traffic(self) -> Traffic:
        """Traffic of the inner exchange, plus the seconds waited for the other parts. `bytes_sent` left the island."""
        return self._order.traffic(self.inner.traffic() + Traffic(wait_seconds=self._waited.seconds()))


@dataclass
class Parts(MessageInFlight):
    """Message in flight whose part this device exchanges."""

    sent: Tensor  # [elements], the whole message
    waiting: Sequence[MessageInFlight]  # parts that the inner exchange has launched and not yet sent
    finish: Callable[[], Tensor]  # waits for the whole mixture

    @property
    def together(self) -> bool:  # type: ignore[override]
        return any(part.together for part in self.waiting)

    def land(self) -> Tensor:
        return self.finish()


class SickPart(NamedTuple):
    """Refused part of this island's message, known to all devices of the island."""

    complaint: str
    sent: Tensor | None  # replacement of this device's part; None if its part was accepted
    round: int
    place: int  # the first device whose part was refused


class AtLanding:
    """Gathers parts when the round is mixed, for transports whose waits block the host (gloo)."""

    def land(self, launched: MessageInFlight, inside: Transport) -> tuple[Tensor, SickPart | None]:
        """Return this device's part, and the refused part if there is one: the devices of an island are healed, or end,
        together. Collective inside the island."""
        try:
            part, sick = launched.land(), None
        except Sick as found:
            part, sick = found.mixed, found
        mine = torch.tensor([-1 if sick is None else sick.round], device=part.device)
        rounds = gather_rows(inside, mine)[:, 0].tolist()
        place = max(range(inside.size), key=rounds.__getitem__)
        if rounds[place] < 0:
            return part, None
        others = f"another device of this island sent a refused message in round {rounds[place]}; see its output"
        complaint, sent = (others, None) if sick is None else (str(sick), sick.sent)
        return part, SickPart(complaint, sent, rounds[place], place)

    def begin(self, launch: Callable[[], Parts], inner: Exchange[Any], step: int) -> Parts:
        """Launch a message, which is sent with the rest of its round."""
        return launch()

    def traffic(self, counted: Traffic) -> Traffic:
        return counted


class SideStream:
    """Runs rounds on a second CUDA stream from their launch on; the caller's stream waits when a round is mixed.

        caller   message |     forward, backward, update     | mixed
        aside            | send, wait, mix, gather |

    Needs a CUDA device and NCCL."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._waited = cuda.Stream(device), DeviceStopwatch()

    def land(self, launched: MessageInFlight, inside: Transport) -> tuple[Tensor, SickPart | None]:
        # Comparing with the other devices would make the host wait: so a worker whose message is refused ends.
        return launched.land(), None

    def begin(self, launch: Callable[[], Parts], inner: Exchange[Any], step: int) -> Parts:
        """Launch, send and mix a message on the second stream."""
        caller = cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)  # for the message, and for readers of the buffers that went back to a pool
        # All memory of the exchanges (pools, a codec's estimates) is used on this stream alone.
        with cuda.on(self._stream):
            parts = launch()
            inner.depart(parts.waiting, step)
            if inner.coder.encodes:  # launching overwrites the message, which the caller reads next
                caller.wait_stream(self._stream)
            mixed = parts.land()
            done = self._stream.record_event()
        # The allocator mustn't reuse the memory before this stream has read it.
        parts.sent.record_stream(self._stream)

        def land() -> Tensor:
            caller = cuda.current_stream(self._stream.device)
            self._waited.during([partial(caller.wait_event, done)])
            mixed.record_stream(caller)  # and this stream's memory not before the caller has read it
            return mixed

        return Parts(parts.sent, [], land)

    def traffic(self, counted: Traffic) -> Traffic:
        # The waits that the exchanges counted were this stream's, and overlap. Only the caller's waits cost time.
        return replace(counted, wait_seconds=self._waited.seconds())


class Averaging(Several):
    """Device of an island of replicas, which average their gradients."""

    def __init__(
        self, wire: Wire, devices: int, device: torch.device, meet: Meet, bucket_bytes: int, codec: Codec
    ) -> None:
        super().__init__(wire, devices, meet)
        size = wire.world.size
        self._device, self._gathering = device, inside(wire.group, size, devices)
        self.heals = not self._gathering.queued
        # A process group for gradients alone: they mustn't queue behind a gather of parameters.
        self._average = mean_by(codec, partial(inside, wire.group, size, devices), device)
        self._gradients = GradientAverage(self._average, inside(wire.hosts, size, devices), meet, bucket_bytes)

    def guard(self, scaler: Any) -> None:
        if scaler is not None:
            self._average.guard(scale_of(scaler, self._device))

    def exchange(self, peers: Exchange[Any]) -> Exchange[Any]:
        return GatherExchange(peers, self._gathering, self._device)

    def pack(self, parameters: Sequence[nn.Parameter], bucket_bytes: int | None) -> list[Bucket]:
        return pack(parameters, bucket_bytes, partial(Bucket, parts=self.devices))

    def train(self, module: nn.Module, step: Callable[[], Any], redirect: Callable[[], Any]) -> Any:
        # Parameters may have been unfrozen since the last step.
        self._gradients.watch(list(module.parameters()))
        return step()

    def compare(self, trained: TrainedLayout, make: MakeComparison) -> None:
        super().compare(trained, make)
        self._gradients.layouts = self.layouts

    def averaging(self, closure: Callable[[], Any]) -> Any:
        return self._gradients.around(closure)

    def before(self, loss: Any) -> None:
        self._gradients.before(loss)

    def updated(self, optimizer: Any) -> None:
        self._gradients.updated(optimizer, skipped=False)

    def progress_state(self) -> dict[str, Any]:
        return self._average.state_dict()

    def load_progress_state(self, state: Mapping[str, Any]) -> None:
        self._average.load_state_dict(state)

    def blocked(self) -> AbstractContextManager[None]:
        return self._gradients.blocked()

    def close(self, cut_off: bool) -> None:
        super().close(cut_off)
        self._gradients.close()
