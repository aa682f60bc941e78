"""Hierarchical all-gather exchange: each device of an island exchanges a part, then the island shares what came."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from lightning_decentral.shared.wire.transport import Transport, Wire


@dataclass
class GatherExchange(Exchange["Parts"]):
    """mixed[p] = sum_j w_ij sent_j[p] for this device's part p; then every device gets every part.

    A bucket of n elements has L equal parts for L devices: every byte of a message crosses the network card of the
    island's node once. Source: the two-level scheme of the parameters' exchange, Wang et al. 2410.11998, section 4.
    """

    inner: Exchange[Any]  # between the devices at this one's place in every island
    inside: Transport  # the devices of this island, in order of place, for this alone
    device: torch.device
    pool: Pool = field(default_factory=Pool, init=False)

    def __post_init__(self) -> None:
        self.coder, self.neighbours = self.inner.coder, self.inner.neighbours
        self._waited = stopwatch(self.device)
        # By NCCL the gather, too, is hidden behind the next step; by gloo it waits for the landing.
        self._order = SideStream(self.device) if self.inside.queued else AtLanding()

    def admit(self, buckets: Sequence[Tensor], combine: Combine) -> None:
        self.inner.admit([self._part(bucket) for bucket in buckets], combine)

    def launch(self, message: Tensor, step: int, place: int, copied: Copied | None = None) -> "Parts":
        """Memory until landed: a copy, what the inner exchange takes for the part, and where the gather doesn't wait
        for the landing another copy of the message."""
        sent = self._copy(message, copied)
        return self._order.begin(lambda: self._begin(sent, step, place), self.inner, step)

    def _begin(self, sent: Tensor, step: int, place: int) -> "Parts":
        own = self._part(sent)
        launched = self.inner.launch(own, step, place, Copied(own))
        if self.coder.encodes:  # what is sent isn't what was given: every device must hold what receivers decode
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
                    if not self._split(whole):  # each device exchanged it for itself: all take the refused one's
                        self.inside.broadcast(whole, sick.place).wait()
                raise Sick(sick.complaint, counted, mixed, sick.round)
            return mixed

        return Parts(sent, [launched], gather)

    def depart(self, launched: Sequence["Parts"], step: int) -> None:
        if waiting := [part for parts in launched for part in parts.waiting]:
            self.inner.depart(waiting, step)

    def _share(self, whole: Tensor, part: Tensor) -> None:
        """whole <- every device's part."""
        if self._split(whole):
            self._waited.during([self.inside.all_gather_into(whole, part).wait])
        else:
            whole.copy_(part)

    def _part(self, message: Tensor) -> Tensor:
        return message.view(self.inside.size, -1)[self.inside.rank] if self._split(message) else message

    def _split(self, message: Tensor) -> bool:
        # What can't be divided (a rule's own scalar) is exchanged whole by every device.
        return message.numel() % self.inside.size == 0

    def traffic(self) -> Traffic:
        """The inner exchange's, and the seconds waited for the other parts: `bytes_sent` are those that left the
        island."""
        return self._order.traffic(self.inner.traffic() + Traffic(wait_seconds=self._waited.seconds()))


@dataclass
class Parts(MessageInFlight):
    """This device's part of a message."""

    sent: Tensor  # [elements], the whole
    waiting: Sequence[MessageInFlight]  # what of it the inner exchange has launched and has not sent
    finish: Callable[[], Tensor]  # waits for the whole

    @property
    def together(self) -> bool:  # type: ignore[override]
        return any(part.together for part in self.waiting)

    def land(self) -> Tensor:
        return self.finish()


class SickPart(NamedTuple):
    """A part of this island's message was refused; all its devices know."""

    complaint: str
    sent: Tensor | None  # what counts in the place of this device's part; None where it was accepted
    round: int
    place: int  # the first device whose part it was


class AtLanding:
    """The gather happens where the round lands: the wait of its transport is the host's, so sooner would block."""

    def land(self, launched: MessageInFlight, inside: Transport) -> tuple[Tensor, SickPart | None]:
        """This device's part, and whether any device's message was refused: the devices of an island are healed, or
        end, together. Collective inside."""
        try:
            part, sick = launched.land(), None
        except Sick as found:
            part, sick = found.mixed, found
        mine = torch.tensor([-1 if sick is None else sick.round], device=part.device)
        pending, rows = inside.all_gather(mine)
        pending.wait()
        rounds = [int(round) for round in rows]
        place = max(range(inside.size), key=rounds.__getitem__)
        if rounds[place] < 0:
            return part, None
        others = f"another device of this island was refused by its neighbours in round {rounds[place]}; see its output"
        complaint, sent = (others, None) if sick is None else (str(sick), sick.sent)
        return part, SickPart(complaint, sent, rounds[place], place)

    def begin(self, launch: Callable[[], Parts], inner: Exchange[Any], step: int) -> Parts:
        """Launch it; it departs with the others."""
        return launch()

    def traffic(self, counted: Traffic) -> Traffic:
        return counted


class SideStream:
    """Second CUDA stream for rounds, as soon as they are launched; the caller's waits for the outcome where it lands.

        caller   message |     forward, backward, update     | mixed
        aside            | send, wait, mix, gather |

    The device is a CUDA one, its transfers by NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream, self._waited = cuda.Stream(device), DeviceStopwatch()

    def land(self, launched: MessageInFlight, inside: Transport) -> tuple[Tensor, SickPart | None]:
        # To ask the others would make the host wait: a worker that is refused ends.
        return launched.land(), None

    def begin(self, launch: Callable[[], Parts], inner: Exchange[Any], step: int) -> Parts:
        """Launch, send and land it on this stream."""
        caller = cuda.current_stream(self._stream.device)
        self._stream.wait_stream(caller)  # for the message, and for readers of the buffers that went back to a pool
        # All that the exchanges keep (pools, a codec's estimates) is touched on this stream alone.
        with cuda.on(self._stream):
            parts = launch()
            inner.depart(parts.waiting, step)
            if inner.coder.encodes:  # launching overwrites the message, which the caller reads next
                caller.wait_stream(self._stream)
            mixed = parts.land()
            done = self._stream.record_event()
        # The allocator mustn't give its memory away before this stream has read it.
        parts.sent.record_stream(self._stream)

        def land() -> Tensor:
            caller = cuda.current_stream(self._stream.device)
            self._waited.during([partial(caller.wait_event, done)])
            mixed.record_stream(caller)  # nor this stream's before the caller has
            return mixed

        return Parts(parts.sent, [], land)

    def traffic(self, counted: Traffic) -> Traffic:
        # The waits that the exchanges counted were this stream's: hidden. Only the caller's cost time.
        return replace(counted, wait_seconds=self._waited.seconds())


class Averaging(Several):
    """One of several devices with equal parameters."""

    def __init__(
        self, wire: Wire, devices: int, device: torch.device, meet: Meet, bucket_bytes: int, codec: Codec
    ) -> None:
        super().__init__(wire, devices, meet)
        size = wire.world.size
        self._device, self._gathering = device, inside(wire.group, size, devices)
        self.heals = not self._gathering.queued
        # A group of their own: gradients mustn't queue behind a gather of parameters.
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

    @contextmanager
    def blocked(self) -> Iterator[None]:
        with self._gradients.blocked():
            yield

    def close(self, cut_off: bool) -> None:
        super().close(cut_off)
        self._gradients.close()
