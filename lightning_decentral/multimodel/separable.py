"""Whether an optimizer updates each parameter from its own gradient and state alone: tried on two of them, on copies.

step({a, b}) = step({a}), step({b}), several times
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

TRIED = 3  # what a first step leaves in the state acts in the next one

Groups = list[dict[str, Any]]


def refuse_joint(optimizer: Optimizer) -> None:
    """ValueError for an optimizer whose step needs the closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the loss within its step, with all parameters updated: "
            "update on the host (update=OnHost())"
        )


def verify(optimizer: Optimizer, step: Callable[[], Any], parameters: Sequence[Tensor]) -> None:
    """ValueError where two of the parameters, the smallest, come out otherwise apart than together."""
    two = sorted(parameters, key=torch.Tensor.numel)[:2]
    together, apart = (_tried(optimizer, step, visits) for visits in ([two], [[one] for one in two]))
    if not all(map(torch.equal, together, apart)):
        raise ValueError(
            f"{type(optimizer).__name__} updates a parameter with what it knows of others: "
            "update on the host (update=OnHost())"
        )


def only(groups: Groups, parameters: Sequence[Tensor]) -> Groups:
    """The groups with these parameters alone."""
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
