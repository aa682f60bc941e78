"""Executes a stage's part of a schedule, action by action: the schedule decides, the stage computes.

Receives are posted before the actions that need them:

    two ahead    the action's own and two more: one that is needed next, one that travels meanwhile
    in step      those that are sent before the action in one order of all stages' actions

By NCCL a posted receive is a running kernel, and so is a send until its receive is posted. What waits for a whole
device (memory that is given back, a kernel's first loading, `torch.cuda.synchronize`) waits for both. Two ahead, the
sender may need something of this very stage, whose host stands still. In step, a stage that stands before X has sent
only what comes before X, and posted exactly what is sent before X: it waits for stages alone that stand at something
earlier. So the earliest of those that wait goes on, however many wait at once, wherever, however large messages are.

By gloo a host waits for its messages, one by one: there two ahead is safe, and in step would come late.
"""

import time
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_decentral.pipeline.compute.stage import Stage
from lightning_decentral.pipeline.plan.schedule import Action, Kind, equally_long
from lightning_decentral.pipeline.wire.channel import Channel
from lightning_decentral.shared.plan.timeline import Span

AHEAD = 2
Posts = Mapping[Action, Sequence[Action]]
"""action -> those whose receives are posted before it, in order."""


def two_ahead(actions: Sequence[Action]) -> Posts:
    """Post receives two ahead, for a stage with these actions."""
    coming = [action for action in actions if action.kind is not Kind.WEIGHTS]
    later = zip(coming[1:], coming[AHEAD + 1 :], strict=False)
    return {coming[0]: coming[: AHEAD + 1], **{action: [expected] for action, expected in later}}


def in_step(stages: Sequence[Sequence[Action]], num_slices: int) -> list[Posts]:
    """Post receives in step, for each of these stages; all must ask with the same actions."""
    order = {action: _moment(action, span.start) for action, span in equally_long(stages, num_slices).items()}

    def posts(own: Sequence[Action]) -> Posts:
        found: dict[Action, list[Action]] = {}
        moments = [order[action] for action in own]
        for action in own:
            for needed in action.needs(len(stages), num_slices):
                if needed.stage != action.stage:
                    found.setdefault(own[bisect(moments, order[needed])], []).append(action)
        return found

    return [posts(own) for own in stages]


def _moment(action: Action, start: float) -> tuple[float, bool, int]:
    """Place of an action in the order: its start; of those that start at once senders come first, so what they send is
    received before its turn. Any order would do in which nothing comes before what it needs."""
    forward = action.kind is Kind.FORWARD
    return start, not forward, action.stage if forward else -action.stage


Close = Callable[[int, Tensor], Tensor]
"""(micro-batch, output of the last stage, all slices together) -> the scalar that goes back."""

_name = cache(str)  # of an action: a profile names each, and a run has few

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
