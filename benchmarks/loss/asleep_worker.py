"""One host of `loss/asleep.py`: takes steps by itself, then by every method at every rate, in one process group."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.hardware import come_first
from network.accuracy_worker import train, train_alone
from network.cluster import Cluster
from network.speed_worker import Plan


def main() -> None:
    folder = Path(sys.argv[1])
    plan: Plan = json.loads((folder / "plan.json").read_text()) | {"folder": folder}
    host = int(os.environ["NODE_RANK"])
    come_first()
    place = 0
    for rate, methods in plan["rates"].items():
        if host == 0:  # the others wait for it where they set up the first method
            Cluster(plan["cluster"], plan["hosts"]).limit(rate)
        for name, words in methods.items():
            for turn in range(plan["turns"]):
                train(plan, f"{place}", words, [f"trainer.num_nodes={plan['hosts']}"])
                if not place:  # all hosts have been set up now, and none is still importing
                    train_alone(plan, host)
                record = json.loads((folder / f"{place}-{host}.json").read_text())
                record |= {"rate": rate, "method": name, "others": others(record, plan)}
                (folder / f"{place}-{host}.json").write_text(json.dumps(record))
                place += 1
                if record["others"] < plan["quiet"] or turn + 1 == plan["turns"]:
                    break


def others(record: dict[str, Any], plan: Plan) -> float:
    """Share of a core that other work took during the timed steps, the same on all hosts. Collective."""
    own, machine, seconds = (
        row[-1] - row[plan["warm_up"] - 1] for row in (record[k] for k in ("busy", "machine", "ends"))
    )
    all_of_them = torch.tensor([own, machine / plan["hosts"], seconds / plan["hosts"]], dtype=torch.float64)
    dist.all_reduce(all_of_them)
    own, machine, seconds = all_of_them.tolist()
    return max(0.0, (machine - own) / seconds)
