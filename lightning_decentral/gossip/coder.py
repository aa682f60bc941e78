"""One worker's ends of all its links: what it sends to each target, and what it makes of what each source sent."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_decentral.arriving import Arriving
from lightning_decentral.buckets import Matrix, Pool
from lightning_decentral.gossip.channel import Buffers, Channel
from lightning_decentral.gossip.codec import Plain
from lightning_decentral.gossip.coding import Codec, check_codec
from lightning_decentral.gossip.combine.rule import Combine
from lightning_decentral.gossip.noise import key


class Coder(ABC):
    """Turns messages, a list of buckets, into what travels and back. Estimates, where a codec has them, live here.

    `first` is the place of a message's first bucket among those admitted.
    """

    estimates: bool = False
    """Whether it keeps estimates, which start at the references."""

    learns: bool = False
    """Whether landing changes what is encoded next."""

    @abstractmethod
    def admit(self, references: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        """More buckets. `references` are as long, and where there are estimates equal on all workers; the rule says how
        much of a message is not encoded."""

    @abstractmethod
    def encode(
        self, message: Sequence[Tensor], targets: Mapping[int, float], step: int, first: int
    ) -> dict[int, Buffers]:
        """{target: what it gets}; targets of one audience share it.

        The message is overwritten by what those targets decode: sum_k w_ki decoded_ik / sum_k w_ki where they differ.
        """

    @abstractmethod
    def buffers(self, source: int, message: Sequence[Tensor], first: int) -> Buffers:
        """Where what the source sends is received."""

    @abstractmethod
    def decode(self, source: int, buffers: Buffers, message: Sequence[Tensor], first: int) -> Buffers:
        """The buckets that the source meant; the buffers are used up."""

    @abstractmethod
    def remember(self, source: int, decoded: Sequence[Tensor], healthy: Tensor, first: int) -> None:
        """Keep what was decoded as the estimate of the source, if it is healthy."""

    @abstractmethod
    def release(self, sent: Mapping[int, Buffers]) -> None:
        """What `encode` returned has left."""

    def error(self) -> float | None:
        """How much of what was to be sent got lost, relative; None where nothing is encoded or was measured."""
        return None

    @abstractmethod
    def bytes(self, message: Sequence[Tensor]) -> int:
        """Of one message on the wire."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The estimates."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them."""


@dataclass
class Direct(Coder):
    """The buckets travel as they are: no copy is made."""

    pool: Pool

    def admit(self, references: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        """Nothing to know."""

    def encode(
        self, message: Sequence[Tensor], targets: Mapping[int, float], step: int, first: int
    ) -> dict[int, Buffers]:
        """The message itself."""
        return {target: list(message) for target in targets}

    def buffers(self, source: int, message: Sequence[Tensor], first: int) -> Buffers:
        """One like each bucket."""
        return [self.pool.take(m) for m in message]

    def decode(self, source: int, buffers: Buffers, message: Sequence[Tensor], first: int) -> Buffers:
        """The buffers themselves."""
        return buffers

    def remember(self, source: int, decoded: Sequence[Tensor], healthy: Tensor, first: int) -> None:
        """Nothing."""

    def release(self, sent: Mapping[int, Buffers]) -> None:
        """The mixer gives the message back."""

    def bytes(self, message: Sequence[Tensor]) -> int:
        """Of the buckets."""
        return sum(m.numel() * m.element_size() for m in message)

    def state_dict(self) -> dict[str, Any]:
        """The codec's name."""
        return {"codec": repr(Plain())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore; another codec's messages are refused."""
        check_codec(state, repr(Plain()))


class Coded(Coder):
    """Every link is encoded and decoded by a codec.

    Args:
        rank: of this worker; its noise differs from the others'.
        audiences: {target: its audience}; targets of one audience always hear this worker in the same steps. Those
            that aren't named are one.
    """

    def __init__(self, codec: Codec, rank: int, audiences: Mapping[int, int], pool: Pool) -> None:
        self._codec, self._rank, self._pool = codec, rank, pool
        self.estimates = codec.remembers
        self._audiences = audiences
        self._channels: list[Channel] = []
        self._rate = 1.0
        self._error: float | None = None
        self._open: tuple[Arriving, int] | None = None
        self._sums: list[Tensor] = []
        self._warned = False

    def admit(self, references: Sequence[Tensor], matrices: Sequence[Sequence[Matrix]], combine: Combine) -> None:
        """One channel for each bucket."""
        self._rate = combine.largest_rate
        pairs = zip(references, matrices, strict=True)
        self._channels += [Channel(self._codec, r, m, combine.exact) for r, m in pairs]

    def encode(
        self, message: Sequence[Tensor], targets: Mapping[int, float], step: int, first: int
    ) -> dict[int, Buffers]:
        """Once for each audience that hears this step; its targets share the payload."""
        shares: dict[int, float] = {}
        for target, weight in targets.items():
            audience = self._audiences.get(target, 0)
            shares[audience] = shares.get(audience, 0.0) + weight
        payloads: dict[int, Buffers] = {audience: [] for audience in shares}
        watched = [m.clone() for m in message] if shares and step & (step - 1) == 0 else []
        channels = self._channels[first : first + len(message)]
        gaps = [c.gap(m, f"to {next(iter(shares))}") for c, m in zip(channels, watched, strict=False)]
        for bucket, (channel, m) in enumerate(zip(channels, message, strict=True), first):
            keys = {audience: key(self._rank, step, bucket, audience) for audience in shares}
            parts = self._encode(channel, m, keys, shares)
            for audience, payload in parts.items():
                payloads[audience] += payload
        if watched:
            errors = [c.error(w, m) for c, w, m in zip(channels, watched, message, strict=True)]
            self._sums.append(torch.stack([torch.stack(errors).sum(), torch.stack(gaps).sum()]))
            if first + len(message) == len(self._channels):
                sums, self._sums = self._sums, []
                self._watch(Arriving(torch.stack(sums).sum(0)), step)
        return {target: payloads[self._audiences.get(target, 0)] for target in targets}

    def error(self) -> float | None:
        """||message - decoded|| / ||message - estimate|| as last measured: in rounds 0, 1, 2, 4, 8 and so on."""
        self._read()
        return self._error

    def _watch(self, sums: Arriving, step: int) -> None:
        """The host's are read at once, a device's when somebody asks or at the next measurement."""
        self._read()
        self._open = sums, step
        if sums.on_host:
            self._read()

    def _read(self) -> None:
        if self._open is not None:
            (sums, step), self._open = self._open, None
            error, gap = sums.read().tolist()
            self._judge(error, gap, step)

    def _judge(self, error: float, gap: float, step: int) -> None:
        """Warn, once, where the rate is over the share of a difference that arrives: the rest is stale."""
        if not gap > 0:  # nothing new was to be sent, or NaN
            return
        self._error = (error / gap) ** 0.5
        arrived = 1 - error / gap
        if self._codec.remembers and self._rank == 0 and arrived < 0.9 * self._rate and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._codec} passed on {arrived:.1%} of what a hearer lacked in round {step}: at rate {self._rate} "
                f"the workers may drift apart; use Gossip(rate={max(arrived, 0.01):.2g}) or a codec that sends more",
                stacklevel=2,
            )

    def _encode(
        self, channel: Channel, message: Tensor, keys: Mapping[int, int], shares: Mapping[int, float]
    ) -> dict[int, Buffers]:
        """{audience: payload};  message <- sum over audiences of share * what it decodes."""
        parts = {audience: self._payload(channel, message) for audience in keys}
        if len(parts) == 1:
            ((audience, payload),) = parts.items()
            channel.replace(message, payload, f"to {audience}", keys[audience])
            self._remember_own(channel, message, audience)
        elif parts:
            for audience, payload in parts.items():
                channel.encode(message, payload, f"to {audience}", keys[audience])
            self._overwrite(message, channel, parts, shares)
        return parts

    def _overwrite(
        self, message: Tensor, channel: Channel, parts: Mapping[int, Buffers], shares: Mapping[int, float]
    ) -> None:
        first, *others = parts
        total = sum(shares.values()) or 1.0
        self._decode_own(channel, parts[first], message, first)
        for place, audience in enumerate(others):
            decoded = self._pool.take(message)
            self._decode_own(channel, parts[audience], decoded, audience)
            message.mul_(shares[first] / total if place == 0 else 1.0).add_(decoded, alpha=shares[audience] / total)
            self._pool.give([decoded])

    def _decode_own(self, channel: Channel, payload: Buffers, out: Tensor, audience: int) -> None:
        channel.decode(payload, out, f"to {audience}")
        self._remember_own(channel, out, audience)

    def _remember_own(self, channel: Channel, decoded: Tensor, audience: int) -> None:
        if self._codec.remembers:
            channel.remember(decoded, f"to {audience}", torch.ones((), dtype=torch.bool))

    def _payload(self, channel: Channel, message: Tensor) -> Buffers:
        parts = channel.parts(message)
        return [self._pool.take_new(torch.Size([p.elements]), p.dtype, message.device) for p in parts]

    def buffers(self, source: int, message: Sequence[Tensor], first: int) -> Buffers:
        """The payload of each bucket in turn."""
        pairs = zip(self._channels[first:], message, strict=False)
        return [part for channel, m in pairs for part in self._payload(channel, m)]

    def decode(self, source: int, buffers: Buffers, message: Sequence[Tensor], first: int) -> Buffers:
        """By the link's estimate."""
        rest, decoded = list(buffers), []
        for channel, m in zip(self._channels[first:], message, strict=False):
            number = len(channel.parts(m))
            out = self._pool.take(m)
            channel.decode(rest[:number], out, f"from {source}")
            rest = rest[number:]
            decoded.append(out)
        self._pool.give(buffers)
        return decoded

    def remember(self, source: int, decoded: Sequence[Tensor], healthy: Tensor, first: int) -> None:
        """Nothing where the codec doesn't."""
        for channel, d in zip(self._channels[first:] if self._codec.remembers else [], decoded, strict=False):
            channel.remember(d, f"from {source}", healthy)

    def release(self, sent: Mapping[int, Buffers]) -> None:
        """Back to the pool, each once."""
        for payload in {id(payload): payload for payload in sent.values()}.values():
            self._pool.give(payload)

    def bytes(self, message: Sequence[Tensor]) -> int:
        """By the codec's formula, and the exact tails."""
        pairs = zip(self._channels, message, strict=False)
        return sum(part.bytes for channel, m in pairs for part in channel.parts(m))

    def state_dict(self) -> dict[str, Any]:
        """The codec and the estimates of each bucket."""
        return {"codec": repr(self._codec), "estimates": [dict(channel.estimates) for channel in self._channels]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Estimates on this device.

        Raises:
            ValueError: they were made by another codec.
        """
        check_codec(state, repr(self._codec))
        for channel, estimates in zip(self._channels, state["estimates"], strict=True):
            channel.load(estimates)
