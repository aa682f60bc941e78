"""Logging on all stages of a pipeline: the user's step computes logged values on the last stage only."""

import inspect
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.memory import recursive_detach
from torch import Tensor
from torchmetrics import Metric

from lightning_decentral.pipeline.wire.stage_runner import StageRunner

CALL = inspect.signature(LightningModule.log)


class Logged(NamedTuple):
    """One call of `self.log`."""

    name: str
    options: dict[str, Any]


class Logs:
    """Records the values that the user's step logs, until every stage can log them."""

    def __init__(self, module: LightningModule) -> None:
        self._module: Any = module
        self._known: dict[int, tuple[list[Logged], list[Any]]] = {}
        self._calls: list[list[Logged]] = []
        self._others: list[dict[Any, Any]] = []
        self.values: list[list[Tensor]] = []
        """[micro-batch]: logged scalars, which no host reads here."""

    def begin(self, microbatches: int) -> None:
        self._calls, self._others = [[] for _ in range(microbatches)], []
        self.values = [[] for _ in range(microbatches)]

    @contextmanager
    def recording(self, microbatch: int | None) -> Iterator[None]:
        """Record the module's `self.log` calls for this micro-batch in this context; None discards them."""
        self._module.log = (lambda *_, **__: None) if microbatch is None else partial(self._take, microbatch)
        try:
            yield
        finally:
            del self._module.log  # the class's own again

    def returned(self, result: Any) -> Any:
        """Return the loss from a step's result, and keep the result's other values."""
        if not isinstance(result, Mapping):
            return result
        # Detached: a graph would keep the micro-batch's activations.
        self._others.append({k: recursive_detach(value) for k, value in result.items() if k != "loss"})
        return result["loss"]

    def _take(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        given = CALL.bind(None, *args, **kwargs).arguments  # arguments passed by position
        name, value = given["name"], given["value"]
        if isinstance(value, Metric):
            raise ValueError(
                f"self.log({name!r}, ...) got a {type(value).__name__} in training_step, but only the last stage of a "
                "pipeline updates the metric: log its value instead"
            )
        options = {key: option for key, option in given.items() if key not in ("self", "name", "value")}
        self._calls[microbatch].append(Logged(name, options))
        # A copy: the user may change the value later.
        self.values[microbatch].append(torch.as_tensor(value).detach().clone().reshape(()))

    def columns(self) -> list[tuple[Tensor, ...]]:
        """List each logged value's column: its values for all micro-batches. ValueError: the step logs different names
        for two micro-batches."""
        names = [[name for name, _ in calls] for calls in self._calls]
        for odd in (row for row in names if row != names[-1]):
            raise ValueError(
                f"training_step logs {odd} for one micro-batch and {names[-1]} for another, so their means are "
                "undefined: log the same names in every call, or use microbatches=1"
            )
        return list(zip(*self.values, strict=True))

    @property
    def signature(self) -> int:
        """A checksum of the names and options that the last step logged."""
        # Not `hash`, which differs between processes.
        return zlib.crc32(repr((self._calls[-1], self._keys)).encode())

    @property
    def _keys(self) -> list[Any]:
        return list(self._others[-1]) if self._others else []

    def publish(self, signature: int, values: Sequence[Tensor], pipe: StageRunner) -> dict[Any, Any]:
        """Log on every stage the values that the last stage got. Collective where the names are new. Returns what the
        step returned in addition to its loss, on the last stage; for several micro-batches a list. On other stages each
        value is None."""
        if signature not in self._known:
            mine = self._calls[-1] if self._calls else [], self._keys
            self._known[signature] = pipe.gather(mine)[-1]
        calls, keys = self._known[signature]
        for (name, options), value in zip(calls, values, strict=True):
            self._module.log(name, value, **options)
        rows, self._others = self._others, []  # the next step needs the memory
        if len(rows) > 1:
            return {key: [row.get(key) for row in rows] for key in keys}
        return rows[0] if rows else dict.fromkeys(keys)
