"""Parameters and buffers that come while members train: of one form on all, and masks of one content, or all end.

A mask has no mean. Members that hold different ones train different models, and their mean has the oldest's. What
makes it counts for nothing: `torch.nn.utils.prune`, a parametrization, or a hook that registers a buffer.
"""

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
    """ValueError for Lightning's callback, whose masks are known to differ, before it comes to prune."""
    if any(isinstance(callback, ModelPruning) for callback in callbacks_of(trainer)):
        raise ValueError(
            "ModelPruning doesn't go with elastic: each worker would prune its own, and a newcomer has no masks; prune "
            "before or after the fit"
        )


class LateTensors:
    """Watcher of what is registered in a module until `close`, by torch's hooks: a step without costs nothing."""

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
        # A statistic that is set anew in each step is no news; a mask in the place of another one is.
        statistic = name in module._buffers and not _masks(module, name)
        self._news |= module in self._parts and not statistic

    def check(self, member: Participant, waits: bool = True) -> None:
        """Compare after a round what has come on each member, where something has, and a round `waits` for all members.
        RuntimeError on all members, that it isn't alike; on one, that it came there alone."""
        if not self._news:
            return
        self._news, self._parts = False, set(self._module.modules())
        found = self._late()
        if found == self._agreed:
            return
        self._agreed = found
        if not waits:
            raise RuntimeError(f"{_remedy(next(iter(found), 'a tensor'))}, which members of asynchronous rounds can't")
        if different := member.together(found, partial(_difference, member)):
            raise RuntimeError(different)

    def _late(self) -> dict[str, str]:
        """{tensor that has come: its form, and a digest where it has no mean}."""
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
    """Return whether the buffer is a mask by torch's convention, which may have been there before."""
    return name.endswith("_mask") and f"{name.removesuffix('_mask')}_orig" in module._parameters


def _difference(member: Participant, rows: Sequence[dict[str, str]]) -> str:
    """Describe what isn't alike in all rows, each of one device; empty: all are."""
    names = dict.fromkeys(name for row in rows for name in row)
    differs = next((name for name in names if len({row.get(name) for row in rows}) > 1), None)
    if differs is not None:
        return f"{_remedy(differs)}, and it isn't alike on all members"
    if not names:
        return ""
    end = time.monotonic() + 2 * member.worker.lobby_client.state.times.dead_after
    while len(member.present()) > len(rows):  # fewer gave something: a death isn't known at once
        if time.monotonic() > end:
            return f"{_remedy(next(iter(names)))}, and came on this worker alone"
        time.sleep(LOOK_SECONDS)
    return ""


def _remedy(name: str) -> str:
    return (
        f"{name} has come while training: register it on all elastic workers in one step and alike "
        "(trainer.strategy.broadcast(mask) is the oldest's on all), or before the fit"
    )
