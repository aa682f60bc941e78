"""One bucket on the links of one worker: what a codec needs beside the numbers."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_decentral.buckets import Matrix
from lightning_decentral.gossip.coding import Codec, Frame, Layout, Part, Payload

Buffers = list[Tensor]


class Channel:
    """One bucket: its layout, and the estimates by link.

    Args:
        reference: where all estimates start; equal on all workers.
        exact: elements at a message's end that aren't encoded.
    """

    def __init__(self, codec: Codec, reference: Tensor, matrices: Sequence[Matrix], exact: int) -> None:
        self.estimates: dict[str, Tensor] = {}
        self._codec, self._matrices, self._exact = codec, matrices, exact
        self._reference = _real(reference)
        self._layouts: dict[int, Layout] = {}

    def parts(self, message: Tensor) -> list[Part]:
        """The payload's, and the exact tail."""
        coded, tail = self._split(message)
        parts = self._codec.checked_parts(self._layout(coded), coded.dtype)
        return [*parts, Part(tail.numel(), tail.dtype)] if self._exact else list(parts)

    def encode(self, message: Tensor, payload: Buffers, link: str, key: int) -> None:
        """Fill the payload."""
        self._fill(self._codec.encode, message, payload, link, key)

    def replace(self, message: Tensor, payload: Buffers, link: str, key: int) -> None:
        """Fill the payload, and overwrite the message by what is decoded of it."""
        self._fill(self._codec.replace, message, payload, link, key)

    def decode(self, payload: Buffers, out: Tensor, link: str) -> None:
        """Fill `out`."""
        coded, tail = self._split(out)
        self._codec.decode(self._coded(payload), coded, self._frame(link, coded, 0))
        if self._exact:
            tail.copy_(payload[-1])

    def gap(self, message: Tensor, link: str) -> Tensor:
        """||message - what is known of it||^2; 0 where that is rounding."""
        coded = self._split(message)[0]
        estimate = self._frame(link, coded, 0).estimate
        gap = _squared(coded if estimate is None else coded - estimate)
        rounding = 16 * torch.finfo(coded.dtype).eps
        return gap.where(gap > rounding**2 * _squared(coded), 0)

    def error(self, message: Tensor, decoded: Tensor) -> Tensor:
        """||message - decoded||^2."""
        return _squared(self._split(message)[0] - self._split(decoded)[0])

    def remember(self, decoded: Tensor, link: str, healthy: Tensor) -> None:
        """estimate <- decoded where healthy; a device decides by itself."""
        estimate, coded = self.estimates[link], self._split(decoded)[0]
        if healthy.is_cuda:
            torch.where(healthy, coded, estimate, out=estimate)
        elif bool(healthy):
            estimate.copy_(coded)

    def load(self, estimates: Mapping[str, Tensor]) -> None:
        """Go on with these."""
        device = self._reference.device
        self.estimates = {link: estimate.to(device, copy=True) for link, estimate in estimates.items()}

    def _fill(
        self, code: Callable[[Tensor, Payload, Frame], None], message: Tensor, payload: Buffers, link: str, key: int
    ) -> None:
        coded, tail = self._split(message)
        code(coded, self._coded(payload), self._frame(link, coded, key))
        if self._exact:
            payload[-1].copy_(tail)

    def _split(self, message: Tensor) -> tuple[Tensor, Tensor]:
        end = len(message) - self._exact
        return _real(message[:end]), message[end:]

    def _coded(self, payload: Buffers) -> Buffers:
        return payload[:-1] if self._exact else payload

    def _layout(self, coded: Tensor) -> Layout:
        if len(coded) not in self._layouts:
            self._layouts[len(coded)] = Layout.of(len(coded), self._matrices, len(self._reference))
        return self._layouts[len(coded)]

    def _frame(self, link: str, coded: Tensor, key: int) -> Frame:
        if self._codec.remembers and link not in self.estimates:
            self.estimates[link] = torch.zeros_like(coded)  # a message may hold more than the parameters
            self.estimates[link][: len(self._reference)].copy_(self._reference)
        return Frame(self._layout(coded), key, self.estimates.get(link))


def _squared(tensor: Tensor) -> Tensor:
    return tensor.double().square().sum()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor
