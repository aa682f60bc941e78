"""The package in clean environments: the oldest and the newest that it allows, from a wheel and from an sdist.

    python benchmarks/matrix.py oldest --work /tmp/matrix     # Python 3.10, every requirement at its lower bound
    python benchmarks/matrix.py newest --work /tmp/matrix     # Python 3.13, without constraints, pre-releases, too
    python benchmarks/matrix.py quick --work /tmp/matrix      # one sweep in this environment, under Hydra's newest

Each part builds wheel and sdist, makes an environment, and installs requirements and wheel. Outside the checkout it
trains two gossiping processes from the wheel, then from the sdist. Last, it runs the quick tests of the wheel with that
environment's packages. `results/matrix.json` gets a row for each part; `--write` puts the rows on docs/index.md.

The newest part takes pre-releases of hydra-core, lightning and torch: what they change is known before their users meet
it. The quick part is continuous integration's: it lays Hydra's newest version, pre-releases included, over this
environment and runs sweeps. Where the registry has nothing newer, or can't be reached, it says so and ends well.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "matrix.json", ROOT / "docs" / "index.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"
EXTRAS = ("recipes", "plot", "sweeps", "schedule")
TOOLS = ["pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100", "psutil>=5.9", "peft>=0.13"]
TOOLS += ["jsonargparse[signatures]>=4.39", "torchft"]
EARLY = ("hydra-core", "lightning", "torch")
"""Packages whose pre-releases the newest part takes."""
SWEEPS = ("tests/sweep/test_launcher.py", "-k", "interleaved or finds_the_launcher")
SHOWN = ("torch", "lightning", "torchmetrics", "hydra-core", "numpy", "transformers")
SMOKE = """
import lightning as L, torch
from torch.utils.data import DataLoader, TensorDataset
import lightning_decentral

class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)

torch.manual_seed(0)
x = torch.randn(256, 2)
y = x @ torch.tensor([[2.0], [-1.0]])
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = L.Trainer(strategy="gossip_fork", accelerator="cpu", devices=2, max_epochs=20, **quiet)
model = Line()
trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=16))
assert (model.layer.weight - torch.tensor([[2.0, -1.0]])).abs().max() < 0.05, model.layer.weight
print("trained by", lightning_decentral.__version__, "in", lightning_decentral.__file__)
"""


class Part(NamedTuple):
    """An interpreter, and what a requirement of pyproject.toml is asked for."""

    python: str
    lower_bounds: bool

    def asked(self, requirement: str) -> str:
        if self.lower_bounds:
            return re.sub(r">=\s*([\d.]+)", r"==\1.*", requirement)
        # A bound that is a pre-release lets pip take others of that package, and of no other one.
        early = re.split(r"[\[<>=!~ ]", requirement)[0] in EARLY
        return re.sub(r">=\s*([\d.]+)", r">=\1.dev0", requirement) if early else requirement


PARTS = {"oldest": Part("python3.10", True), "newest": Part("python3.13", False)}


def requirements() -> list[str]:
    """The core's, and those of a user's extras."""
    text = (ROOT / "pyproject.toml").read_text()
    lists = [r"^dependencies = \[\n(.*?)^\]", *(rf"^{extra} = \[(.*?)\]" for extra in EXTRAS)]
    found = [re.search(pattern, text, re.MULTILINE | re.DOTALL) for pattern in lists]
    return [one for match in found if match for one in re.findall(r'"([^"]+)"', match[1])]


def run(words: Sequence[str | Path], cwd: Path, seconds: float = 1800) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, words))[:200]}\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def built(work: Path) -> tuple[Path, Path]:
    """(wheel, sdist) of the commit that is checked out."""
    source = work / "source"
    for left in (source, work / "dist"):
        shutil.rmtree(left, ignore_errors=True)
    run(["git", "clone", "-q", "--no-hardlinks", ROOT, source], work)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", work / "dist", source], work)
    return next((work / "dist").glob("*.whl")), next((work / "dist").glob("*.tar.gz"))


def from_package(python: Path, package: Path, work: Path) -> str:
    """Installs wheel or sdist, trains, and takes it away again."""
    run([python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", package], work)
    (work / "smoke.py").write_text(SMOKE)
    said = run([python, "-I", "smoke.py"], work, 300)
    run([python.with_name("lightning-decentral"), "topology", "ring", "--workers", "4"], work, 300)
    run([python, "-m", "pip", "uninstall", "-qy", "lightning-decentral"], work)
    assert "site-packages" in said, said
    return "trains"


def tests(python: Path, wheel: Path, work: Path) -> dict[str, int]:
    """Run the tests of a checkout without the package, which is the wheel's; print what failed.

    Returns how many passed, failed and were skipped.
    """
    run([python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", wheel], work)
    shutil.rmtree(work / "source" / "lightning_decentral")
    words = [python, "-m", "pytest", "-q", "-n", "2", "-m", "quick", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [str(word) for word in words], cwd=work / "source", capture_output=True, text=True, check=False
    )
    print(*re.findall(r"^(?:FAILED|ERROR) .*$", done.stdout, re.MULTILINE), done.stderr[-2000:], sep="\n")
    last = done.stdout.strip().splitlines()[-1]
    return {kind: int(many) for many, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)}


def part(name: str, work: Path, interpreter: str | None) -> dict[str, Any]:
    chosen, start = PARTS[name], time.time()
    work.mkdir(parents=True, exist_ok=True)
    wheel, sdist = built(work)
    python = work / "venv" / "bin" / "python"
    if not python.exists():
        run([interpreter or chosen.python, "-m", "venv", work / "venv"], work)
    asked = [chosen.asked(one) for one in requirements()]
    run([python, "-m", "pip", "install", "-q", "setuptools>=77", *asked, *TOOLS], work)
    packages = {name: from_package(python, path, work) for name, path in (("wheel", wheel), ("sdist", sdist))}
    frozen = dict(line.split("==") for line in run([python, "-m", "pip", "freeze"], work).splitlines() if "==" in line)
    versions = {one: frozen[one] for one in SHOWN}
    return {
        "python": run([python, "-c", "import platform; print(platform.python_version())"], work).strip(),
        **versions,
        **packages,
        "tests": tests(python, wheel, work),
        "minutes": round((time.time() - start) / 60),
    }


def quick(work: Path) -> str:
    """Sweeps under Hydra's newest version, laid over this environment; what came of it, in a line."""
    shutil.rmtree(work, ignore_errors=True)
    words = [sys.executable, "-m", "pip", "install", "-q", "--pre", "--target", work, "hydra-core"]
    got = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=300, check=False)
    if got.returncode:
        return f"skipped: pip can't get hydra-core ({(got.stderr.strip().splitlines() or ['no reason'])[-1]})"
    found = next(work.glob("hydra_core-*.dist-info")).name.removesuffix(".dist-info").partition("-")[2]
    if found == version("hydra-core"):
        return f"skipped: hydra-core {found}, which is installed, is the newest"
    paths = os.pathsep.join(map(str, (work, ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SWEEPS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
        timeout=600,
    )
    if done.returncode:
        sys.exit(f"error: sweeps fail under hydra-core {found}")
    return f"sweeps run under hydra-core {found}"


def table(rows: dict[str, dict[str, Any]]) -> str:
    head = ["part", "Python", *SHOWN, "wheel", "sdist", "tests"]
    lines = [f"| {' | '.join(head)} |", "| " + "--- | " * len(head)]
    for name, row in rows.items():
        ran = ", ".join(f"{many} {kind}" for kind, many in row["tests"].items())
        cells = [name, row["python"], *(row[one] for one in SHOWN), row["wheel"], row["sdist"], ran]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(line.rstrip() for line in lines)


def write(rows: dict[str, dict[str, Any]]) -> None:
    head, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("part", nargs="?", choices=[*PARTS, "quick"])
    parser.add_argument("--python", help="the interpreter, where it has another name")
    parser.add_argument("--work", type=Path, help="a folder, which keeps the environment: some gigabytes")
    parser.add_argument("--write", action="store_true", help="the page")
    options = parser.parse_args()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if options.part == "quick":
        print(quick(options.work.resolve() / "quick"))
    elif options.part:
        found[options.part] = part(options.part, options.work.resolve() / options.part, options.python)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found[options.part], indent=1))
    if options.write:
        write(found)
