"""Parameters under FSDP2 that a step of one device uses and one of another doesn't."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Used:
    """Parameters that only some devices of an island use in a step (experts), and those that none does.

    FSDP reduces a module's gradients in one message, which has another size where a device lacks some. It gets zeros
    for them here. One that no device used has no gradient, as under ddp with find_unused_parameters.

    Args:
        groups: FSDP's, of parameters that are gathered and reduced together.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups
        self._used, self._filled = set[nn.Parameter](), set[nn.Parameter]()
        for group in self._groups:
            group.post_backward = partial(self._fill, group, group.post_backward)

    def _fill(self, group: Any, post_backward: Callable[..., None], *args: Any) -> None:
        """Add zeros for unused parameters, then reduce the module's gradients."""
        gathered = [p for p in group.fsdp_params if "_unsharded_param" in vars(p) and p._unsharded_param.requires_grad]
        for parameter in gathered:
            if parameter.unsharded_accumulated_grad is not None or parameter._unsharded_param.grad is not None:
                self._used.add(parameter.sharded_param)
            elif group.reduce_grads:  # not while gradients are only accumulated: the next backward may use it
                parameter._unsharded_param.grad = torch.zeros_like(parameter._unsharded_param)
                if parameter.sharded_param.grad is None:
                    self._filled.add(parameter.sharded_param)
        post_backward(*args)

    def settle(self, start: Callable[[Tensor], Callable[[], object]]) -> None:
        """Take back, after a backward, the zeros of what nobody used.

        Of two gloo devices on a busy host it takes 4% of a step of 33 ms (6% where all waited for the sum). Of a step
        with 10 million parameters, 340 ms, it takes nothing that could be distinguished from noise.

        Args:
            start: a host tensor's sum over the devices, in place; returns what waits for it. Collective.
        """
        if not all(group.reduce_grads for group in self._groups):
            return  # gradients are only accumulated
        every = [parameter.sharded_param for group in self._groups for parameter in group.fsdp_params]
        flags = torch.tensor([parameter in self._used for parameter in every], dtype=torch.int32)
        wait = start(flags)
        if self._filled:  # else this device has nothing to take back
            wait()
            for parameter, devices in zip(every, flags.tolist(), strict=True):
                if not devices and parameter in self._filled:
                    parameter.grad = None
        self._used, self._filled = set(), set()
