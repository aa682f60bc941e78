"""A slower processor: what runs here gets a share of the time of all cores. Needs root and Linux' control groups."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from network.cluster import ClusterError

GROUPS = Path("/sys/fs/cgroup")
PERIOD = 10_000
"""Microseconds. What is over is taken at a period's end: a thread that waits for the next one waits a few
milliseconds, which is short beside a round."""


@contextmanager
def processor(share: float) -> Iterator[None]:
    """This process and those that it starts get that share of the time of all cores together.

    Raises:
        ClusterError: not a share, or the system gives no such group.
    """
    if not 0 < share <= 1:
        raise ClusterError(f"processor={share:g} is no share of one: give a number over 0 and up to 1")
    if share == 1:
        yield
        return
    version_2 = (GROUPS / "cgroup.controllers").exists()
    root = GROUPS if version_2 else GROUPS / "cpu"
    group, before, quota = root / f"slower-{os.getpid()}", root / _own_group(version_2), share * (os.cpu_count() or 1)
    limits = {"cpu.cfs_period_us": f"{PERIOD}", "cpu.cfs_quota_us": f"{round(quota * PERIOD)}"}
    if version_2:
        limits = {"cpu.max": f"{round(quota * PERIOD)} {PERIOD}"}
    try:
        if version_2:
            (root / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
        for file, limit in limits.items():
            (group / file).write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        if group.exists():
            group.rmdir()
        raise ClusterError(f"no control group can be made in {root}: {error.strerror}; run it with sudo") from error
    try:
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _own_group(version_2: bool) -> str:
    """Return this process's own control group, below the root."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (version_2 and not controllers) or "cpu" in controllers.split(","):
            return path.lstrip("/")
    return ""
