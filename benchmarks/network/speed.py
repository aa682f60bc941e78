"""Seconds per step on a slow network: `ddp`, gossip in several forms and decent-dp, ratios within one run.

    sudo python benchmarks/network.py speed --hosts 8 --rates 200mbit 1gbit

Hosts are network namespaces with links of the given rate (`cluster.py`). The accelerator is simulated: every layer
sleeps in forward and twice as long in backward, so that the hosts' share of the processors isn't what is measured; the
network traffic, the updates and the mixing are real. With `--straggler 3` one host, another in every step, is so many
times slower. With `--model linear` the layers multiply matrices instead, on processors that all hosts share. With
`--processor 0.7` all hosts together get so much of the processors' time: a slower processor.

The bound of a step is max(mean compute, bytes / rate), bytes being what a host sends. Writes
`results/cluster-speed-<hardware>.json` (raw times of every step and host) and `.png`. Needs root and iproute2;
decent-dp (the seed paper's own code) is measured where it is installed: `pip install -e '.[benchmark]'`.
"""

import argparse
import importlib.util
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress

from common.hardware import description, sentence, slug
from common.paths import RESULTS, command
from network.cluster import Cluster, ClusterError, bits_per_second, cluster
from network.slower import processor
from network.speed_worker import METHODS, MODELS

SLOWER, WARM_UP = "processor*", 8


def measure(hosts: Cluster, methods: list[str], options: argparse.Namespace, straggler: float) -> dict[str, Any]:
    """{method: {"ends" and "busy": [host][step] of clock and of processor seconds, "sent": bytes per step}}, every host
    one process for all."""
    with tempfile.TemporaryDirectory() as folder:
        plan = {
            "folder": folder,
            "hosts": hosts.hosts,
            "methods": methods,
            "steps": options.steps,
            "parameters": options.parameters,
            "layers": options.layers,
            "compute": options.compute,
            "model": options.model,
            "straggler": straggler,
            "seed": random.randrange(2**31),
        }
        (Path(folder) / "plan.json").write_text(json.dumps(plan))
        words = [*command("network", "speed_worker"), folder]
        longest = 120 + len(methods) * options.steps * options.longest_step
        codes = hosts.run(words, seconds=longest)
        if any(codes):
            raise SystemExit(f"{hosts.hosts} hosts ended with {codes}")
        files = {
            m: [Path(folder) / f"{place}-{rank}.json" for rank in range(hosts.hosts)] for place, m in enumerate(methods)
        }
        records = {m: [json.loads(path.read_text()) for path in paths] for m, paths in files.items()}
    columns = ("ends", "busy")
    return {m: {c: [r[c] for r in rows] for c in columns} | {"sent": rows[0]["sent"]} for m, rows in records.items()}


def seconds_per_step(ends: list[list[float]], warm_up: int) -> float:
    """Wall clock over all hosts: from the last host's end of the warm-up to the last host's end, per step."""
    first, last = max(row[warm_up - 1] for row in ends), max(row[-1] for row in ends)
    return (last - first) / (len(ends[0]) - warm_up)


def busy_per_step(busy: list[list[float]], warm_up: int) -> float:
    """Processor seconds of a host and step, the mean over the hosts; the kernel's work for others isn't in it."""
    return statistics.mean((row[-1] - row[warm_up - 1]) / (len(row) - warm_up) for row in busy)


def mean_compute(seconds: float, hosts: int, straggler: str) -> float:
    """Return the mean seconds of a host and step, with one host that many times slower in each; 0 for layers that don't
    sleep."""
    if straggler in MODELS:
        return 0.0
    times = 1.0 if straggler.startswith(SLOWER) else float(straggler)
    return seconds * (1 + (times - 1) / hosts)


def rows(results: dict[str, Any], warm_up: int) -> list[list[str]]:
    """One row per run: measured seconds, ratio to the bound, to ddp."""
    table = []
    for key, run in results["runs"].items():
        hosts, rate, straggler = key.split(" ")
        seconds = {m: statistics.median(seconds_per_step(t, warm_up) for t in r["turns"]) for m, r in run.items()}
        for method, value in seconds.items():
            wire = 8 * run[method]["sent"] / bits_per_second(rate)
            compute = mean_compute(results["compute"], int(hosts), straggler)
            bound = max(compute, wire)
            ratio = f"{seconds['ddp'] / value:.2f}" if "ddp" in seconds else ""
            busy = 1e3 * statistics.median(busy_per_step(t, warm_up) for t in run[method]["busy"])
            cells = [hosts, rate, straggler, method, f"{value:.3f}", f"{value / bound:.2f}" if bound else ""]
            over = f"{value / compute:.2f}" if compute else ""
            table.append([*cells, over, ratio, f"{busy:.0f}"])
    return table


def table(results: dict[str, Any], warm_up: int) -> str:
    """Markdown."""
    head = [
        "hosts",
        "rate",
        "straggler or model",
        "method",
        "s per step",
        "over its bound",
        "over mean compute",
        "times faster than ddp",
        "processor ms per host and step",
    ]
    lines = [head, ["---"] * len(head), *rows(results, warm_up)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def page(results: dict[str, Any]) -> str:
    """Markdown of all runs."""
    about = f"Simulated accelerator and network, one machine: {sentence(results['hardware'])}."
    return f"{about}\n\n{table(results, results.get('warm_up', WARM_UP))}\n"


def draw(results: dict[str, Any], warm_up: int, path: Path) -> None:
    """One panel for each setting: seconds per step of every method, its bound as a line."""
    from matplotlib import pyplot

    found = {key: [row for row in rows(results, warm_up) if row[:3] == key.split(" ")] for key in results["runs"]}
    heights = [1 + len(panel) for panel in found.values()]
    figure, panels = pyplot.subplots(
        len(found), 1, figsize=(8, 0.26 * sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for axes, (key, panel) in zip(panels[:, 0], found.items(), strict=True):
        names, seconds = [row[3] for row in panel], [float(row[4]) for row in panel]
        bounds = [second / float(row[5]) if row[5] else 0.0 for row, second in zip(panel, seconds, strict=True)]
        axes.barh(names, seconds, color="tab:blue")
        axes.plot(bounds, names, "|", color="black", markersize=9)
        hosts, rate, label = key.split(" ")
        axes.set_title(f"{hosts} hosts, {rate}{_said(label)}", fontsize=9)
        axes.tick_params(labelsize=7)
        axes.invert_yaxis()
    panels[-1, 0].set_xlabel("seconds per step; black: the bound")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _said(label: str) -> str:
    """Return what is unusual about a run."""
    if label.startswith(SLOWER):
        return f", {label.removeprefix(SLOWER)} of the processors' time"
    if label in MODELS:
        return f", a {label} model, which computes"
    return "" if label == "1" else f", one host {label} times slower"


def label_of(options: argparse.Namespace, straggler: float) -> str:
    """Return the label of a setting, in addition to hosts and rate.

    Raises:
        ClusterError: a slower processor together with what has its own label.
    """
    own = f"{straggler:g}" if options.model == "sleeping" else options.model
    if options.processor == 1:
        return own
    if own != "1":
        raise ClusterError(f"processor={options.processor:g} goes without --model and --stragglers")
    return f"{SLOWER}{options.processor:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[8])
    parser.add_argument("--rates", nargs="+", default=["200mbit", "400mbit", "1gbit"])
    parser.add_argument("--stragglers", type=float, nargs="+", default=[1.0])
    parser.add_argument("--model", choices=list(MODELS), default="sleeping")
    parser.add_argument("--processor", type=float, default=1.0, help="share of the processors' time that hosts get")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=[m for m in METHODS if m != "alone"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--parameters", type=int, default=4_200_000, help="float32 numbers of the model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--compute", type=float, default=0.3, help="seconds of forward and backward of a step")
    parser.add_argument("--longest-step", type=float, default=8.0, help="seconds after which a run has failed")
    options = parser.parse_args()
    methods = [m for m in options.methods if m != "decent-dp" or importlib.util.find_spec("decent_dp")]
    path = RESULTS / f"cluster-speed-{slug()}.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    shape = {name: getattr(options, name) for name in ("parameters", "layers", "compute", "steps", "warm_up")}
    results |= {"hardware": description(), **shape}
    stragglers = options.stragglers if options.model == "sleeping" else [1.0]
    for straggler in stragglers:
        label_of(options, straggler)  # refused before anything runs
    settings = [(h, r, s) for h in options.hosts for r in options.rates for s in stragglers]
    with Progress() as progress:
        task = progress.add_task("runs", total=len(settings) * options.turns)
        for count, rate, straggler in settings:
            with processor(options.processor), cluster(count, rate, name="speed") as hosts:
                for turn in range(options.turns):
                    progress.update(task, description=f"{count} hosts, {rate}, straggler {straggler:g}, turn {turn}")
                    measured = measure(hosts, methods, options, straggler)
                    label = label_of(options, straggler)
                    run = results["runs"].setdefault(f"{count} {rate} {label}", {})
                    for method, record in measured.items():
                        before = run[method] if turn else {"turns": [], "busy": []}
                        turns = {"turns": [*before["turns"], record["ends"]], "busy": [*before["busy"], record["busy"]]}
                        run[method] = {**turns, "sent": record["sent"]}
                    path.write_text(json.dumps(results))
                    progress.advance(task)
    draw(results, options.warm_up, path.with_suffix(".png"))
    Console().print(Markdown(page(results)))
