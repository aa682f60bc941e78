"""A round of gossip by TCP's congestion control: of the host, or of the route to the others.

    sudo python benchmarks/network.py congestion

Four namespaces (`cluster.py`) at 200 Mb/s, a model that sleeps instead of computing (`network/speed.py`), plain gossip.
Seconds per step and times their bound, the bytes over the rate. `route congctl X` leaves BBR the host's own and names X
on the route to the other hosts alone, as docs/cluster.md says. Writes `results/congestion-<hardware>.json`.
"""

import argparse
import json
import subprocess

from common.hardware import description, slug
from common.paths import RESULTS
from network.cluster import Cluster, bits_per_second, cluster
from network.speed import measure, seconds_per_step

HOSTS, RATE, WARM_UP = 4, "200mbit", 6
SETTINGS = argparse.Namespace(steps=22, parameters=4_200_000, layers=8, compute=0.3, model="sleeping", longest_step=8.0)
WAYS = {"reno": ("reno", ""), "bbr": ("bbr", "")}
WAYS |= {f"bbr, route congctl {name}": ("bbr", name) for name in ("reno", "cubic")}


def choose(hosts: Cluster, own: str, route: str) -> None:
    """Choose the congestion control on every host. A namespace may choose from `sysctl
    net.ipv4.tcp_allowed_congestion_control`."""
    for index in range(hosts.hosts):
        name = hosts.host(index)
        control = f"net.ipv4.tcp_congestion_control={own}"
        subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", control], check=True)
        if route:
            words = ["10.77.0.0/24", "dev", "eth0", "congctl", route]
            subprocess.run(["ip", "-n", name, "route", "change", *words], check=True)


def main() -> None:
    found = {}
    for way, (own, route) in WAYS.items():
        with cluster(HOSTS, RATE, name="congestion") as hosts:
            choose(hosts, own, route)
            run = measure(hosts, ["gossip"], SETTINGS, 1.0)["gossip"]
        seconds, bound = seconds_per_step(run["ends"], WARM_UP), 8 * run["sent"] / bits_per_second(RATE)
        found[way] = {"seconds": seconds, "over its bound": seconds / bound}
        print(f"{way}: {seconds:.3f} s, {seconds / bound:.2f} times its bound", flush=True)
    path = RESULTS / f"congestion-{slug()}.json"
    path.write_text(json.dumps({"ways": found, "hosts": HOSTS, "rate": RATE, "hardware": description()}, indent=1))
