"""Models built in `configure_model`: each stage gets memory for its own part only, with the values of the whole."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_decentral.pipeline.deferred import Deferred
from lightning_decentral.pipeline.workers import PipelineWorkers


class PipelineBuilding(PipelineWorkers):
    """The part of `TokenPipelineStrategy` that builds modules.

    What is built in `__init__` has memory at once; what `configure_model` builds waits until its stage is known.
    """

    def __init__(self, **workers: Any) -> None:
        super().__init__(**workers)
        self._deferred = Deferred()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around `configure_model`. Every worker draws what worker 0 would draw on its CPU. Collective."""
        own = torch.get_rng_state()
        first = self.broadcast(own)
        torch.set_rng_state(first)
        with torch.device("cpu"), self._deferred:
            yield
        if not torch.equal(own, first):
            torch.set_rng_state(own)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Lightning's; where there is no memory yet it's written down."""
        with self._deferred.again():
            super().load_model_state_dict(checkpoint, strict=strict)

    def _convert(self, module: nn.Module) -> nn.Module:
        with self._deferred.again():
            return self.precision_plugin.convert_module(module)

    def _materialize(self, whole: list[Tensor], kept: set[nn.Parameter]) -> None:
        """Memory for this stage's parameters and for what isn't a parameter; `whole`: all tensors of the module."""
        gone = [t for t in whole if isinstance(t, nn.Parameter) and t not in kept]
        out = set(gone)
        self._deferred.materialize([t for t in whole if t not in out], gone)


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters, buffers, and tensors that are plain attributes; each once."""
    plain = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    return list(dict.fromkeys([*module.parameters(), *module.buffers(), *plain]))
