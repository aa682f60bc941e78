"""Network between hosts: delays and bandwidths as a file, JSON matrices or a CSV list of links.

seconds[source][target] = latency + bytes / bandwidth"""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_decentral.shared.plan.arguments import text_of

FORMAT = "lightning_decentral hosts"
VERSION = 1
COLUMNS = ("source", "target", "latency_seconds", "bytes_per_second")

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class HostLinks:
    """Latency and bandwidth of the link between every two hosts."""

    hosts: tuple[str, ...]
    latency_seconds: Matrix  # [source, target]; the diagonal of both matrices is ignored
    bytes_per_second: Matrix

    def __post_init__(self) -> None:
        n = len(self.hosts)
        if not n or len(set(self.hosts)) < n:
            raise ValueError(f"hosts must be one or more different names, got {list(self.hosts)}")
        for name in ("latency_seconds", "bytes_per_second"):
            shape = getattr(self, name).shape
            if shape != (n, n):
                raise ValueError(f"{name} is {shape[0]} x {shape[1]}, and there are {n} hosts: give {n} rows of {n}")
        links = ~np.eye(n, dtype=bool)
        for name, values, right, wanted in (
            ("latency_seconds", self.latency_seconds, self.latency_seconds >= 0, "0 or more seconds"),
            ("bytes_per_second", self.bytes_per_second, self.bytes_per_second > 0, "more than 0"),
        ):
            for source, target in np.argwhere(links & ~right):
                link, value = f"from {self.hosts[source]} to {self.hosts[target]}", float(values[source, target])
                raise ValueError(f"{name} {link} must be {wanted}, got {value}: measure this link again")

    def seconds(self, message_bytes: float) -> Matrix:
        """Seconds of a message, [source, target]; 0 on the diagonal."""
        # The diagonal is ignored, and may hold zeros.
        with np.errstate(divide="ignore", invalid="ignore"):
            found = self.latency_seconds + message_bytes / self.bytes_per_second
        np.fill_diagonal(found, 0.0)
        return found

    def only(self, hosts: Sequence[str]) -> "HostLinks":
        """Select the links between these hosts, in this order. ValueError: a host is missing."""
        missing = [host for host in hosts if host not in self.hosts]
        if missing:
            raise ValueError(f"host {missing[0]} is missing: there are {', '.join(self.hosts)}; measure it, too")
        places = [self.hosts.index(host) for host in hosts]
        both = np.ix_(places, places)
        return HostLinks(tuple(hosts), self.latency_seconds[both], self.bytes_per_second[both])

    def write(self, path: str | Path) -> None:
        """Write JSON; zeros on the diagonals."""
        rows = {name: np.where(np.eye(len(self.hosts)), 0.0, getattr(self, name)).tolist() for name in COLUMNS[2:]}
        Path(path).write_text(json.dumps({"format": FORMAT, "version": VERSION, "hosts": self.hosts, **rows}, indent=1))


def of(hosts: Sequence[str], pairs: Sequence[Sequence[tuple[float, float]]]) -> HostLinks:
    """Links from pairs [source][target] -> (latency in seconds, bytes per second)."""
    both = np.array(pairs, dtype=np.float64)
    return HostLinks(tuple(hosts), both[..., 0], both[..., 1])


def read(path: str | Path) -> HostLinks:
    """Read JSON that `HostLinks.write` wrote, or a CSV file with the columns source, target, latency_seconds,
    bytes_per_second and one line for each direction of each link. ValueError: the file can't be read, is of another
    kind or not square, or lacks a link, host, latency or rate."""
    text = text_of(path, "give a file of hosts")
    if Path(path).suffix == ".csv":
        return _listed(path, text)
    try:
        found: Any = json.loads(text)
    except ValueError:
        raise ValueError(f"{path} is no JSON: give a file of hosts, or name a CSV file .csv") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("version") != VERSION:
        raise ValueError(f'{path} is not a file of hosts: it must have "format": "{FORMAT}" and "version": {VERSION}')
    try:
        return HostLinks(tuple(map(str, found["hosts"])), *(_square(name, found[name]) for name in COLUMNS[2:]))
    except KeyError as error:
        raise ValueError(f"{path} has no {error}: it needs hosts, latency_seconds and bytes_per_second") from None


def _square(name: str, rows: Any) -> Matrix:
    try:
        found = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be rows of numbers, all equally long") from None
    if found.ndim != 2 or found.shape[0] != found.shape[1]:
        shape = " x ".join(map(str, found.shape))
        raise ValueError(f"{name} must be square, got {shape}: give a row and a column for each host")
    return found


def _listed(path: str | Path, text: str) -> HostLinks:
    rows = list(csv.DictReader(text.splitlines()))
    if not rows or set(COLUMNS) - set(rows[0]):
        raise ValueError(f"{path} must begin with the line {','.join(COLUMNS)} and list links")
    links = {}
    for row in rows:
        try:
            link = float(row["latency_seconds"]), float(row["bytes_per_second"])
        except (TypeError, ValueError):
            raise ValueError(f"{path}: no numbers in the link from {row['source']} to {row['target']}") from None
        links[row["source"], row["target"]] = link
    hosts = tuple(dict.fromkeys(host for row in rows for host in (row["source"], row["target"])))
    missing = [(a, b) for a in hosts for b in hosts if a != b and (a, b) not in links]
    if missing:
        raise ValueError(f"{path} has no link from {missing[0][0]} to {missing[0][1]}: list every two hosts both ways")
    return of(hosts, [[links.get((a, b), (0.0, 0.0)) for b in hosts] for a in hosts])
