"""One host of `network/predicted.py`: seconds of a round of gossip without the wire, while all hosts train as much."""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from lightning_decentral.gossip.round_cost import round_works

torch.set_num_threads(1)


def main() -> None:
    folder, parameter_bytes, compute_seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    works = round_works(parameter_bytes, torch.device("cpu"), pause=lambda: time.sleep(compute_seconds))
    (folder / f"{os.environ['NODE_RANK']}.json").write_text(json.dumps([asdict(work) for work in works]))
