"""Executor of a stage's part of a schedule: the stage computes each action, a channel sends results without a wait.

Point-to-point messages send hidden states forward and their gradients backward. A `Boundary` encodes them (activation
compression). Training with anything but `ExactActivations` isn't exact. Source: 2301.02654 (compression hurts most at
early boundaries)."""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_decentral.pipeline.compute.model import Shape
from lightning_decentral.pipeline.compute.stage import Stage
from lightning_decentral.pipeline.plan.schedule import TOWARDS, Action, Kind, Posts, two_ahead
from lightning_decentral.shared.plan.timeline import Span
from lightning_decentral.shared.wire.pending import PeerLost, Pending
from lightning_decentral.shared.wire.transport import Message, Transport


class Boundary(ABC):
    """Encoding of messages between stages, with shapes and dtypes known on both sides before sending."""

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the tensor into which a message for a tensor of this shape and dtype is received."""
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    @abstractmethod
    def encode(self, tensor: Tensor) -> Tensor:  # (batch, tokens, width)
        """Encode a tensor as a message of the buffer's shape and dtype; contiguous."""

    @abstractmethod
    def decode(self, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # as `buffer` makes it
        """Decode a message into a tensor of this shape and dtype."""


@dataclass(frozen=True)
class ExactActivations(Boundary):
    """Hidden states and gradients sent as they are, without compression."""

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous()

    def decode(self, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return message


@dataclass(frozen=True)
class Bfloat16Activations(Boundary):
    """Hidden states and gradients rounded to bfloat16: two bytes a number, a relative error of at most 2^-9."""

    def buffer(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(tuple(shape), dtype=torch.bfloat16, device=device)

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16).contiguous()

    def decode(self, message: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # as `buffer` makes it
        return message.to(dtype)


@dataclass(frozen=True)
class Int8Activations(Boundary):
    """Hidden states and gradients in 8 bits: round(127 x / max |x|), a byte a number and 4 for each row's scale.

    The error of a number is at most max |x| / 254 of its row (token)."""

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


class Edge(NamedTuple):
    """Connection that sends in one direction between two neighbouring stages.

    Over NCCL each edge has its own transport: a communicator runs its calls strictly in order, so a message would wait
    behind receives that were posted before. Over gloo, which matches messages by tag, edges may share one."""

    over: Transport
    peer: int  # The neighbour's rank there.


Edges = Mapping[tuple[Kind, int], Edge]  # Edges of one stage: (direction, neighbouring stage) -> edge.


class Channel:
    """Sends and receives one stage's messages to and from its neighbours during one step. `edges`: of this stage; empty
    without neighbours. `shapes`: of each forward message, by (micro-batch, slice, sending stage)."""

    def __init__(
        self,
        edges: Edges,
        shapes: Mapping[tuple[int, int, int], Shape],
        device: torch.device,
        boundary: Boundary | None = None,
    ) -> None:
        self._edges = edges
        self._shapes, self._device, self._boundary = shapes, device, boundary or ExactActivations()
        self._arriving: dict[Action, tuple[Pending, Tensor, Shape]] = {}
        self._leaving: dict[Action, tuple[Pending, Tensor]] = {}

    def expect(self, action: Action) -> None:
        """Post the receive of this action's input, so that it arrives while the stage computes; receives from one
        neighbour must be posted in the schedule's order."""
        source = action.stage - TOWARDS[action.kind]
        if (action.kind, source) not in self._edges:
            return
        # A gradient has the shape of the hidden state that the lower of the two stages sent.
        shape = self._shapes[action.microbatch, action.slice, min(source, action.stage)]
        message = self._boundary.buffer(*shape, self._device)
        over, peer = self._edges[action.kind, source]
        with _naming(action.stage, source):
            _, (pending,) = over.exchange([], [Message(peer, message, _tag(action))])
        self._arriving[action] = pending, message, shape

    def receive(self, action: Action) -> Tensor:
        """Wait for the tensor that was expected for this action."""
        pending, message, shape = self._arriving.pop(action)
        with _naming(action.stage, action.stage - TOWARDS[action.kind]):
            pending.wait()
        if action.kind is Kind.BACKWARD:  # a received gradient shows that the hidden state had arrived
            self._let_go(Action(Kind.FORWARD, action.stage, action.microbatch, action.slice))
        return self._boundary.decode(message, *shape)

    def send(self, action: Action, tensor: Tensor) -> None:  # (batch, tokens, width)
        """Send the action's result to the neighbouring stage."""
        target = action.stage + TOWARDS[action.kind]
        _, dtype = self._shapes[action.microbatch, action.slice, min(target, action.stage)]
        message = self._boundary.encode(tensor.to(dtype))  # under autocast its dtype may differ from the expected one
        over, peer = self._edges[action.kind, target]
        with _naming(action.stage, target):
            (pending,), _ = over.exchange([Message(peer, message, _tag(action))], [])
        self._leaving[action] = pending, message  # gloo reads the message later

    def close(self) -> None:
        """Wait until all messages have been sent."""
        for action in list(self._leaving):
            self._let_go(action)

    def _let_go(self, action: Action) -> None:
        pending, _ = self._leaving.pop(action)
        with _naming(action.stage, action.stage + TOWARDS[action.kind]):
            pending.wait()


@contextmanager
def _naming(stage: int, peer: int) -> Iterator[None]:
    """Raise `PeerLost` with the stage's number for a peer lost in this context."""
    try:
        yield
    except PeerLost as error:
        raise PeerLost(
            f"stage {stage} lost stage {peer}: it ended or its network is cut; see the output of stage {peer}"
        ) from error


def _tag(action: Action) -> int:
    """Message tag, unique for one direction between two stages."""
    return 2 * (action.microbatch << 12 | action.slice) + (action.kind is Kind.BACKWARD)  # room for 4096 slices


LossOf = Callable[[int, Tensor], Tensor]
"""(micro-batch, output of the last stage, all slices joined) -> the loss, a scalar."""

Clock = Callable[[], float]  # Seconds since any moment.
_name = cache(str)  # names of actions, cached: a run has few


class Executor:
    """Executes the actions of one stage in one step. `loss_of`: computes the loss on the last stage, for each
    micro-batch after its last slice's forward. `own`: clock of `own_seconds`; by default the processor time of this
    thread."""

    def __init__(self, stage: Stage, channel: Channel, loss_of: LossOf, own: Clock = time.thread_time) -> None:
        self.stage, self._channel, self._loss_of, self._own = stage, channel, loss_of, own
        self._grads: dict[int, list[Tensor]] = {}
        self._due: dict[int, list[int]] = defaultdict(list)  # slices that went forward, of each micro-batch
        self.spans: dict[Action, Span] = {}
        """Span in which each action computed, without waits for its input; on a device, when it was launched."""
        self.own_seconds: dict[Action, float] = {}
        """Seconds of each action: fewer than its span if the machine does other work meanwhile."""
        self.loss_seconds = 0.0
        """Seconds of the loss, forward and backward, included in `own_seconds`."""

    def run(self, actions: Sequence[Action], posts: Posts | None = None) -> None:
        """Run all actions in order. `posts`: the receives to post before each action; by default two ahead.
        AssertionError: a backward needs another order of actions. PeerLost: a neighbouring stage ended."""
        do = {Kind.FORWARD: self._forward, Kind.BACKWARD: self._backward, Kind.WEIGHTS: self._weights}
        posts = two_ahead(actions) if posts is None else posts
        for action in actions:
            for coming in posts.get(action, ()):
                self._channel.expect(coming)
            with record_function(_name(action)):
                do[action.kind](action)
        self._channel.close()

    @contextmanager
    def _timed(self, action: Action) -> Iterator[None]:
        start, own = time.perf_counter(), self._own()
        yield
        self.own_seconds[action] = self._own() - own
        self.spans[action] = Span(f"stage {action.stage}", start, time.perf_counter())

    def _forward(self, action: Action) -> None:
        hidden = None if self.stage.place.first else self._channel.receive(action)
        with self._timed(action):
            output = self.stage.forward(action.microbatch, action.slice, hidden)
            self._due[action.microbatch].append(action.slice)
            # An evaluation, without gradients, has no loss.
            if self.stage.place.last and action.slice == len(self.stage.bounds) - 1 and torch.is_grad_enabled():
                self._finish(action.microbatch)
        if not self.stage.place.last:
            self._channel.send(action, output)

    def _finish(self, microbatch: int) -> None:
        """Compute the loss over all slices, and its gradient with respect to each slice."""
        own, parts = self._own(), self.stage.outputs.pop(microbatch)
        whole = joined(parts).requires_grad_()  # a leaf: each slice's backward starts from its part of it
        loss = self._loss_of(microbatch, whole)
        with _outside_autocast(whole.device):
            loss.backward()
        grad = torch.zeros_like(whole) if whole.grad is None else whole.grad
        self._grads[microbatch] = list(grad.split([p.shape[1] for p in parts], dim=1)) if len(parts) > 1 else [grad]
        self.loss_seconds += self._own() - own

    def _backward(self, action: Action) -> None:
        due, last = self._due[action.microbatch], self.stage.place.last
        assert action.slice in due, f"{action}: its forward hasn't run"
        assert due[-1] == action.slice, f"{action}: slices {due[due.index(action.slice) + 1 :]} must run backward first"
        due.pop()
        # From the end of the list: slices run backward last first.
        grad = self._grads[action.microbatch].pop() if last else self._channel.receive(action)
        with self._timed(action), _outside_autocast(grad.device):
            towards = self.stage.backward(action.microbatch, action.slice, grad)
        if not self.stage.place.first:
            assert towards is not None
            self._channel.send(action, towards)

    def _weights(self, action: Action) -> None:
        with self._timed(action), _outside_autocast(self.stage.calls[action.microbatch].inputs.device):
            self.stage.weights(action.microbatch, action.slice)


def joined(parts: Sequence[Tensor]) -> Tensor:  # (batch, tokens, ..) each
    """Join all slices' outputs; a single slice is returned as it is and may have one number a sample."""
    return torch.cat(list(parts), dim=1) if len(parts) > 1 else parts[0]


def _outside_autocast(device: torch.device) -> torch.autocast:
    # A step runs in Lightning's autocast; a backward keeps to the types of its forward.
    return torch.autocast(device.type, enabled=False)
