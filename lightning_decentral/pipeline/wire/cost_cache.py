"""Cache of measured stage costs: a file in a folder that the user names, for everything that was measured on a host.

    FOLDER/<digest>.json     {"format": 3, "conditions": of the measurement, "costs": what it found}

Files are small, readable, and may be deleted at any time. Without a folder nothing is read or written.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from lightning_decentral.pipeline.compute.model import Call
from lightning_decentral.pipeline.plan.cost import CostModel
from lightning_decentral.pipeline.plan.stage_cost import Link, StageCost
from lightning_decentral.pipeline.wire.stage_runner import StageRunner
from lightning_decentral.shared.compute.hardware import device_name

FORMAT = 3  # another one whenever a file, or what a measurement means, changes
Conditions = Mapping[str, str | int | bool]


@dataclass(frozen=True)
class CostCache:
    """Measured once for each model, pipeline and place in it, size of micro-batch, length, device and version of torch.

    A file that is damaged, of another format or about something else counts as none, and is written anew.

    Args:
        folder: of the files; None: every run measures for itself and keeps nothing.
    """

    folder: str | None = None

    def find(self, conditions: Conditions) -> StageCost | None:
        """What an earlier run measured under these; None: measure."""
        if self.folder is None:
            return None
        try:
            found = json.loads(self.path(self.folder, conditions).read_text())
            same = (found["format"], found["conditions"]) == (FORMAT, conditions)
            return _profile(found["costs"]) if same else None
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            return None

    def keep(self, conditions: Conditions, profile: StageCost) -> None:
        """For later runs. Where it can't be written, a warning says so and training goes on."""
        if self.folder is None:
            return
        text = json.dumps({"format": FORMAT, "conditions": conditions, "costs": asdict(profile)}, indent=1)
        try:
            _write(self.path(self.folder, conditions), text)
        except OSError as error:
            warnings.warn(
                f"what the stages cost can't be kept in {self.folder} ({error}): give cost_cache a folder that can be "
                "written, or leave it out",
                stacklevel=2,
            )

    @staticmethod
    def path(folder: str, conditions: Conditions) -> Path:
        """Of the file about these."""
        digest = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:24]
        return Path(folder) / f"{digest}.json"


def conditions(pipe: StageRunner, call: Call, hosts: Sequence[str]) -> Conditions:
    """What a stage's costs depend on; of the hosts of all stages, only which stages share one."""
    model, device = pipe.model, call.inputs.device
    autocast = torch.is_autocast_enabled(device.type)
    return {
        "model": type(model.module).__name__,
        "parameters": sum(p.numel() for p in model.module.parameters()),
        "structure": hashlib.sha256(model.structure().encode()).hexdigest(),
        **asdict(pipe.place),
        "pipeline": pipe.words,
        "hosts": " ".join(str(hosts.index(host)) for host in hosts),
        "inputs": f"{tuple(call.inputs.shape)} {call.inputs.dtype}",
        "attention_mask": call.attention_mask is not None,
        "position_ids": call.position_ids is not None,
        "documents": call.documents is not None,
        "autocast": str(torch.get_autocast_dtype(device.type)) if autocast else "",
        "matmul_precision": torch.get_float32_matmul_precision(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


def _write(path: Path, text: str) -> None:
    """As a whole or not at all: other processes read and write the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{uuid4().hex}")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _profile(costs: Any) -> StageCost:
    """Read back; an exception for what no measurement can be."""
    return StageCost(
        _cost_model(costs["forward"]),
        _cost_model(costs["backward"]),
        _number(costs["loss_seconds"], least=0),
        Link(**{name: _number(costs["link"][name], least=0) for name in ("latency_seconds", "token_seconds")}),
        _number(costs["stretch"], least=0),
    )


def _cost_model(found: Any) -> CostModel:
    alone = tuple((int(tokens), _number(seconds, least=1e-12)) for tokens, seconds in found["alone"])
    a0, a1, a2, a3 = (_number(a) for a in found["coefficients"])
    tokens = [tokens for tokens, _ in alone]
    if len(alone) < 2 or tokens != sorted(set(tokens)) or tokens[0] < 1:
        raise ValueError(f"lengths must be two at least, positive and ascending, got {tokens}")
    return CostModel(alone, (a0, a1, a2, a3), _number(found["error"], least=0))


def _number(found: Any, least: float = -math.inf) -> float:
    if not math.isfinite(found) or found < least:
        raise ValueError(f"must be finite and {least} at least, got {found}")
    return float(found)
