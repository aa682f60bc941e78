"""A pytest plugin: each test in a fork of its own with a hard kill, under another strategy; outcomes as JSON lines.

python -m pytest -p plugin --swap gossip --outcomes FILE [--alone] [--limit SECONDS] tests...
"""

import inspect
import json
import os
import pickle
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import swap
from _pytest.runner import runtestprotocol

LINE = 300  # characters of an error that are kept


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption("--swap", choices=list(swap.STRATEGIES), default="ddp")
    group.addoption("--outcomes", type=Path, required=True)
    group.addoption("--alone", action="store_true", help="Trainers of one device that ask for no strategy, too")
    group.addoption("--limit", type=float, default=60.0, help="seconds of a test")
    group.addoption("--chosen", type=Path, help="a file of test ids: no others")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flaky: of a plugin that repeats tests")
    swap.install(config.getoption("--swap"), config.getoption("--alone"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    file = config.getoption("--chosen")
    names = set(file.read_text().splitlines()) if file else None
    wanted = config.getoption("--alone")
    kept = [item for item in items if (item.nodeid in names if names is not None else wanted or _concerned(item))]
    items[:] = kept


def _concerned(item: Any) -> bool:
    """Return whether the test's source names `ddp`; which strategy it really asks for is seen when it runs."""
    parameters = repr(item.callspec.params) if hasattr(item, "callspec") else ""
    return "ddp" in parameters or ("ddp" in inspect.getsource(item.function) if hasattr(item, "function") else False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool:
    config = item.config
    folder = config.getoption("--outcomes").with_suffix(".d")
    folder.mkdir(exist_ok=True)
    result = folder / f"{os.getpid()}.pickle"
    result.unlink(missing_ok=True)
    began = time.monotonic()
    late = _forked(item, result, config.getoption("--limit"))
    reports, asked = pickle.loads(result.read_bytes()) if result.exists() else ([], [])
    found = {**_outcome(reports, late), "asked": asked, "seconds": round(time.monotonic() - began, 2)}
    with config.getoption("--outcomes").open("a") as file:
        file.write(json.dumps({"test": item.nodeid, **found}) + "\n")
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in (config.hook.pytest_report_from_serializable(config=config, data=data) for data in reports):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _forked(item: pytest.Item, result: Path, limit: float) -> bool:
    """Run the test in a forked process; return whether it had to be killed."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        _run(item, result)
    end = time.monotonic() + limit
    while time.monotonic() < end and os.waitpid(pid, os.WNOHANG) == (0, 0):
        time.sleep(0.01)
    late = time.monotonic() >= end
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it left behind, too
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return late


def _run(item: pytest.Item, result: Path) -> None:
    swap.swapped.clear()
    owner = os.getpid()
    try:
        reports = runtestprotocol(item, nextitem=None, log=False)
        hook = item.config.hook
        data = [hook.pytest_report_to_serializable(config=item.config, report=report) for report in reports]
        if os.getpid() == owner:  # a worker that Lightning forked may come here as well
            new = result.with_suffix(".new")
            new.write_bytes(pickle.dumps((data, swap.swapped)))
            new.replace(result)
    finally:
        os._exit(0)


def _outcome(reports: list[dict[str, Any]], late: bool) -> dict[str, str]:
    if late:
        return {"outcome": "hangs", "line": ""}
    if not reports:
        return {"outcome": "dies", "line": ""}
    bad = [report for report in reports if report["outcome"] != "passed"]
    if not bad:
        return {"outcome": "passed", "line": ""}
    return {"outcome": bad[0]["outcome"], "line": next(_lines(bad[0]), "")[:LINE]}


def _lines(report: dict[str, Any]) -> Iterator[str]:
    told = report["longrepr"]
    if isinstance(told, dict) and told.get("reprcrash"):
        lines = str(told["reprcrash"]["message"]).splitlines() or [""]
        # What a worker raised stands at the end of its traceback.
        raised = [line for line in lines if line and not line.startswith((" ", "-"))]
        yield raised[-1] if lines[0].startswith("torch.multiprocessing") or "ProcessRaised" in lines[0] else lines[0]
    elif told is not None:
        yield str(told[-1] if isinstance(told, (list, tuple)) else told)
