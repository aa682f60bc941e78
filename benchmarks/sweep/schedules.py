"""How far simulated schedules are from the same schedules carried out by processes on this machine.

    python benchmarks/sweep.py schedules           # stand-ins
    python benchmarks/sweep.py schedules --real    # trainings; about three minutes on two cores

Stand-ins: six jobs of 4 to 16 pieces of 20 to 120 ms, half of them with a load, two of them late, on two devices: every
policy is simulated and run, with pieces that hash (`compute`: one core per device) and pieces that wait (`sleep`).

Trainings: six ViTs on handwritten digits, 40 to 200 steps of a batch of 64, two of them late, on two cores; their
seconds per step are measured once, then every policy is simulated and run.
"""

import argparse
import json
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common.hardware import description, slug
from common.paths import RESULTS
from lightning_decentral.cli.console import quiet
from lightning_decentral.recipes.command import RECIPES
from lightning_decentral.sweep.plan.dispatch import Queue, WorkPiece, devices
from lightning_decentral.sweep.plan.jobs_file import Training
from lightning_decentral.sweep.plan.policy import POLICIES
from lightning_decentral.sweep.plan.simulation import finish_seconds, lower_bound_seconds, makespan_seconds, simulate
from lightning_decentral.sweep.trainings import Trainings
from sweep.dummy_jobs import STAND_INS

DEVICES = 2
WORDS = ["recipe=vit", "trainer=cpu", "data.batch_size=64", "logger=none", "callbacks=none"]
TRAINED = {"short": (64, 40, 0), "small": (32, 120, 0), "wide": (96, 80, 0), "plain": (64, 100, 0)}
LATE = {"late": (64, 60, 1.5), "long": (64, 200, 1.5)}  # name: (hidden size, steps, arrival)


def jobs(seed: int = 0) -> list[Queue]:
    chance = random.Random(seed)
    found = []
    for job, count in enumerate((4, 6, 8, 10, 12, 16)):
        load = 0.02 * (job % 2)
        pieces = tuple(WorkPiece(round(chance.uniform(0.02, 0.12), 3), load) for _ in range(count))
        found.append(Queue(f"job {job}", pieces, 0.5 * (job in (1, 4))))
    return found


def trainings() -> list[Training]:
    found = []
    for name, (width, steps, arrival) in {**TRAINED, **LATE}.items():
        words = (*WORDS, f"model.config.hidden_size={width}", f"trainer.max_steps={steps}")
        found.append(Training(name, words, steps, arrival_seconds=float(arrival)))
    return found


def stood_in() -> dict[str, Any]:
    """Every policy with both stand-ins."""
    found, there = jobs(), devices(DEVICES)
    rows = []
    for stand_in, kind in STAND_INS.items():
        for name, policy in POLICIES.items():
            simulated = makespan_seconds(found, simulate(found, there, policy))
            real = makespan_seconds(found, kind.rehearse(found, there, policy))
            rows.append({"policy": name, "stand_in": stand_in, "simulated_seconds": simulated, "real_seconds": real})
    return {"devices": DEVICES, "bound_seconds": lower_bound_seconds(found, there), "rows": rows}


def trained() -> dict[str, Any]:
    """Every policy with the trainings."""
    there = devices(DEVICES)
    with tempfile.TemporaryDirectory() as folder:
        measured = Trainings(trainings(), DEVICES, Path(folder) / "first", RECIPES).queues()
        rows = []
        for name, policy in POLICIES.items():
            simulated = simulate(measured, there, policy)
            members = Trainings(trainings(), DEVICES, Path(folder) / name, RECIPES)
            real = members.rehearse(measured, there, policy)
            ends = {
                job: {"simulated_seconds": end, "real_seconds": finish_seconds(real)[job]}
                for job, end in finish_seconds(simulated).items()
            }
            seconds = {
                f"{k}_seconds": makespan_seconds(measured, v) for k, v in (("simulated", simulated), ("real", real))
            }
            rows.append({"policy": name, "stand_in": "none: trainings", **seconds, "ends": ends})
    steps = {queue.name: [piece.compute_seconds for piece in queue.pieces[:6]] for queue in measured}
    return {
        "devices": DEVICES,
        "bound_seconds": lower_bound_seconds(measured, there),
        "step_seconds": steps,
        "rows": rows,
    }


def shown(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("policy", "stand-in", "simulated s", "real s", "off %")
    for row in rows:
        simulated, real = row["simulated_seconds"], row["real_seconds"]
        off = 100 * (real / simulated - 1)
        table.add_row(row["policy"], row["stand_in"], f"{simulated:.3f}", f"{real:.3f}", f"{off:+.1f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--real", action="store_true", help="trainings in place of stand-ins")
    real = parser.parse_args().real
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with quiet():
        kept = trained() if real else stood_in()
    Console().print(shown(kept["rows"]), f"no makespan is under {kept['bound_seconds']:.3f} s")
    path = RESULTS / f"rehearsal{'-real' * real}-{slug()}.json"
    path.write_text(json.dumps({"hardware": description(), **kept}, indent=1) + "\n")
