"""Gradient norms over all stages of a pipeline, each parameter once: each stage has only a part of the parameters.

A warning reports code that sums over `parameters()` by hand, which would sum over one stage only."""

import sys
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import grads
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from lightning_decentral.pipeline.wire.ownership import Ownership
from lightning_decentral.pipeline.wire.stage_runner import StageRunner, rows_of
from lightning_decentral.shared.compute.around import Redirected
from lightning_decentral.shared.compute.health import squared_norm

OWN = (
    *("lightning_decentral", "torch.nn.modules", "torch.nn.utils", "torch.optim.optimizer"),
    *(f"{trainer}.{part}" for trainer in ("lightning.pytorch", "pytorch_lightning")
      for part in ("core", "loops", "strategies", "trainer", "plugins", "utilities", "tuner")),
)  # fmt: skip
"""Modules that may read `parameters()` without the warning: their result is for one stage, or replaced here."""


class StageTotals:
    """Compute gradient norms over all stages until `close`: for clipping, `torch.nn.utils.get_total_norm` and
    `clip_grad_norm_`, and Lightning's `grad_norm`. Any other read of all parameters raises a warning."""

    def __init__(self, pipe: StageRunner, holdings: Ownership, module: nn.Module, precision: Precision) -> None:
        self._pipe, self._holdings = pipe, holdings
        self._precision = precision
        # Set on the instance, over the class's method: `close` only deletes the attribute.
        precision.clip_grad_by_norm = self._clip  # type: ignore[method-assign]
        cut = pipe.model.module
        self._cut = {part for part in module.modules() if any(part_inside is cut for part_inside in part.modules())}
        self._warned = False
        pairs: Sequence[tuple[Callable[..., Any], Callable[..., Any]]] = (
            (get_total_norm, self._total_norm),
            (grads.grad_norm, self._grad_norm),
            (nn.Module.named_parameters, self._named_parameters),
        )
        self._redirected = [Redirected(function, by) for function, by in pairs] if pipe.size > 1 else []

    def close(self) -> None:
        vars(self._precision).pop("clip_grad_by_norm", None)
        for redirected in self._redirected:
            redirected.close()
        self._redirected = []

    def _clip(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """g <- g min(1, clip_val / (norm + 1e-6)): clip gradients by their norm over all stages. Collective."""
        gradients = {p: p.grad for p in self._precision.main_params(optimizer) if p.grad is not None}
        counted = self._holdings.counted
        # Begins with a zero, so that a stage without gradients takes part in the sum.
        zero = torch.zeros((), device=self._pipe.device)
        mine = [zero, *(gradient.detach() for p, gradient in gradients.items() if p in counted and p.requires_grad)]
        # No `if norm > clip_val`: the host would wait for the device.
        factor = (clip_val / (self._pipe.total(squared_norm(mine)).sqrt() + 1e-6)).clamp(max=1.0)
        for gradient in gradients.values():
            gradient.mul_(factor.to(gradient.dtype))

    def _total_norm(self, original: Callable[..., Tensor], tensors: Any, norm_type: float = 2.0, *args: Any,
                    **kwargs: Any) -> Tensor:  # fmt: skip
        """Return the norm of gradients over all stages, or torch's own norm for other tensors. Collective."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        names = {id(p.grad): name for p, name in self._holdings.order.items() if p.grad is not None}
        if tensors and not any(id(tensor) in names for tensor in tensors):
            return original(tensors, norm_type, *args, **kwargs)
        parts: dict[str, list[Tensor]] = {name: [] for name in ("", *self._holdings.several)}
        for tensor in tensors:  # a stage without any of the tensors takes part
            name = names.get(id(tensor), "")
            parts[name if name in parts else ""].append(tensor)
        mine = torch.zeros(len(parts), dtype=torch.float64, device=self._pipe.device)
        for place, part in zip(mine, parts.values(), strict=True):
            if part:
                place.copy_(original(part, norm_type, *args, **kwargs))
        rows = rows_of(mine, self._pipe.over)
        # A parameter on several stages has the same gradient on each.
        total = torch.cat([rows[:, 0], rows[:, 1:].amax(0)]).norm(float(norm_type))
        whole: Tensor = total.to(tensors[0].dtype if tensors else torch.get_default_dtype())
        return whole

    def _grad_norm(
        self, original: Callable[..., dict[str, Any]], module: nn.Module, norm_type: Any, group_separator: str = "/"
    ) -> dict[str, Any]:
        """Return the norms of all stages' gradients, each once, named as on the first stage that has it. Collective."""
        own, p = original(module, norm_type, group_separator), float(norm_type)
        order, start = self._holdings.order, f"grad_{p}_norm{group_separator}"
        mine = {
            order.get(parameter, name): (f"{start}{name}", float(own[f"{start}{name}"]))
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        norms = {name: torch.tensor(value) for name, value in ChainMap(*self._pipe.gather(mine)).values()}
        total = {f"grad_{p}_norm_total": torch.stack(list(norms.values())).norm(p)} if norms else {}
        return {**norms, **total}

    def _named_parameters(
        self, original: Callable[..., Iterator[Any]], part: Any, *args: Any, **kwargs: Any
    ) -> Iterator[Any]:
        yield from original(part, *args, **kwargs)
        # After the last parameter: `next(self.parameters()).device` sums nothing.
        if self._warned or part not in self._cut:
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and str(frame.f_globals.get("__name__")).startswith("torch.nn.modules"):
            frame = frame.f_back  # to the caller that reads, past torch's own functions
        if frame is not None and not (reader := str(frame.f_globals.get("__name__"))).startswith(OWN):
            self._warned = True
            stage = f"stage {self._pipe.rank} of {self._pipe.size}"
            warnings.warn(
                f"{reader}, line {frame.f_lineno}, reads all parameters, but {stage} has only its own: a norm, a "
                "number or an average over them is this stage's. Lightning's grad_norm, torch's get_total_norm and "
                "clip_grad_norm_ cover all stages; for other sums use trainer.strategy.total(number)",
                stacklevel=2,
            )
