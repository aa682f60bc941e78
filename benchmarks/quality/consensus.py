"""How far from each other are the workers of a healthy gossip run, and how much worse is one worker's own model than
their mean?

    python benchmarks/quality.py consensus

Each run is `python recipes/train.py recipe=... strategy=gossip trainer.devices=4`, with `strategy.evaluate=mean` and
`own`, on the CPU. Writes `results/consensus-<hardware>.json`: rows of relative consensus errors, and of validation
losses, by step. gpt validates once an epoch, which is longer than these runs: it has consensus errors only.
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common.hardware import description, slug
from common.paths import RESULTS, ROOT

RECIPES = {"vit": [], "resnet": [], "gpt": ["optimizer=muon"]}
STEPS = 160
RELATIVE, LOSS = "gossip/consensus_distance_relative", "val/loss"
Curve = dict[str, float]


def curve(folder: Path, key: str) -> Curve:
    """{step: value} of a key in the run's CSV log."""
    (log,) = folder.rglob("metrics.csv")
    return {row["step"]: float(row[key]) for row in csv.DictReader(log.open()) if row.get(key)}


def measured(recipe: str, evaluate: str) -> tuple[Curve, Curve]:
    """(relative consensus error, validation loss) of one run, by step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"recipe={recipe}", *RECIPES[recipe], f"strategy.evaluate={evaluate}", f"trainer.max_steps={STEPS}"]
        places = ["strategy=gossip", "trainer=cpu", "trainer.devices=4", f"hydra.run.dir={folder}"]
        subprocess.run([sys.executable, "recipes/train.py", *settings, *places], cwd=ROOT, check=True)
        return curve(Path(folder), RELATIVE), curve(Path(folder), LOSS)


def main() -> int:
    found = {}
    for recipe in RECIPES:
        relative, of_mean = measured(recipe, "mean")
        found[recipe] = {"relative": relative, "mean": of_mean, "own": measured(recipe, "own")[1]}
    path = RESULTS / f"consensus-{slug()}.json"
    path.write_text(json.dumps({"hardware": description(), "steps": STEPS, "recipes": found}, indent=1) + "\n")
    return 0
