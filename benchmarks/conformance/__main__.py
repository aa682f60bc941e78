"""Lightning's own tests with this package's strategies in place of `ddp`.

    make conformance LIGHTNING=/path/to/a/checkout/of/pytorch-lightning      # at the tag of the installed version
    python benchmarks/conformance CHECKOUT --only "early_stopping|pruning" --strategies gossip

Each test runs in a fork of its own, under `ddp` first; those that name `ddp` and end well there run again under each
strategy. With --alone, so do tests whose Trainers name no strategy and use one device: one worker gossips with nobody,
but all of Lightning's hooks, loops, callbacks and checkpoints pass through the strategy.

Nothing is fetched. The status is 1 where a test ends otherwise than under `ddp` and differences.yaml doesn't say why.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from compared import OTHER, Outcome, markdown, plain, read_differences, read_outcomes, rows, unused
from swap import STRATEGIES

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
# Where Trainers train; other tests named ddp are about flags, devices that aren't here, or DDP's own wrapper.
FOLDERS = (
    "callbacks checkpointing core loggers loops models overrides plugins profilers strategies trainer tuner utilities"
)
LEFT_OUT = "test_accelerator_connector|test_fsdp|test_deepspeed|test_xla|launchers|comm_hook|connectors/test_signal"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of Lightning, with its tests")
    ours = [name for name in STRATEGIES if name != "ddp"]
    parser.add_argument("--strategies", type=lambda text: text.split(";"), default=ours, help="separated by semicolons")
    parser.add_argument("--only", default="", help="a regular expression of files")
    parser.add_argument("--alone", action="store_true", help="tests of one device, too")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a test")
    parser.add_argument("--out", type=Path, default=Path("outputs") / "conformance")
    found = parser.parse_args()
    unknown = [name for name in found.strategies if name not in ours]
    if unknown:
        parser.error(f"no strategy {unknown[0]!r}: choose of {'; '.join(ours)}")
    if not (found.checkout / "tests" / "tests_pytorch").is_dir():
        parser.error(f"{found.checkout} has no tests/tests_pytorch: give a checkout of Lightning-AI/pytorch-lightning")
    return found


def files(checkout: Path, only: str) -> list[str]:
    import re

    tests = checkout / "tests"
    every = [path for name in FOLDERS.split() for path in sorted((tests / "tests_pytorch" / name).rglob("test_*.py"))]
    names = [str(path.relative_to(tests)) for path in every]
    return [name for name in names if re.search(only, name) and not re.search(LEFT_OUT, name)]


def outcomes(options: argparse.Namespace, strategy: str, chosen: Path | None) -> dict[str, Outcome]:
    """Return the outcomes of two runs of pytest: of the tests that Lightning runs together, and of those it runs
    alone."""
    file = (options.out / f"{strategy.replace(', ', '-')}.jsonl").absolute()
    file.unlink(missing_ok=True)
    here, there = (str(path.absolute()) for path in (HERE, options.checkout / "tests"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "plugin", "-p", "no:cacheprovider", "--swap", strategy]
    command += ["--outcomes", str(file), "--limit", str(options.limit), "--tb=no", "--color=no"]
    command += ["--continue-on-collection-errors"]  # of files that need a package that isn't here
    command += [*(["--alone"] if options.alone else []), *(["--chosen", str(chosen.absolute())] if chosen else [])]
    for standalone in "01":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), here, there]), "OMP_NUM_THREADS": "1"}
        environment |= {"PL_RUN_STANDALONE_TESTS": standalone}
        done = subprocess.run(
            [*command, *files(options.checkout, options.only)], cwd=there, env=environment, check=False
        )
        if done.returncode not in (0, 1, 5):  # 5: no tests
            sys.exit(f"pytest ended with {done.returncode}")
    return read_outcomes(file)


def main() -> None:
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    ddp = outcomes(options, "ddp", None)
    chosen = options.out / "chosen"
    chosen.write_text("\n".join(name for name, one in ddp.items() if one.asked and one.outcome == "passed"))
    under = {strategy: outcomes(options, strategy, chosen) for strategy in options.strategies}
    meant = read_differences(HERE / "differences.yaml")
    found = rows(ddp, under, meant)
    (options.out / "conformance.json").write_text(json.dumps(plain(found), indent=1))
    print(markdown(found))
    for one in unused(found, meant) if not options.only else []:
        print(f"- no longer seen: {one.test} ({one.because})")
    sys.exit(any(row.verdict == OTHER for row in found))


if __name__ == "__main__":
    main()
