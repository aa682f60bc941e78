"""What the user's step logs on the last stage of a pipeline, logged on all."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from lightning_decentral.shared.wire.objects import gather_objects


class Logged(NamedTuple):
    """One call of `self.log`."""

    name: str
    options: dict[str, Any]


class Logs:
    """What the user's step logs, kept until every stage can log it."""

    def __init__(self, module: LightningModule) -> None:
        self._module: Any = module
        self._known: dict[int, list[Logged]] = {}
        self._calls: list[Logged] = []
        self.values: list[list[Tensor]] = []
        """Of each micro-batch, scalars, which no host reads here."""

    def begin(self) -> None:
        self._calls, self.values = [], []

    def recording(self, keep: bool) -> "_Recording":
        """Within, `self.log` of the module keeps, or drops, what it is given."""
        if keep:
            self._calls, self.values = [], [*self.values, []]
        return _Recording(self._module, self._take if keep else _drop)

    def _take(self, name: str, value: Any, **options: Any) -> None:
        if isinstance(value, Metric):
            raise ValueError(
                f"self.log({name!r}, ...) got a {type(value).__name__} in training_step, which only the last stage of "
                "a pipeline updates: log its value instead"
            )
        self._calls.append(Logged(name, options))
        # A copy: the user may go on to change it.
        self.values[-1].append(torch.as_tensor(value).detach().clone().reshape(()))

    @property
    def signature(self) -> int:
        """The same for the same names and options."""
        # Not `hash`, which differs between processes.
        return zlib.crc32(repr(self._calls).encode())

    def publish(self, signature: int, values: Sequence[Tensor], pipe: StageRunner) -> None:
        """Log on every stage what the last one was given. Collective where the names are new."""
        if signature not in self._known:
            rows = [self._calls] if pipe.over is None else gather_objects(pipe.over, self._calls)
            self._known[signature] = rows[-1]
        for (name, options), value in zip(self._known[signature], values, strict=True):
            self._module.log(name, value, **options)


def _drop(name: str, value: Any, **_: Any) -> None:
    pass


class _Recording:
    def __init__(self, module: Any, take: Callable[..., None]) -> None:
        self._module, self._take = module, take

    def __enter__(self) -> None:
        self._module.log = self._take

    def __exit__(self, *_: object) -> None:
        del self._module.log  # the class's own again
