"""Point-to-point messages between stages: hidden states down, their gradients up; nobody waits to send.

A `Boundary` writes them for the wire (activation compression). Training with anything but `ExactActivations` isn't
exact any more. Source: 2301.02654 (it hurts most at early boundaries).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_decentral.pipeline.compute.model import Shape
from lightning_decentral.pipeline.plan.schedule import Action, Kind
from lightning_decentral.shared.wire.pending import PeerLost, Pending
from lightning_decentral.shared.wire.transport import Message, Transport


class Boundary(ABC):
    """Shapes and types of messages are known on both sides before they are sent."""

    @abstractmethod
    def buffer(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the tensor that a message for a tensor of this shape and dtype is received into."""

    @abstractmethod
    def encode(self, tensor: Tensor) -> Tensor:  # (batch, tokens, width)
        """The message, of the buffer's shape and type; contiguous."""

    @abstractmethod
    def decode(self, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # as `buffer` makes it
        """The tensor, or what is left of it."""


@dataclass(frozen=True)
class ExactActivations(Boundary):
    """Hidden states and gradients sent as they are, without compression."""

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous()

    def decode(self, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # as `buffer` makes it
        return message


@dataclass(frozen=True)
class Bfloat16Activations(Boundary):
    """Rounded to bfloat16: two bytes a number, a relative error of 2^-9 at most."""

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(shape), dtype=torch.bfloat16, device=device)

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16).contiguous()

    def decode(self, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # as `buffer` makes it
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

    def decode(self, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # as `buffer` makes it
        scale = message[:, -4:].contiguous().view(torch.float32)
        return (message[:, :-4].float() * scale).to(dtype).reshape(tuple(shape))


class Channel(ABC):
    """The way of one stage to its neighbours during one step."""

    @abstractmethod
    def expect(self, action: Action) -> None:
        """Post the receive of what this action begins with, so that it arrives while the stage computes; those of one
        neighbour in the order of the schedule."""

    @abstractmethod
    def receive(self, action: Action) -> Tensor:
        """Wait for the tensor that was expected for this action."""

    @abstractmethod
    def send(self, action: Action, tensor: Tensor) -> None:  # (batch, tokens, width)
        """Hand on what this action came to."""

    @abstractmethod
    def close(self) -> None:
        """Return when everything that was sent has left."""


class Nowhere(Channel):
    """Channel of the only stage, which has no neighbours."""

    def expect(self, action: Action) -> None:
        """Nothing comes."""

    def receive(self, action: Action) -> Tensor:
        raise AssertionError(f"{action} has no neighbour")

    def send(self, action: Action, tensor: Tensor) -> None:
        """Nothing goes."""

    def close(self) -> None:
        """Nothing is under way."""


class Edge(NamedTuple):
    """Connection that carries one direction between two neighbouring stages.

    By NCCL a transport of its own: a communicator does its calls strictly in order, so that what is sent would wait
    behind receives that were posted before. By gloo, which matches messages by tag, edges may share one.
    """

    over: Transport
    peer: int
    """The neighbour's rank there."""


Edges = Mapping[tuple[Kind, int], Edge]
"""Edges of one stage: (direction, neighbouring stage) -> edge."""


def connect(edge: Edge, sends: bool, device: torch.device) -> None:
    """Send one number over a new edge. Both ends call it, for all edges in one order.

    With NCCL's first message of a pair the hosts wait for each other, and memory is taken: not in a step.
    """
    messages = [Message(edge.peer, torch.zeros(1, device=device), 0)]
    outgoing, incoming = edge.over.exchange(messages, []) if sends else edge.over.exchange([], messages)
    for pending in (*outgoing, *incoming):
        pending.wait()


@dataclass
class _Arriving:
    pending: Pending
    message: Tensor
    shape: Shape


class EdgeChannel(Channel):
    """Channel over the edges to the neighbours.

    Args:
        edges: of this stage; none where there is no neighbour.
        shapes: of what leaves a stage forward, by (micro-batch, slice, stage).
    """

    def __init__(
        self,
        edges: Edges,
        shapes: Mapping[tuple[int, int, int], Shape],
        device: torch.device,
        boundary: Boundary | None = None,
    ) -> None:
        self._edges = edges
        self._shapes, self._device, self._boundary = shapes, device, boundary or ExactActivations()
        self._arriving: dict[Action, _Arriving] = {}
        self._leaving: dict[Action, tuple[Pending, Tensor]] = {}

    def expect(self, action: Action) -> None:
        source = _before(action)
        if (action.kind, source) not in self._edges:
            return
        # A gradient has the shape of the hidden state that left the lower one of the two stages.
        shape = self._shapes[action.microbatch, action.slice, min(source, action.stage)]
        message = self._boundary.buffer(*shape, self._device)
        over, peer = self._edges[action.kind, source]
        with _NamingStages(action.stage, source):
            _, (pending,) = over.exchange([], [Message(peer, message, _tag(action))])
        self._arriving[action] = _Arriving(pending, message, shape)

    def receive(self, action: Action) -> Tensor:
        arriving = self._arriving.pop(action)
        with _NamingStages(action.stage, _before(action)):
            arriving.pending.wait()
        if action.kind is Kind.BACKWARD:  # a gradient that comes back shows that the hidden state had arrived
            self._let_go(Action(Kind.FORWARD, action.stage, action.microbatch, action.slice))
        return self._boundary.decode(arriving.message, *arriving.shape)

    def send(self, action: Action, tensor: Tensor) -> None:
        target = _after(action)
        _, dtype = self._shapes[action.microbatch, action.slice, min(target, action.stage)]
        message = self._boundary.encode(tensor.to(dtype))  # under autocast it may be of another type than expected
        over, peer = self._edges[action.kind, target]
        with _NamingStages(action.stage, target):
            (pending,), _ = over.exchange([Message(peer, message, _tag(action))], [])
        self._leaving[action] = pending, message  # gloo reads it later

    def close(self) -> None:
        for action in list(self._leaving):
            self._let_go(action)

    def _let_go(self, action: Action) -> None:
        pending, _ = self._leaving.pop(action)
        with _NamingStages(action.stage, _after(action)):
            pending.wait()


class _NamingStages:
    """Calls a lost peer by its stage."""

    def __init__(self, stage: int, peer: int) -> None:
        self._stage, self._peer = stage, peer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PeerLost):
            raise PeerLost(
                f"stage {self._stage} lost stage {self._peer}: it ended or its network is cut; "
                "see that stage's own output"
            ) from error


def _before(action: Action) -> int:
    return action.stage - 1 if action.kind is Kind.FORWARD else action.stage + 1


def _after(action: Action) -> int:
    return action.stage + 1 if action.kind is Kind.FORWARD else action.stage - 1


def _tag(action: Action) -> int:
    """Distinguishes the messages of one direction between two stages."""
    return 2 * (action.microbatch << 12 | action.slice) + (action.kind is Kind.BACKWARD)  # room for 4096 slices
