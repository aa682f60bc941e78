"""The mean of gradients over the devices that share them, hidden behind the rest of the backward pass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import Transport

BUCKET_BYTES = 25 * 2**20  # DDP's


class GradientAverage:
    """p.grad <- (1/L) sum over the L devices of p.grad, for every watched parameter.

    Hooks see when a gradient is complete. The gradients of a bucket travel as one all-reduce as soon as all of them
    are, buckets in the same order on every device, the last parameters first; the backward pass meanwhile goes on. No
    wrapper: the module, its names and its forward stay what they are.

    A parameter that a device did not use counts as zero there; one that no device used keeps no gradient. Who used what
    the hosts tell each other: no host reads what its device computes.

    Args:
        over: the transport of the devices that share gradients, for this alone.
        hosts: the same, for CPU tensors.
        meet: runs what waits for the other devices.
        bucket_bytes: of one all-reduce, at most, unless one parameter has more.

    Raises:
        RuntimeError: in the backward pass, where a gradient grows again after it was sent.
    """

    def __init__(
        self, over: Transport, hosts: Transport, meet: Callable[[Callable[[], None]], Any], bucket_bytes: int
    ) -> None:
        self._over, self._hosts, self._meet, self._bucket_bytes = over, hosts, meet, bucket_bytes
        self._hooks: dict[nn.Parameter, Any] = {}
        self._buckets: list[_Bucket] = []
        self._of: dict[nn.Parameter, _Bucket] = {}
        self._launched = 0
        self._open, self._blocked = False, False

    def watch(self, parameters: Sequence[nn.Parameter]) -> None:
        """These are averaged from the next backward pass on; those that are already cost a look-up."""
        new = [p for p in parameters if p.requires_grad and p not in self._hooks]
        if new:
            self._hooks.update({p: p.register_post_accumulate_grad_hook(self._ready) for p in new})
            self._buckets = _buckets([p for p in parameters if p in self._hooks], self._bucket_bytes)
            self._of = {p: bucket for bucket in self._buckets for p in bucket.parameters}

    def close(self) -> None:
        """Average no longer."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, self._buckets, self._of = {}, [], {}

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Gradients are only accumulated meanwhile."""
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

    def begin(self) -> None:
        """Before a step: it averages at least once, on every device."""
        self._open = True

    def finish(self) -> None:
        """Average what no backward pass has averaged since `begin`."""
        if self._open:
            self._land()

    def _ready(self, parameter: nn.Parameter) -> None:
        if self._blocked:
            return
        bucket = self._of[parameter]
        if not any(b.ready for b in self._buckets):
            torch.autograd.Variable._execution_engine.queue_callback(self._land)
        if parameter in bucket.ready:
            raise RuntimeError(
                "a gradient grew again after it was sent to the other devices of the island: "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket.ready.add(parameter)
        while self._launched < len(self._buckets) and self._buckets[self._launched].complete:
            self._launch()

    def _launch(self) -> None:
        self._buckets[self._launched].launch(self._over)
        self._launched += 1

    def _land(self) -> None:
        self._meet(self._wait)

    def _wait(self) -> None:
        while self._launched < len(self._buckets):
            self._launch()
        used = self._used()
        for bucket in self._buckets:
            bucket.land(used)
        self._launched, self._open = 0, False

    def _used(self) -> set[nn.Parameter]:
        """Parameters that have a gradient here or on another device; only who lacks one waits for the others."""
        parameters = [p for bucket in self._buckets for p in bucket.parameters]
        have = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
        complete = bool(have.all())
        pending = self._hosts.all_reduce(have)
        if complete:
            return set(parameters)
        pending.wait()
        return {p for p, devices in zip(parameters, have.tolist(), strict=True) if devices}


class _Bucket:
    """The gradients of some parameters of one type."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self.ready: set[nn.Parameter] = set()
        self._sizes = [p.numel() for p in parameters]
        self._flat: Tensor | None = None
        self._pending: Pending | None = None

    @property
    def complete(self) -> bool:
        return len(self.ready) == len(self.parameters)

    @torch.no_grad()
    def launch(self, over: Transport) -> None:
        first = self.parameters[0]
        gradients = [p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in self.parameters]
        self._flat = torch.cat(gradients).to(first.dtype).div_(over.size)
        self._pending = over.all_reduce(self._flat)

    @torch.no_grad()
    def land(self, used: set[nn.Parameter]) -> None:
        assert self._flat is not None
        assert self._pending is not None
        self._pending.wait()
        for parameter, mean in zip(self.parameters, self._flat.split(self._sizes), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(mean.view_as(parameter))
            elif parameter in used:
                parameter.grad = mean.view_as(parameter).clone(memory_format=torch.preserve_format)
        self._flat, self._pending = None, None
        self.ready.clear()


def _buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """In reverse order, one type and device each: the last parameters have their gradients first."""
    groups: dict[tuple[torch.dtype, torch.device], list[list[nn.Parameter]]] = {}
    for parameter in reversed(list(dict.fromkeys(parameters))):
        rows = groups.setdefault((parameter.dtype, parameter.device), [[]])
        if rows[-1] and sum(p.numel() * p.element_size() for p in (*rows[-1], parameter)) > bucket_bytes:
            rows.append([])
        rows[-1].append(parameter)
    return [_Bucket(members) for rows in groups.values() for members in rows]
