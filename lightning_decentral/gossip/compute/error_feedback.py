"""Error-feedback state of a codec: a worker's estimates for each link, or residuals of a mean summed by parts."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_decentral.gossip.compute.combine.combine import Combine
from lightning_decentral.gossip.compute.link import Buffers, CodecError, Coder, Memory, check_codec
from lightning_decentral.gossip.plan.topology.topology import Topology, audiences
from lightning_decentral.shared.compute.buckets import Pool
from lightning_decentral.shared.compute.codec.blocks import key, real
from lightning_decentral.shared.compute.codec.codec import Codec, Frame, PayloadPart
from lightning_decentral.shared.compute.health import scale, sound, squared_norm

if TYPE_CHECKING:
    import lightning_decentral.shared.compute.codec.coded_parts as coded


def coder_of(codec: Codec, topology: Topology, rank: int, size: int, pool: Pool) -> Coder:
    """Make the coder of one worker, for its ends of all its links."""
    if not codec.encodes:
        return Coder(pool)
    # Targets that don't always receive in the same steps miss different messages, so they can't share an estimate.
    return Coded(codec, rank, audiences(topology, rank, size) if codec.remembers else {}, pool)


class BucketCodec:
    """Encodes and decodes one bucket, with an estimate for each link that starts at `reference`, equal on all workers.
    The last `exact` elements of a message aren't encoded."""

    def __init__(self, codec: Codec, reference: Tensor, exact: int) -> None:
        self.estimates: dict[str, Tensor] = {}
        self._codec, self._exact = codec, exact
        self._reference = real(reference)  # (elements,), complex numbers as pairs
        self._parts: dict[tuple[int, torch.dtype], list[PayloadPart]] = {}
        exact_bytes = exact * reference.element_size()
        self.bytes = sum(part.bytes for part in self._coded(self._reference)) + exact_bytes

    def parts(self, message: Tensor) -> list[PayloadPart]:
        """Parts of the message's payload, with the exact tail as the last part."""
        coded, tail = self._split(message)
        return [*self._coded(coded), *([PayloadPart(tail.numel(), tail.dtype)] if self._exact else [])]

    def encode(self, message: Tensor, payload: Buffers, link: str, key: int, replaces: bool = False) -> None:
        """Encode the message into the payload; `replaces`: also overwrite the message by its decoded value."""
        coded, tail = self._split(message)
        code = self._codec.replace if replaces else self._codec.encode
        code(coded, payload[:-1] if self._exact else payload, self._frame(link, coded, key))
        if self._exact:
            payload[-1].copy_(tail)

    def decode(self, payload: Buffers, out: Tensor, link: str) -> None:
        coded, tail = self._split(out)
        self._codec.decode(payload[:-1] if self._exact else payload, coded, self._frame(link, coded, 0))
        if self._exact:
            tail.copy_(payload[-1])

    def gap(self, message: Tensor, link: str) -> Tensor:
        """||message - estimate||^2, or 0 if no more than a rounding error."""
        coded = self._split(message)[0]
        estimate = self._frame(link, coded, 0).estimate
        rounding, whole = 16 * torch.finfo(coded.dtype).eps, squared_norm([coded])
        gap = whole if estimate is None else squared_norm([coded - estimate])  # a scalar on the device
        return gap.where(gap > rounding**2 * whole, 0)

    def error(self, message: Tensor, decoded: Tensor) -> Tensor:
        """||message - decoded||^2; message <- message - decoded."""
        return squared_norm([self._split(message)[0].sub_(self._split(decoded)[0])])

    def remember(self, decoded: Tensor, link: str, healthy: Tensor) -> None:
        """estimate <- decoded where healthy."""
        estimate, coded = self.estimates[link], self._split(decoded)[0]
        if healthy.device.type == "cuda":
            # A GPU decides without the host, which would have to wait for the verdict.
            torch.where(healthy, coded, estimate, out=estimate)
        elif bool(healthy):
            estimate.copy_(coded)

    def spoil(self, message: Tensor, links: Sequence[str]) -> None:
        """message <- NaN if the message is far too large next to its estimates: then all receivers refuse the message,
        and the estimates on both ends don't change."""
        coded = self._split(message)[0]
        known = [scale([e]) for link in links if (e := self._frame(link, coded, 0).estimate) is not None]
        good = sound(torch.stack([scale([coded]), *known]))[0]  # a bool on the device
        if good.device.type == "cuda" or not bool(good):
            message.masked_fill_(~good, torch.nan)

    def load(self, estimates: Mapping[str, Tensor]) -> None:
        device = self._reference.device
        self.estimates = {link: estimate.to(device, copy=True) for link, estimate in estimates.items()}

    def _split(self, message: Tensor) -> tuple[Tensor, Tensor]:
        end = len(message) - self._exact
        coded = message[:end]
        return real(coded) if coded.is_complex() else coded, message[end:]

    def _coded(self, coded: Tensor) -> list[PayloadPart]:
        # By length and type: a message may hold more than the parameters (`MessageForm`).
        if (len(coded), coded.dtype) not in self._parts:
            self._parts[len(coded), coded.dtype] = list(self._codec.checked_parts(len(coded), coded.dtype))
        return self._parts[len(coded), coded.dtype]

    def _frame(self, link: str, coded: Tensor, key: int) -> Frame:
        if self._codec.remembers and link not in self.estimates:
            # Elements of a message after the parameters are assumed to start at zero.
            self.estimates[link] = torch.zeros_like(coded)
            self.estimates[link][: len(self._reference)].copy_(self._reference)
        return Frame(key, self.estimates.get(link))


SAMPLE = 2**16
RULE_OF_THUMB = 0.9  # A mixing rate may exceed by a tenth the share of a difference that a codec transmits.


def share_that_arrives(codec: Codec, dtype: torch.dtype) -> float:
    """Share of a difference d that a codec transmits: 1 - ||d - decoded||^2 / ||d||^2 for normal random numbers d."""
    d = torch.randn(SAMPLE, generator=torch.Generator().manual_seed(0))  # (SAMPLE,), the same on all
    d = d.to(torch.promote_types(dtype, torch.float32))
    channel = BucketCodec(codec, torch.zeros_like(d), 0)
    decoded = d.clone()
    payload = [torch.empty(part.elements, dtype=part.dtype) for part in channel.parts(d)]
    channel.encode(decoded, payload, "sample", 1, replaces=True)
    return 1 - float(squared_norm([d - decoded]) / squared_norm([d]))


def measured(step: int) -> bool:
    """Return whether to measure the codec's error in this round: 0, 1, 2, 4, 8 and so on, as a measurement copies the
    message, which encoding overwrites."""
    return step & (step - 1) == 0


class Coded(Coder):
    """Coder that encodes and decodes the messages of every link with a codec, whose noise differs between ranks.
    `audiences` is {target: its audience}: the targets of one audience always receive in the same steps. Targets that
    aren't named are one audience."""

    encodes = True

    def __init__(self, codec: Codec, rank: int, audiences: Mapping[int, int], pool: Pool) -> None:
        super().__init__(pool)
        self._codec, self._rank, self._audiences = codec, rank, audiences
        self._channels: list[BucketCodec] = []
        self._rate = 1.0
        self.lost, self._warned = CodecError(self._judge), False

    def admit(self, references: Sequence[Tensor], combine: Combine) -> None:
        self._rate = combine.largest_rate
        self._channels += [BucketCodec(self._codec, reference, combine.form.exact) for reference in references]
        self.bytes = sum(channel.bytes for channel in self._channels)

    def encode(self, message: Tensor, targets: Mapping[int, float], step: int, place: int) -> dict[int, Buffers]:
        shares: dict[int, float] = {}
        for target, weight in targets.items():
            audience = self._audiences.get(target, 0)
            shares[audience] = shares.get(audience, 0.0) + weight
        channel = self._channels[place]
        watched = message.clone() if shares and measured(step) else None
        # Before encoding, which changes the estimates; one audience stands for all.
        gap = None if watched is None else channel.gap(watched, f"to {next(iter(shares))}")
        keys = {audience: key(self._rank, step, place, audience) for audience in shares}
        payloads = self._encode(channel, message, keys, shares)
        if watched is not None and gap is not None:
            self.lost.add(channel.error(watched, message), gap)
            # A round's buckets come one by one, and are read together with the last.
            if place + 1 == len(self._channels):
                self.lost.complete(step)
        return {target: payloads[self._audiences.get(target, 0)] for target in targets}

    def _judge(self, lost: float, step: int) -> None:
        """Warn once if the mixing rate exceeds the share of a difference that the codec transmits."""
        arrived = 1 - lost**2
        if self._codec.remembers and self._rank == 0 and arrived < RULE_OF_THUMB * self._rate and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._codec} transmitted {arrived:.1%} of what a receiver lacked in round {step}: at mixing rate "
                f"{self._rate} the workers may diverge; use Gossip(rate={max(arrived, 0.01):.2g}) or a codec that "
                "sends more",
                stacklevel=2,
            )

    def _encode(
        self, channel: BucketCodec, message: Tensor, keys: Mapping[int, int], shares: Mapping[int, float]
    ) -> dict[int, Buffers]:
        """Encode to {audience: payload};  message <- sum over audiences of share * decoded payload."""
        if self._codec.remembers:
            channel.spoil(message, [f"to {audience}" for audience in keys])
        payloads, total = self._taken(keys, message, channel), sum(shares.values()) or 1.0
        in_place = len(payloads) == 1  # for one audience, without a copy of the message
        for audience, payload in payloads.items():
            channel.encode(message, payload, f"to {audience}", keys[audience], in_place)
        for place, (audience, payload) in enumerate(payloads.items()):
            out = self._pool.take(message) if place else message
            if not in_place:
                channel.decode(payload, out, f"to {audience}")
            if self._codec.remembers:  # as the targets do, which refuse what isn't finite
                channel.remember(out, f"to {audience}", torch.isfinite(scale([out])))
            if place == 1:
                message.mul_(shares[next(iter(shares))] / total)
            if place:
                message.add_(out, alpha=shares[audience] / total)
                self._pool.give([out])
        return payloads

    def _taken(self, ends: Iterable[int], message: Tensor, channel: BucketCodec) -> dict[int, Buffers]:
        """Take buffers for a payload of the message at each end of a link."""
        parts = [(torch.Size([part.elements]), part.dtype) for part in channel.parts(message)]
        return {end: [self._pool.take_new(*part, message.device) for part in parts] for end in ends}

    def buffers(self, sources: Iterable[int], message: Tensor, place: int) -> dict[int, Buffers]:
        return self._taken(sources, message, self._channels[place])

    def decode(self, received: Mapping[int, Buffers], message: Tensor, place: int) -> dict[int, Tensor]:
        decoded = {source: self._pool.take(message) for source in received}  # (elements,) each
        for source, payload in received.items():
            self._channels[place].decode(payload, decoded[source], f"from {source}")
        self._pool.give(chain(*received.values()))
        return decoded

    def remember(self, decoded: Mapping[int, Tensor], healthy: Iterable[Tensor], place: int) -> None:
        if self._codec.remembers:
            for (source, bucket), sane in zip(decoded.items(), healthy, strict=True):
                self._channels[place].remember(bucket, f"from {source}", sane)

    def state_dict(self) -> dict[str, Any]:
        return {"codec": repr(self._codec), "estimates": [dict(channel.estimates) for channel in self._channels]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_codec(state, repr(self._codec))
        for channel, estimates in zip(self._channels, state["estimates"], strict=True):
            channel.load(estimates)


class CodedMean(Memory):
    """Encodes buckets for a mean summed by parts, and keeps for each bucket the residuals and the codec's error."""

    def __init__(self, parts: "coded.CodedParts") -> None:
        self.parts, self.lost = parts, CodecError()
        self.owned: list[Tensor] = []  # for each bucket, the rounding error of the last mean of the own part

    def admit(self, buckets: Sequence[Tensor]) -> None:
        for bucket in map(real, buckets):
            self.owned.append(torch.zeros_like(self.parts.of(self.parts.rank, bucket)))  # (elements of the own part,)
            self.bytes += self.parts.codec.bytes(bucket.numel(), bucket.dtype)

    def encode(self, message: Tensor, step: int, place: int) -> dict[int, Buffers]:
        """Encode a bucket to {owner: codes of its part};  message <- what was sent."""
        watched = message.clone() if measured(step) else None
        codec, numbers = self.parts.codec, real(message)  # (elements,)
        codes = self.parts.to_owners(numbers, codec.replace, step, place)
        self.parts.own(numbers, codec.replace, step, place)
        if watched is not None:
            gap = squared_norm([watched])  # a copy, before the compression error overwrites it
            self.lost.add(squared_norm([watched.sub_(message)]), gap)
            if place + 1 == len(self.owned):
                self.lost.complete(step)
        return codes

    def state_dict(self) -> dict[str, Any]:
        return {"codec": repr(self.parts.codec), "owned": [owned.clone() for owned in self.owned]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_codec(state, repr(self.parts.codec))
        # Missing in a checkpoint from before means were encoded.
        for owned, saved in zip(self.owned, state.get("owned", self.owned), strict=True):
            owned.copy_(saved)
