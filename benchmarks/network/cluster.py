"""A cluster on one machine: hosts are network namespaces, links are token buckets of a given rate.

    sudo python benchmarks/cluster.py up --hosts 8 --rate 200mbit
    sudo python benchmarks/cluster.py run -- python recipes/train.py trainer=cpu trainer.num_nodes=8 trainer.devices=1
    sudo python benchmarks/cluster.py down

Every host is joined to one switch (a bridge in a namespace of its own) by a link that is limited in both directions, so
nothing touches the machine's own network. `run` starts the command once for each host with what Lightning's environment
reads: NODE_RANK, LOCAL_RANK=0, MASTER_ADDR, MASTER_PORT. All hosts share the machine's processors: simulate what they
compute (a sleep) where the network is the question.

Needs root and iproute2 (ip, tc).
"""

import argparse
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from common.entry import CannotRun

MOST_HOSTS = 64
GRACE_SECONDS = 20.0
# A bucket fills while hosts compute, and what is in it leaves at once, which no real link would give: 128 kB are 20 ms
# of one of 50 Mbit/s. So it holds this time's bytes, within limits, and TCP hands down at most half of it at a time: a
# packet that doesn't fit has the kernel cut it into those of the wire, which costs up to ten times the processor time.
BURST_SECONDS, LEAST_BURST, MOST_BURST = 1.3e-3, 2**14, 2**17
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class ClusterError(CannotRun):
    """One line: what is wrong and the remedy."""


def bits_per_second(rate: str) -> float:
    """Parse a rate in tc's units: 200mbit -> 2e8."""
    for unit, factor in UNITS.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise ClusterError(f"tc refuses the rate {rate!r}, give one like 200mbit or 1gbit")


def burst_of(rate: str) -> int:
    """Bytes of a link's bucket, a power of two."""
    wanted = min(max(BURST_SECONDS * bits_per_second(rate) / 8, LEAST_BURST), MOST_BURST)
    return 2 ** round(math.log2(wanted))


@dataclass(frozen=True)
class Cluster:
    """Namespaces `{name}-0` to `{name}-{hosts - 1}`, joined by a bridge in `{name}-switch`."""

    name: str = "decentral"
    hosts: int = 2

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return f"{self.name}-switch"

    def host(self, index: int) -> str:
        """The namespace of a host."""
        return f"{self.name}-{index}"

    def address(self, index: int) -> str:
        """Return the address of a host's eth0, which exists inside these namespaces only."""
        return f"10.77.0.{index + 1}"

    def up(self, rate: str) -> None:
        """Build everything; a failure leaves nothing behind.

        Raises:
            ClusterError: too many hosts, a rate that tc refuses, processes of an earlier cluster still running.
        """
        if not 1 <= self.hosts <= MOST_HOSTS:
            raise ClusterError(f"hosts must be from 1 to {MOST_HOSTS}, got {self.hosts}")
        check_machine()
        down(self.name)
        try:
            _ip("netns", "add", self.switch)
            _ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self.switch, "link", "set", "bridge", "up")
            for index in range(self.hosts):
                self._connect(index, rate)
        except BaseException:
            down(self.name)
            raise

    def _connect(self, index: int, rate: str) -> None:
        host, port = self.host(index), f"port{index}"
        _ip("netns", "add", host)
        _ip("-n", host, "link", "set", "lo", "up")
        # The one that every kernel lets a namespace choose. BBR, which the machine may have for itself, leaves part of
        # a slow link idle where neighbours take turns.
        _call(["ip", "netns", "exec", host, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno"])
        _ip("-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
        _ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", host, "address", "add", f"{self.address(index)}/24", "dev", "eth0")
        _ip("-n", host, "link", "set", "eth0", "up")
        self._limit(index, rate)

    def _limit(self, index: int, rate: str) -> None:
        burst = burst_of(rate)
        for namespace, device in ((self.host(index), "eth0"), (self.switch, f"port{index}")):
            _ip("-n", namespace, "link", "set", device, "gso_max_size", str(burst // 2))
            bucket = ("tbf", "rate", rate, "burst", f"{burst}b", "latency", "50ms")
            try:
                _call(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *bucket])
            except ClusterError as error:
                raise ClusterError(f"tc refuses the rate {rate!r}, give one like 200mbit or 1gbit: {error}") from None

    def limit(self, rate: str) -> None:
        """Give every link another rate, in tc's notation: 200mbit, 1gbit."""
        for index in range(self.hosts):
            self._limit(index, rate)

    def environment(self, index: int, port: int) -> dict[str, str]:
        """Return the environment variables of a process on that host, for Lightning's own environment."""
        return {
            **os.environ,
            "NODE_RANK": str(index),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }

    def run(
        self, command: Sequence[str], *, seconds: float, port: int = 29500, environment: Mapping[str, str] | None = None
    ) -> list[int]:
        """Run the command on every host; returns their exit codes.

        If one fails the others get a little time to report an error, then they are ended, as all are after
        `seconds` and on Ctrl-C. No process outlives this call.
        """
        processes, shown = [], []
        try:
            for index in range(self.hosts):
                started = subprocess.Popen(
                    ["ip", "netns", "exec", self.host(index), *command],
                    env={**self.environment(index, port), **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
                processes.append(started)
                assert started.stdout is not None
                shown.append(threading.Thread(target=_show, args=(index, started.stdout), daemon=True))
                shown[-1].start()
            _wait(processes, seconds)
        finally:
            for process in processes:
                _end(process)
        codes = [process.wait() for process in processes]
        for thread in shown:  # a host's last output; not for ever, as a process that it started may hold the pipe
            thread.join(5)
        return codes


def _show(index: int, stream: IO[str]) -> None:
    for line in stream:
        print(f"[{index}] {line}", end="", flush=True)


def _wait(processes: Sequence["subprocess.Popen[str]"], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            end = min(end, time.monotonic() + GRACE_SECONDS)
        if time.monotonic() > end:
            print("ended: out of time, or a host failed", file=sys.stderr)
            return
        time.sleep(0.05)


def _end(process: "subprocess.Popen[str]") -> None:
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, signum)
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                continue


def existing(name: str) -> list[str]:
    """Namespaces that belong to a cluster of that name."""
    listed = [line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()]
    return [namespace for namespace in listed if re.fullmatch(rf"{re.escape(name)}-(\d+|switch)", namespace)]


def find(name: str) -> Cluster:
    """The cluster that is up.

    Raises:
        ClusterError: there is none.
    """
    hosts = [namespace for namespace in existing(name) if not namespace.endswith("-switch")]
    if not hosts:
        raise ClusterError(f"no cluster named {name!r} is up: run `cluster.py up --hosts 4 --rate 200mbit` first")
    return Cluster(name, len(hosts))


def down(name: str) -> None:
    """Remove a cluster and end what runs in it, also what a killed run left behind."""
    for namespace in existing(name):
        for signum in (signal.SIGTERM, signal.SIGKILL):
            running = [int(pid) for pid in _ip("netns", "pids", namespace).split()]
            for pid in running:
                try:
                    os.kill(pid, signum)
                except ProcessLookupError:
                    continue
            if running:
                time.sleep(0.5)
        _ip("netns", "delete", namespace)


@contextmanager
def cluster(hosts: int, rate: str, name: str = "decentral") -> Iterator[Cluster]:
    """Up, and down again whatever happens."""
    made = Cluster(name, hosts)
    made.up(rate)
    try:
        yield made
    finally:
        down(name)


def check_machine() -> None:
    """See that this can work here.

    Raises:
        ClusterError: not Linux with iproute2, or not root.
    """
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise ClusterError(f"{' and '.join(missing)} not found: install iproute2 (Debian: apt-get install iproute2)")
    if os.geteuid() != 0:
        raise ClusterError(f"network namespaces need root, this is user {os.geteuid()}: run it with sudo")


def _ip(*words: str) -> str:
    return _call(["ip", *words])


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        says = " ".join(done.stderr.split())
        raise ClusterError(f"`{' '.join(command)}` failed: {says or f'exit {done.returncode}'}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0, the largest exit code of the hosts, or 2 for what can't be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="decentral", help="more than one cluster at a time have different names")
    commands = parser.add_subparsers(dest="what", required=True)
    up = commands.add_parser("up", help="build it, in the place of an earlier one of the same name")
    up.add_argument("--hosts", type=int, default=4)
    up.add_argument("--rate", default="200mbit", help="of every link, in tc's words: 200mbit, 1gbit")
    run = commands.add_parser("run", help="run a command once for each host")
    run.add_argument("--seconds", type=float, default=600, help="end everything after so many")
    run.add_argument("--port", type=int, default=29500)
    run.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND")
    commands.add_parser("down", help="remove it and end what runs in it")
    options = parser.parse_args(arguments)
    try:
        if options.what == "up":
            Cluster(options.name, options.hosts).up(options.rate)
            print(f"{options.hosts} hosts at {options.rate}: cluster.py run -- COMMAND")
            return 0
        check_machine()
        if options.what == "down":
            down(options.name)
            return 0
        command = options.command[1:] if options.command[:1] == ["--"] else options.command
        if not command:
            raise ClusterError("no command given: cluster.py run -- python recipes/train.py ...")
        return max(map(abs, find(options.name).run(command, seconds=options.seconds, port=options.port)))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
