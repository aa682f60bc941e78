"""Point-to-point messages between stages: hidden states down, their gradients up; nobody waits to send."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_decentral.pipeline.compute.activation_codec import Boundary, ExactActivations
from lightning_decentral.pipeline.compute.model import Shape
from lightning_decentral.pipeline.plan.schedule import Action, Kind
from lightning_decentral.shared.wire.pending import PeerLost, Pending
from lightning_decentral.shared.wire.transport import Message, Transport


class Channel(ABC):
    """The way of one stage to its neighbours during one step."""

    @abstractmethod
    def expect(self, action: Action) -> None:
        """Post the receive of what this action begins with; in the order of the schedule."""

    @abstractmethod
    def receive(self, action: Action) -> Tensor:
        """What was expected."""

    @abstractmethod
    def send(self, action: Action, tensor: Tensor) -> None:
        """Hand on what this action came to."""

    @abstractmethod
    def close(self) -> None:
        """Return when everything that was sent has left."""


class Nowhere(Channel):
    """Of the only stage."""

    def expect(self, action: Action) -> None:
        """Nothing comes."""

    def receive(self, action: Action) -> Tensor:
        raise AssertionError(f"{action} has no neighbour")

    def send(self, action: Action, tensor: Tensor) -> None:
        """Nothing goes."""

    def close(self) -> None:
        """Nothing is under way."""


@dataclass
class _Arriving:
    pending: Pending
    message: Tensor
    shape: Shape


class Links(Channel):
    """Over a transport whose ranks are the stages.

    Args:
        forward: for hidden states.
        backward: for gradients; on NCCL another group.
        shapes: shapes(action, stage): of the action's chunk, of what leaves that stage forward.
    """

    def __init__(
        self,
        forward: Transport,
        backward: Transport,
        shapes: Callable[[Action, int], Shape],
        device: torch.device,
        boundary: Boundary | None = None,
    ) -> None:
        self._over = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
        self._shapes, self._device, self._boundary = shapes, device, boundary or ExactActivations()
        self._arriving: dict[Action, _Arriving] = {}
        self._leaving: dict[Action, tuple[int, Pending, Tensor]] = {}
        self.rank, self.size = forward.rank, forward.size

    def expect(self, action: Action) -> None:
        source = _before(action)
        if not 0 <= source < self.size:
            return
        # A gradient has the shape of the hidden state that left the lower one of the two stages.
        shape = self._shapes(action, min(source, action.stage))
        message = self._boundary.buffer(*shape, self._device)
        # Posted before its turn comes, so that the message arrives while the stage computes.
        _, (pending,) = self._exchange(action.kind, source, [], [Message(source, message, _tag(action))])
        self._arriving[action] = _Arriving(pending, message, shape)

    def receive(self, action: Action) -> Tensor:
        arriving = self._arriving.pop(action)
        with _NamingStages(self.rank, _before(action)):
            arriving.pending.wait()
        # A gradient that comes back says that the hidden state had arrived.
        self._let_go([sent for sent in (Action(Kind.FORWARD, *_chunk(action)),) if action.kind is Kind.BACKWARD])
        return self._boundary.decode(arriving.message, *arriving.shape)

    def send(self, action: Action, tensor: Tensor) -> None:
        target = _after(action)
        _, dtype = self._shapes(action, min(target, action.stage))
        message = self._boundary.encode(tensor.to(dtype))  # under autocast it may be of another type than expected
        (pending,), _ = self._exchange(action.kind, target, [Message(target, message, _tag(action))], [])
        self._leaving[action] = target, pending, message  # gloo reads it later

    def close(self) -> None:
        self._let_go(list(self._leaving))

    def _let_go(self, actions: Sequence[Action]) -> None:
        for target, pending, _ in [self._leaving.pop(action) for action in actions]:
            with _NamingStages(self.rank, target):
                pending.wait()

    def _exchange(
        self, kind: Kind, peer: int, sends: Sequence[Message], receives: Sequence[Message]
    ) -> tuple[list[Pending], list[Pending]]:
        with _NamingStages(self.rank, peer):
            return self._over[kind].exchange(sends, receives)


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


def _chunk(action: Action) -> tuple[int, int, int]:
    return action.stage, action.microbatch, action.slice


def _tag(action: Action) -> int:
    """Tells apart the messages of one direction between two stages."""
    return 2 * (action.microbatch << 12 | action.slice) + (action.kind is Kind.BACKWARD)  # room for 4096 slices
