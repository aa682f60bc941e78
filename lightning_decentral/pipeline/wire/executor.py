"""Executes a stage's part of a schedule, action by action: the schedule decides, the stage computes."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_decentral.pipeline.compute.stage import Stage
from lightning_decentral.pipeline.plan.posting import Posts, two_ahead
from lightning_decentral.pipeline.plan.schedule import Action, Kind
from lightning_decentral.pipeline.wire.channel import Channel
from lightning_decentral.shared.plan.timeline import Span

Close = Callable[[int, Tensor], Tensor]
"""(micro-batch, output of the last stage, all slices together) -> the scalar that goes back."""

Clock = Callable[[], float]
"""Seconds since any moment."""


class Executor:
    """The actions of one stage in one step.

    Args:
        close: of the last stage; called once for each micro-batch, when its last slice has come through.
        own: what `own_seconds` are read from; by default the processor time of this thread.
    """

    def __init__(self, stage: Stage, channel: Channel, close: Close, own: Clock = time.thread_time) -> None:
        self._stage, self._channel, self._close, self._own = stage, channel, close, own
        self._grads: dict[int, list[Tensor]] = {}
        self._due: list[tuple[int, int]] = []
        self.most_chunks_held = 0
        self.spans: dict[Action, Span] = {}
        """Span in which each action computed, without its wait for what comes in; on a device, when it was launched."""
        self.own_seconds: dict[Action, float] = {}
        """Seconds of each action: fewer than its span where the machine does something else meanwhile."""
        self.loss_seconds = 0.0
        """Seconds of the loss, forward and backward, within `own_seconds`."""

    def run(self, actions: Sequence[Action], posts: Posts | None = None) -> None:
        """Take all actions in order.

        Args:
            posts: which receives are posted before which of them; by default two ahead.

        Raises:
            AssertionError: the order isn't one that a backward needs.
            PeerLost: a neighbouring stage ended.
        """
        do = {Kind.FORWARD: self._forward, Kind.BACKWARD: self._backward, Kind.WEIGHTS: self._finish_backward}
        posts = two_ahead(actions) if posts is None else posts
        for action in actions:
            for coming in posts.get(action, ()):
                self._channel.expect(coming)
            with record_function(str(action)):
                do[action.kind](action)
            self.most_chunks_held = max(self.most_chunks_held, self._stage.chunks_held)
        self._channel.close()

    @contextmanager
    def _timed(self, action: Action) -> Iterator[None]:
        start, own = time.perf_counter(), self._own()
        yield
        self.own_seconds[action] = self._own() - own
        self.spans[action] = Span(f"stage {action.stage}", start, time.perf_counter())

    def _forward(self, action: Action) -> None:
        hidden = None if self._stage.place.first else self._channel.receive(action)
        with self._timed(action):
            output = self._stage.forward(action.microbatch, action.slice, hidden)
            self._due.append((action.microbatch, action.slice))
            # An evaluation, without gradients, has no loss.
            if self._stage.place.last and action.slice == len(self._stage.bounds) - 1 and torch.is_grad_enabled():
                own = self._own()
                self._finish(action.microbatch)
                self.loss_seconds += self._own() - own
        if not self._stage.place.last:
            self._channel.send(action, output)

    def _finish(self, microbatch: int) -> None:
        """The loss over all slices, and its gradient towards each of them."""
        parts = self._stage.outputs.pop(microbatch)
        whole = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        whole.requires_grad_()  # a leaf: each slice goes on from here with its part when its turn comes
        loss = self._close(microbatch, whole)
        with _outside_autocast(whole.device):
            loss.backward()
        grad = torch.zeros_like(whole) if whole.grad is None else whole.grad
        self._grads[microbatch] = (
            list(grad.split([part.shape[1] for part in parts], dim=1)) if len(parts) > 1 else [grad]
        )

    def _backward(self, action: Action) -> None:
        key = action.microbatch, action.slice
        later = [s for m, s in self._due if m == action.microbatch and s > action.slice]
        assert key in self._due, f"{action}: hasn't gone forward"
        assert not later, f"{action}: slices {later} must come back first"
        self._due.remove(key)
        last = self._stage.place.last
        # From the end of the list, as slices come back last first.
        grad = self._grads[action.microbatch].pop() if last else self._channel.receive(action)
        with self._timed(action), _outside_autocast(grad.device):
            towards = self._stage.backward(*key, grad)
        if not self._stage.place.first:
            assert towards is not None
            self._channel.send(action, towards)

    def _finish_backward(self, action: Action) -> None:
        device = self._stage.calls[action.microbatch].inputs.device
        with self._timed(action), _outside_autocast(device):
            self._stage.weights(action.microbatch, action.slice)


def _outside_autocast(device: torch.device) -> torch.autocast:
    # A step runs in Lightning's autocast; a backward keeps to the types of its forward.
    return torch.autocast(device.type, enabled=False)
