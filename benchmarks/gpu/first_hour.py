"""The first hour on a GPU: does it run, is it right, and how far from what was predicted without one.

    make gpu                            all parts; what needs two devices says so where there is one
    make gpu PARTS="facts tests"        some of them; no part takes more than ten minutes
    make gpu PARTS=devices              two devices and more: NCCL, and a worker that is killed
    python benchmarks/gpu.py first_hour --device cpu    small sizes on a CPU, to try the script itself; writes nothing

Every part is a process of its own with a hard end, and what one prints is kept where the next one fails. Measured
values stand next to predicted ones; `results/first-hour-<device>.json` holds the parts that ran last. It needs torch,
lightning, transformers, torchmetrics and networkx (for the tests pytest, pytest-timeout and hypothesis, for the
rehearsal Hydra), and says what it can't run.
"""

import argparse
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common.hardware import description, slug
from common.paths import BENCHMARKS, RESULTS, ROOT, command
from gpu.first_hour_parts import PARTS, Row

ORDER = ["facts", "tests", "kernels", "round", "workers", "codecs", "spilled", "rehearsal", "devices"]
SECONDS = 560
"""Of a part: what a device is often lent for at once is ten minutes."""


def run(part: str, device: str) -> dict[str, Any]:
    """{rows, seconds, error} of a part, in a process of its own."""
    words = [*command("gpu", "first_hour"), "--inside", part, "--device", device]
    path = os.pathsep.join([str(BENCHMARKS), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    began, rows, error = time.monotonic(), list[Row](), ""
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    end = threading.Timer(SECONDS, os.killpg, (process.pid, signal.SIGKILL))
    end.start()
    tail: list[str] = []
    for line in process.stdout:
        if line.startswith("ROW "):
            rows.append(Row(**json.loads(line[4:])))
            print(f"  {rows[-1].line()}", flush=True)
        else:
            tail = [*tail[-30:], line.rstrip()]
    end.cancel()
    seconds = time.monotonic() - began
    if process.wait():
        last = next((line for line in reversed(tail) if line.strip()), f"ended with {process.returncode}")
        error = f"stopped after {SECONDS} s" if seconds >= SECONDS else last
    if error:
        print("\n".join(f"  | {line}" for line in tail[-12:]))
    return {"rows": [row._asdict() for row in rows], "seconds": seconds, "error": error}


def page(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    about = "\n".join(f"- {name}: {value}" for name, value in result["hardware"].items())
    parts = []
    for name, found in result["parts"].items():
        rows = [Row(**row) for row in found["rows"]]
        table = "\n".join(f"| {row.name} | {row.shown()} | {row.predicted} |" for row in rows)
        failed = f"\n**{found['error']}**\n" if found["error"] else ""
        head = f"## {name} ({found['seconds']:.0f} s)\n{failed}\n| what | measured | predicted |\n| --- | --- | --- |"
        parts.append(f"{head}\n{table}\n")
    return f"# The first hour\n\nMade by `make gpu`.\n\n{about}\n\n" + "\n".join(parts)


def main(arguments: Sequence[str] | None = None, results: Path = RESULTS) -> int:
    """The command line; 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help=f"by default {' '.join(ORDER)}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--inside", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        for row in PARTS[options.inside](torch.device(options.device)):
            print(f"ROW {json.dumps(row._asdict())}", flush=True)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here, so nothing was measured: --device cpu tries the script itself")
        return 0
    path = results / f"first-hour-{slug()}.json"
    kept = json.loads(path.read_text())["parts"] if path.exists() else {}
    for part in options.parts or ORDER:
        print(f"{part} ...", flush=True)
        kept[part] = run(part, options.device)
        print(f"  took {kept[part]['seconds']:.0f} s" + (f", {kept[part]['error']}" if kept[part]["error"] else ""))
        result = {"hardware": description(), "parts": kept}
        if options.device == "cuda":
            path.write_text(json.dumps(result, indent=1))
    print(f"written: {path.name}" if options.device == "cuda" else "nothing is written of a CPU")
    return int(any(kept[part]["error"] for part in options.parts or ORDER))
