"""Activation compression: how hidden states and their gradients are written for the wire between stages.

Training with compressed boundaries isn't exact any more. Source: 2301.02654 (it hurts most at early boundaries).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


class Boundary(ABC):
    """Shapes and types of messages are known on both sides before they are sent."""

    @abstractmethod
    def buffer(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the tensor that a message for a tensor of this shape and dtype is received into."""

    @abstractmethod
    def encode(self, tensor: Tensor) -> Tensor:
        """The message, of the buffer's shape and type; contiguous."""

    @abstractmethod
    def decode(self, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The tensor, or what is left of it."""


@dataclass(frozen=True)
class ExactActivations(Boundary):
    """Hidden states and gradients sent as they are, without compression."""

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous()

    def decode(self, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return message


@dataclass(frozen=True)
class Bfloat16Activations(Boundary):
    """Rounded to bfloat16: two bytes a number, a relative error of 2^-9 at most."""

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(shape), dtype=torch.bfloat16, device=device)

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16).contiguous()

    def decode(self, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return message.to(dtype)


@dataclass(frozen=True)
class Int8Activations(Boundary):
    """round(127 x / max |x|) with one scale for each row (token): one byte a number and four for the scale.

    The error of a number is at most max |x| / 254 of its row.
    """

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(prod(shape[:-1]), shape[-1] + 4, dtype=torch.int8, device=device)

    def encode(self, tensor: Tensor) -> Tensor:
        rows = tensor.reshape(-1, tensor.shape[-1]).float()
        scale = rows.abs().amax(dim=1, keepdim=True) / 127
        # A row of zeros would be 0 / 0.
        levels = (rows / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().clamp(-127, 127).to(torch.int8)
        return torch.cat([levels, scale.view(torch.int8)], dim=1)  # the scale's four bytes: one message, not two

    def decode(self, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        scale = message[:, -4:].contiguous().view(torch.float32)
        return (message[:, :-4].float() * scale).to(dtype).reshape(tuple(shape))
