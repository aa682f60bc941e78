"""Optimizer update: on the host, where parameters, gradients and state live, or streamed through the device (offload).

On the device a few parameters at a time are updated; parameter, gradient and state are copied there and back.

present + sum over parameters updated together of (parameter + gradient + state + temporary memory) <= memory_bytes"""

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_decentral.spilled.compute.transfer import Counting, OffloadDevice

Step = Callable[[], Any]
Groups = list[dict[str, Any]]
Updating = Callable[[Optimizer, Mapping[str, Tensor]], AbstractContextManager[None]]
"""Context around an optimizer's step, made from the optimizer and the module's parameters by name."""
TRIED = 3  # the state of a first step acts in the next one


class Update(ABC):
    """Policy for where the optimizer's update runs: on the host or on the device."""

    def refuse(self, optimizer: Optimizer) -> None:  # noqa: B027  # a host takes every optimizer
        """Raise ValueError for an optimizer that can't run there."""

    @abstractmethod
    def begin(self, device: OffloadDevice, budget_bytes: int) -> Updating:
        """Return the context in which a run's updates are made."""


@dataclass(frozen=True)
class OnHost(Update):
    """Update on the host: any optimizer, all parameters at once, at the speed of the host's memory."""

    def begin(self, device: OffloadDevice, budget_bytes: int) -> Updating:
        return lambda optimizer, named: nullcontext()  # parameters, gradients and state are on the host already


@dataclass(frozen=True)
class OnDevice(Update):
    """Update on the device, as many parameters at a time as fit, with their gradients and state: for optimizers that
    update each parameter independently."""

    def refuse(self, optimizer: Optimizer) -> None:
        # The first update finds other optimizers that aren't independent.
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{type(optimizer).__name__} evaluates the loss within its step, with all parameters updated: "
                "update on the host (update=OnHost())"
            )

    def begin(self, device: OffloadDevice, budget_bytes: int) -> Updating:
        return StreamedUpdate(device, budget_bytes).around


class StreamedUpdate:
    """Replaces an optimizer's step by one streamed through the device, within its total budget of `budget_bytes`."""

    def __init__(self, device: OffloadDevice, budget_bytes: int) -> None:
        self._device, self._budget_bytes = device, budget_bytes
        self._optimizer: Optimizer | None = None
        self._needs: dict[Tensor, tuple[torch.Size, int]] = {}  # (shape, bytes), once this optimizer has updated it

    @contextmanager
    def around(self, optimizer: Optimizer, named: Mapping[str, Tensor]) -> Iterator[None]:
        """Context manager in which `optimizer.step` brings the tensors that it updates to the device. ValueError: a
        parameter whose update exceeds the budget, or an optimizer that updates a parameter by the values of others."""
        own = vars(optimizer).get("step")  # a scheduler's step, which counts
        plain = optimizer.step

        def step(closure: Callable[[], Any] | None = None) -> Any:
            # Before any copy: forward and backward load the host's parameters themselves.
            with torch.enable_grad():
                loss = closure() if closure is not None else None
            self._update(optimizer, plain, named)
            return loss

        vars(optimizer)["step"] = step
        try:
            yield
        finally:
            del vars(optimizer)["step"]
            vars(optimizer).update({} if own is None else {"step": own})  # the scheduler's step continues to count

    def _update(self, optimizer: Optimizer, plain: Step, named: Mapping[str, Tensor]) -> None:
        if self._optimizer is not optimizer:
            self._optimizer, self._needs = optimizer, {}
        every = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
        given = [p for p in every if p.grad is not None]
        # Groups may have lost parameters, or parameters changed their shape.
        self._needs = {p: (shape, n) for p, (shape, n) in self._needs.items() if p in every and shape == p.shape}
        room = self._budget_bytes - self._device.present_bytes()
        for parameter in given:
            least = 2 * parameter.numel() * parameter.element_size()
            if least > room:
                raise ValueError(_too_small(parameter, self._budget_bytes - room + least, self._budget_bytes, named))
        if not self._needs:
            verify(optimizer, plain, given)
        for together in self._fitting(given, room):
            if together[0] in self._needs:
                self._visit(optimizer, plain, together)
            else:
                self._measure(optimizer, plain, together[0], named)
        if not given:
            plain()  # a scheduler that counts steps counts this one

    def _fitting(self, given: Sequence[Tensor], room: int) -> Iterator[list[Tensor]]:
        """Yield parameters in order, as lists that fit `room` bytes; an unmeasured parameter comes alone."""
        together, used = list[Tensor](), 0
        for parameter in given:
            # An unmeasured parameter takes all the room, so it comes alone: its state may appear only with its update.
            need = self._needs.get(parameter, (None, room))[1]
            if together and used + need > room:
                yield together
                together, used = [], 0
            together.append(parameter)
            used += need
        if together:
            yield together

    def _measure(self, optimizer: Optimizer, plain: Step, parameter: Tensor, named: Mapping[str, Tensor]) -> None:
        before = self._device.present_bytes()
        self._device.forget_peak()
        with Counting(self._device.ledger, {}):
            self._visit(optimizer, plain, [parameter])
        need = self._device.peak_bytes() - before
        if before + need > self._budget_bytes:
            raise ValueError(_too_small(parameter, before + need, self._budget_bytes, named))
        self._needs[parameter] = parameter.shape, need

    def _visit(self, optimizer: Optimizer, plain: Step, together: Sequence[Tensor]) -> None:
        groups = optimizer.param_groups
        optimizer.param_groups = only(groups, together)
        before = [dict(group) for group in optimizer.param_groups]
        try:
            with ExitStack() as stack:
                for group in before:
                    for parameter in group["params"]:
                        stack.enter_context(on_device(self._device, optimizer, parameter, group))
                plain()
                for group, was in zip(optimizer.param_groups, before, strict=True):
                    # State for all parameters of a group: each partial update of the group would change it anew.
                    changed = [key for key in group if key != "params" and group[key] is not was.get(key)]
                    if changed:
                        raise ValueError(
                            f"{type(optimizer).__name__} keeps {changed[0]!r} for all parameters of a group and "
                            "changes it in each update: update on the host (update=OnHost())"
                        )
        finally:
            optimizer.param_groups = groups
        self._device.settle()  # copies have arrived, and freed memory isn't used any more


@contextmanager
def on_device(
    device: OffloadDevice, optimizer: Optimizer, parameter: Tensor, group: Mapping[str, Any]
) -> Iterator[None]:
    """Move one parameter, its gradient and its state to the device in this context, then back into the same tensors.
    ValueError: tensors within lists, which wouldn't move."""
    assert parameter.grad is not None
    host, gradient = parameter.data, parameter.grad  # of the same shape, on the host
    state: MutableMapping[str, Any] = optimizer.state.get(parameter, {})
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    # A counter stays on the host, unless the optimizer needs it next to the parameter.
    moves = bool(group.get("capturable") or group.get("fused"))
    left = {key: value for key, value in tensors.items() if value.dim() or moves}
    try:
        # In one call, with one event.
        parameter.data, parameter.grad, *states = device.fetch([host, gradient, *left.values()]).ready()
        state.update(zip(left, states, strict=True))
        yield
        state = optimizer.state.get(parameter, {})  # the state may have appeared only now
        for key, value in state.items():
            if not isinstance(value, Tensor) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
                raise ValueError(f"the optimizer's {key!r} contains tensors: update on the host (update=OnHost())")
        device.put([parameter.data], [host])
        there = {
            key: value
            for key, value in state.items()
            if isinstance(value, Tensor) and value.device == device.place
            if key in left or value is not tensors.get(key)  # a tensor that stayed
        }
        form = {key: (value.shape, value.dtype) for key, value in left.items()}
        old = {key: value for key, value in there.items() if form.get(key) == (value.shape, value.dtype)}
        device.put(list(old.values()), [left[key] for key in old])
        new = {key: value for key, value in there.items() if key not in old}
        landed = device.send(list(new.values())).land()
        left = {**{key: left[key] for key in old}, **dict(zip(new, landed, strict=True))}
    finally:
        parameter.data, parameter.grad = host, gradient
        state.update(left)


def _too_small(parameter: Tensor, needed_bytes: int, budget_bytes: int, named: Mapping[str, Tensor]) -> str:
    name = next((name for name, other in named.items() if other is parameter), "of no name")
    return (
        f"parameter {name} needs {needed_bytes} bytes for an update on the device, over memory_bytes={budget_bytes}: "
        f"give at least {needed_bytes}, or update on the host (update=OnHost())"
    )


def verify(optimizer: Optimizer, step: Callable[[], Any], parameters: Sequence[Tensor]) -> None:
    """Raise ValueError if the two smallest parameters are updated differently alone than together."""
    two = sorted(parameters, key=torch.Tensor.numel)[:2]
    together, separately = (_tried(optimizer, step, visits) for visits in ([two], [[one] for one in two]))
    if not all(map(torch.equal, together, separately)):
        raise ValueError(
            f"{type(optimizer).__name__} updates a parameter using others: update on the host (update=OnHost())"
        )


def only(groups: Groups, parameters: Sequence[Tensor]) -> Groups:
    chosen = set(map(id, parameters))
    return [{**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in groups]


def _tried(optimizer: Optimizer, step: Callable[[], Any], visits: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    parameters = [parameter for visit in visits for parameter in visit]
    held = [(p, p.data, p.grad, optimizer.state.get(p)) for p in parameters]
    groups, random = optimizer.param_groups, torch.get_rng_state()
    try:
        for parameter, data, gradient, state in held:
            _put(optimizer, parameter, data.clone(), copy.deepcopy(gradient), copy.deepcopy(state))
        for visit in [*visits] * TRIED:
            optimizer.param_groups = only(groups, visit)
            step()
        return [parameter.data for parameter in parameters]
    finally:
        optimizer.param_groups = groups
        torch.set_rng_state(random)
        for entry in held:
            _put(optimizer, *entry)


def _put(optimizer: Optimizer, parameter: Tensor, data: Tensor, gradient: Tensor | None, state: Any) -> None:
    parameter.data, parameter.grad = data, gradient
    if state is None:
        optimizer.state.pop(parameter, None)
    else:
        optimizer.state[parameter] = state
