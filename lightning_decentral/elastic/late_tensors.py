"""Checks parameters and buffers registered during training: they must be equal on all members (masks bit for bit).

A mask has no mean. Members with different masks train different models, and the mean model has the oldest's masks.
The check covers `torch.nn.utils.prune`, parametrizations and hooks that register a buffer alike."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.nn.modules import module as registration

from lightning_decentral.elastic.wire.participant import Participant
from lightning_decentral.shared.compute.carried import carried
from lightning_decentral.shared.compute.worker_state import digest
from lightning_decentral.shared.evaluation import callbacks_of

LOOK_SECONDS = 0.05
HOOKS = (
    registration.register_module_buffer_registration_hook,
    registration.register_module_parameter_registration_hook,
    registration.register_module_module_registration_hook,
)


def refuse_pruning(trainer: Trainer) -> None:
    """Raise a ValueError if the Trainer has Lightning's ModelPruning callback, whose masks differ among workers."""
    if any(isinstance(callback, ModelPruning) for callback in callbacks_of(trainer)):
        raise ValueError(
            "ModelPruning isn't compatible with elastic: each worker makes its own masks, and a newcomer has none; "
            "prune before or after the fit"
        )


class LateTensors:
    """Records, by torch's hooks, new tensors of a module until `close`; a step without new ones costs nothing."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._first = frozenset(_named(module))
        self._parts = set(module.modules())
        self._news = False
        self._agreed = self._late()
        self._hooks = [register(self._registered) for register in HOOKS]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _registered(self, module: nn.Module, name: str, value: Any) -> None:
        # A statistic that each step registers again doesn't count as new; a mask that replaces another mask does.
        statistic = name in module._buffers and not _masks(module, name)
        self._news |= module in self._parts and not statistic

    def check(self, member: Participant, waits: bool = True) -> None:
        """Compare after a round the tensors that members have registered, if rounds `wait` for all. RuntimeError on all
        members if the tensors differ, on one member if it alone registered them."""
        if not self._news:
            return
        self._news, self._parts = False, set(self._module.modules())
        found = self._late()
        if found == self._agreed:
            return
        self._agreed = found
        if not waits:
            raise RuntimeError(f"{_remedy(next(iter(found), 'a tensor'))}; asynchronous rounds have no common step")
        if different := member.together(found, partial(_difference, member)):
            raise RuntimeError(different)

    def _late(self) -> dict[str, str]:
        """Return {tensor registered since the start: its shape and type, and a digest if it has no mean}."""
        named = _named(self._module)
        rows, parts = carried(self._module), self._module.named_modules()
        masks = {f"{prefix}.{n}".lstrip(".") for prefix, part in parts for n in part._buffers if _masks(part, n)}
        found = dict[str, str]()
        for name, tensor in named.items():
            if name not in self._first or name in masks:
                found[name] = f"{tuple(tensor.shape)} {tensor.dtype}"
                no_mean = name in rows or name in masks or bool(((tensor == 0) | (tensor == 1)).all())
                if not tensor.requires_grad and no_mean:
                    found[name] += f" {digest(tensor)}"
        return found


def _named(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _masks(module: nn.Module, name: str) -> bool:
    """Return whether torch's naming convention makes this buffer a pruning mask."""
    return name.endswith("_mask") and f"{name.removesuffix('_mask')}_orig" in module._parameters


def _difference(member: Participant, rows: Sequence[dict[str, str]]) -> str:
    """Describe the first tensor that differs among the rows, one per device; empty if all rows are alike."""
    names = dict.fromkeys(name for row in rows for name in row)
    differs = next((name for name in names if len({row.get(name) for row in rows}) > 1), None)
    if differs is not None:
        return f"{_remedy(differs)}; it differs among the members"
    if not names:
        return ""
    end = time.monotonic() + 2 * member.worker.lobby_client.state.times.dead_after
    while len(member.present()) > len(rows):  # fewer values than members: a death isn't known at once
        if time.monotonic() > end:
            return f"{_remedy(next(iter(names)))}; only this worker registered it"
        time.sleep(LOOK_SECONDS)
    return ""


def _remedy(name: str) -> str:
    return (
        f"{name} was registered during training: register it on all elastic workers in the same step and alike "
        "(trainer.strategy.broadcast(mask) returns the oldest worker's mask), or before the fit"
    )
