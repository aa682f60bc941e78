"""Entry point from which Lightning takes callbacks for every Trainer: a gate for a member of a sweep, else none."""

from __future__ import annotations

import os
import sys
from typing import Any

# As lightning_decentral.sweep.wire.client.VARIABLE; importing that would cost every Trainer outside of sweeps.
VARIABLE = "LIGHTNING_DECENTRAL_SWEEP"


def callbacks() -> list[Any]:
    """Return the gate in a sweep member's process, with a scoring callback where members are compared; else nothing."""
    refuse_without_multirun()
    if VARIABLE not in os.environ:
        return []
    from lightning_decentral.sweep.time_slicing import Gate, Scoring
    from lightning_decentral.sweep.wire.client import Admission

    admission = Admission.found()
    if admission is None:
        return []
    if admission.cores is not None:  # workers ask one by one
        from lightning_decentral.sweep.pieces import PieceGate

        return [PieceGate(admission)]
    gate = Gate(admission)
    return [gate] if admission.watched is None else [gate, Scoring(gate, *admission.watched)]


def refuse_without_multirun() -> None:
    """Raise ValueError where Hydra has loaded the sweep launcher's configuration but runs a single job."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return
    config = hydra.HydraConfig.get()
    single = config.mode is not None and config.mode.name == "RUN"  # None: composed, not run
    if single and config.runtime.choices.get("hydra/launcher") == "shard_parallel":
        raise ValueError("hydra/launcher=shard_parallel launches sweeps only: add --multirun (-m), or leave it out")
