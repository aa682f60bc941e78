"""How far simulated schedules are from the same schedules carried out by processes on this machine.

    python benchmarks/rehearsal.py

Six jobs of 4 to 16 pieces of 20 to 120 ms, half of them with a load, two of them late, on two devices: every policy is
simulated and run, with pieces that hash (`compute`: one core per device) and pieces that wait (`sleep`).
"""

import json
import random
from pathlib import Path

from hardware import description, slug
from rich.console import Console
from rich.table import Table

from lightning_decentral.commands.schedule import POLICIES
from lightning_decentral.multimodel.dispatch import Piece, Queue, devices
from lightning_decentral.multimodel.rehearsal import STAND_INS, rehearse
from lightning_decentral.multimodel.schedule import lower_bound_seconds, makespan_seconds, simulate

RESULTS = Path(__file__).parent / "results"
DEVICES = 2


def jobs(seed: int = 0) -> list[Queue]:
    chance = random.Random(seed)
    found = []
    for job, count in enumerate((4, 6, 8, 10, 12, 16)):
        load = 0.02 * (job % 2)
        pieces = tuple(Piece(round(chance.uniform(0.02, 0.12), 3), load) for _ in range(count))
        found.append(Queue(f"job {job}", pieces, 0.5 * (job in (1, 4))))
    return found


def main() -> None:
    found, there = jobs(), devices(DEVICES)
    bound = lower_bound_seconds(found, there)
    headings = ["policy", "stand-in", "simulated s", "real s", "off %"]
    table, rows = Table(*headings), []
    for stand_in, kind in STAND_INS.items():
        for name, policy in POLICIES.items():
            simulated = makespan_seconds(found, simulate(found, there, policy))
            real = makespan_seconds(found, rehearse(found, there, policy, kind))
            rows.append({"policy": name, "stand_in": stand_in, "simulated_seconds": simulated, "real_seconds": real})
            off = 100 * (real / simulated - 1)
            table.add_row(name, stand_in, f"{simulated:.3f}", f"{real:.3f}", f"{off:+.1f}")
    Console().print(table, f"no makespan is under {bound:.3f} s")
    path = RESULTS / f"rehearsal-{slug()}.json"
    kept = {"devices": DEVICES, "bound_seconds": bound, "rows": rows}
    path.write_text(json.dumps({"hardware": description(), **kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
