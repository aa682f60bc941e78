"""`strategy=ddp_fp16`: `ddp` whose all-reduce sends 16 bits a number, on every device and backend."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel


class HalfPrecisionDDP(DDPStrategy):
    """Lightning's `ddp` with torch's hook that sends gradients in half precision; options are `DDPStrategy`'s."""

    def __init__(self, **options: Any) -> None:
        super().__init__(ddp_comm_hook=fp16_compress_hook, **options)

    def _register_ddp_hooks(self) -> None:
        # Lightning's own registers hooks on CUDA alone, and torch's work on gloo, too.
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, fp16_compress_hook)
