"""Predicted against measured seconds per step, on the cluster of namespaces.

    sudo python benchmarks/network.py speed --hosts 8
    sudo python benchmarks/network.py predicted --hosts 8

Measures the network of the hosts as a user would (`python -m lightning_decentral.cli.network` on all), a step of the
sleeping model on hosts that train by themselves, and what rounds of gossip cost the hosts without the network, with a
step's sleep between two; puts all into a profile, and asks the forecasts that `lightning-decentral plan` asks. What was
measured comes from `network/speed.py`'s results with as many hosts at the same rates; where it has none for a setting,
that is left out. Writes `results/predicted-<hardware>.json` and `.png`.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from common.hardware import description, sentence, slug
from common.paths import RESULTS, command
from lightning_decentral.planner.forecasts import method_of
from lightning_decentral.shared.plan.forecast import Cluster as Devices
from lightning_decentral.shared.plan.forecast import Setting, even
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import BlockCost, Model, Profile, RoundWork, read, write
from network.cluster import Cluster, cluster
from network.speed import measure, seconds_per_step
from network.speed_worker import STRATEGIES

ALIKE = 0.05
"""Methods whose measured seconds differ by less have no order."""
START = (
    "RANK=$NODE_RANK WORLD_SIZE={size} LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 exec {python} -m lightning_decentral.cli.network"
)


def host_seconds(hosts: Cluster, measured: dict[str, Any], warm_up: int) -> float:
    """Return a step's seconds in addition to the sleep: the update, Lightning's work, waits for a shared processor."""
    shape = {name: measured[name] for name in ("steps", "parameters", "layers", "compute")}
    options = argparse.Namespace(**shape, model="sleeping", longest_step=8.0)
    rows = measure(hosts, ["alone"], options, 1.0)["alone"]["ends"]
    each = statistics.mean(seconds_per_step([row], warm_up) for row in rows)
    return each - measured["compute"]


def rounds(hosts: Cluster, parameter_bytes: int, compute_seconds: float) -> tuple[RoundWork, ...]:
    """Means over the hosts."""
    with tempfile.TemporaryDirectory() as folder:
        words = [folder, str(parameter_bytes), str(compute_seconds)]
        codes = hosts.run([*command("network", "rounds"), *words], seconds=600)
        if any(codes):
            raise SystemExit(f"{hosts.hosts} hosts ended with {codes}")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(hosts.hosts)]
    sides = ("own_seconds_per_byte", "heard_seconds_per_byte", "round_seconds", "message_seconds")
    return tuple(
        RoundWork(of_codec[0]["codec"], *(statistics.mean(work[side] for work in of_codec) for side in sides))
        for of_codec in zip(*found, strict=True)
    )


def model(measured: dict[str, Any], beside: float, works: tuple[RoundWork, ...]) -> Model:
    """The sleeping model of `network/speed_worker.py`: a third of the seconds forward, the rest backward."""
    layers, seconds, parameters = measured["layers"], measured["compute"], measured["parameters"]
    forward = seconds / 3 / layers
    size = 4 * (parameters // layers)
    blocks = [BlockCost(f"layer {i}", forward, 2 * forward, beside / layers, size) for i in range(layers)]
    return Model("sleeping layers", "simulated accelerator", tuple(blocks), rounds=works)


def profiled(hosts: Cluster, trained: Model, sizes: str = "65536 1048576 8388608 33554432") -> Profile:
    """Return a profile with the network as the hosts measure it, on messages of so many bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        write(Profile(trained), path)
        words = f"--sizes {sizes} --repeats 2 --longest-seconds 1"
        start = START.format(size=hosts.hosts, python=sys.executable)
        codes = hosts.run(["bash", "-c", f"{start} --model {path} {words}"], seconds=600)
        if any(codes):
            raise SystemExit(f"{hosts.hosts} hosts ended with {codes}")
        return read(path)


def predicted(profile: Profile, hosts: int) -> dict[str, float]:
    """Seconds per step by method."""
    devices = Devices(hosts, 1)
    setting = Setting(profile.model, Network(profile.network), devices)
    methods = {name: method_of(make(), devices, 1) for name, make in STRATEGIES.items()}
    return {name: float(method.seconds(setting, even(hosts))[0]) for name, method in methods.items()}


def measured_seconds(run: dict[str, Any], warm_up: int) -> dict[str, float]:
    """Median over turns, by method."""
    return {m: statistics.median(seconds_per_step(turn, warm_up) for turn in r["turns"]) for m, r in run.items()}


def ordered_alike(forecast: dict[str, float], found: dict[str, float]) -> tuple[int, int]:
    """(pairs of methods in the same order, pairs that have one)."""
    pairs = [(a, b) for a, b in combinations(forecast, 2) if abs(found[a] - found[b]) > ALIKE * min(found[a], found[b])]
    same = [(forecast[a] < forecast[b]) == (found[a] < found[b]) for a, b in pairs]
    return sum(same), len(pairs)


def table(rows: dict[str, dict[str, tuple[float, float]]]) -> str:
    """Markdown."""
    lines = ["| hosts, rate | method | predicted s | measured s | off by |", "| --- | --- | --- | --- | --- |"]
    for setting, methods in rows.items():
        for method, (forecast, found) in methods.items():
            lines.append(f"| {setting} | {method} | {forecast:.3f} | {found:.3f} | {forecast / found - 1:+.1%} |")
    return "\n".join(lines)


def verdict(rows: dict[str, dict[str, tuple[float, float]]]) -> str:
    """Return how many are within a tenth, and in order."""
    errors = [abs(forecast / found - 1) for methods in rows.values() for forecast, found in methods.values()]
    text = f"Within 10 %: {sum(e <= 0.1 for e in errors)} of {len(errors)}; largest {max(errors):.0%}."
    for setting, methods in rows.items():
        same, pairs = ordered_alike({m: f for m, (f, _) in methods.items()}, {m: s for m, (_, s) in methods.items()})
        text += f" {setting}: {same} of {pairs} pairs that differ by more than 5 % in the predicted order."
    return text


def page(results: dict[str, Any]) -> str:
    """Markdown of all settings."""
    about, rows = f"Simulated accelerator and network, one machine: {sentence(results['hardware'])}.", results["rows"]
    return f"{about}\n\n{verdict(rows)}\n\n{table(rows)}\n"


def draw(rows: dict[str, dict[str, tuple[float, float]]], path: Path) -> None:
    """Every configuration as a point."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6), layout="constrained")
    for setting, methods in rows.items():
        axes.loglog(*zip(*methods.values(), strict=True), "o", label=setting)
    ends = [min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(ends, [e / 1.1 for e in ends], [e / 0.9 for e in ends], color="black", alpha=0.08)
    axes.set(xlabel="predicted seconds per step", ylabel="measured", xlim=ends, ylim=ends)
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[8])
    parser.add_argument("--rates", nargs="+", default=["200mbit", "400mbit", "1gbit"])
    parser.add_argument("--warm-up", type=int, default=8)
    options = parser.parse_args()
    source = RESULTS / f"cluster-speed-{slug()}.json"
    measured = json.loads(source.read_text()) if source.exists() else {"runs": {}}
    settings = [(h, r) for h, r in product(options.hosts, options.rates) if f"{h} {r} 1" in measured["runs"]]
    if not settings:
        raise SystemExit(
            f"nothing was measured: run network.py speed --hosts {' '.join(map(str, options.hosts))} first"
        )
    rows, profiles = {}, {}
    for count, rate in settings:
        found = measured_seconds(measured["runs"][f"{count} {rate} 1"], options.warm_up)
        with cluster(count, rate, name="predicted") as hosts:
            beside = host_seconds(hosts, measured, options.warm_up)
            works = rounds(hosts, 4 * measured["parameters"], measured["compute"])
            profile = profiled(hosts, model(measured, beside, works))
        forecasts = predicted(profile, count)
        setting = f"{count}, {rate}"
        rows[setting] = {m: (s, found[m]) for m, s in forecasts.items() if m in found}
        profiles[setting] = asdict(replace(profile, hosts={}))
    path = RESULTS / f"predicted-{slug()}.json"
    results = {"hardware": description(), "rows": rows, "profiles": profiles}
    path.write_text(json.dumps(results, indent=1) + "\n")
    draw(rows, path.with_suffix(".png"))
    Console().print(Markdown(page(results)))
