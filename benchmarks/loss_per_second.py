"""Seconds to a loss on slow networks: gossip, codes and outer rounds with Muon against the strongest forms of `ddp`.

    sudo python benchmarks/loss_per_second.py --recipes gpt --seeds 0 1 2 --rates 10mbit 50mbit 200mbit 1gbit

Hosts are network namespaces (`cluster.py`); computation, messages and losses are real, on processors that all hosts
share. A loss after so many steps doesn't depend on the network, so it is measured once, over links that hide nothing
and delay nothing, whole runs with every seed; a step is timed at each rate, over some tens of steps. Seconds to a loss
are the one times the other. Rates and momenta are each method's best on one grid (`tuning.py`); with a hook they are
those without.

Writes `results/loss-per-second-<hardware>.json` and `.md`; what is in the first isn't measured again. Needs root and
iproute2. `--tables` writes the page again.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from cluster import ClusterError, bits_per_second, cluster
from cluster_accuracy import INT8, LOSS, Recipe, measure
from cluster_accuracy import RECIPES as PLAIN_RECIPES
from hardware import description, slug
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress

HERE = Path(__file__).parent
ADAMW, MUON = ["strategy=ddp", "optimizer.lr=6e-3"], ["strategy=ddp", "optimizer=muon"]
DIFFERENCES = ["strategy/codec=difference_compression", "strategy/codec@strategy.codec.inner=int4"]
STREAMED = ["strategy/topology=stream", "strategy.topology.steps=8", "strategy.topology.parts=8", "strategy.delay=1"]
METHODS = {
    "ddp": ADAMW,
    "ddp, AccumAdamW": ["strategy=ddp", "optimizer=accum_adamw"],
    "ddp, fp16 hook": [*ADAMW, "hook=fp16"],
    "ddp, PowerSGD": [*ADAMW, "hook=powersgd"],
    "ddp, Muon": MUON,
    "ddp, Muon, fp16 hook": [*MUON, "hook=fp16"],
    "ddp, Muon, PowerSGD": [*MUON, "hook=powersgd"],
    "gossip, int8, AccumAdamW": [*INT8, "optimizer=accum_adamw"],
    "gossip, int8, Muon": ["experiment=gossip_muon"],
    "gossip, int4 differences, Muon": ["experiment=gossip_muon", *DIFFERENCES, "optimizer.lr=3e-2"],
    "compressed, int8, Muon": ["experiment=compressed_muon"],
    "compressed, int4, Muon": [
        *["experiment=compressed_muon", "strategy/codec=int4", "optimizer.lr=3e-2", "optimizer.momentum=0.9"],
    ],
    "outer rounds of 8, int4, Muon": ["experiment=outer_muon"],
    "streamed outer rounds of 8, int4, Muon": ["experiment=outer_muon", *STREAMED, "optimizer.momentum=0.9"],
}
"""The first form of `ddp` is what the others are compared with; whose name begins with it is a peer."""
GPT = PLAIN_RECIPES["gpt"]
# In 256 tokens a worker and step Muon's products cost as much as the rest; in 1,024 about a quarter of that.
LARGER_BATCH = GPT._replace(words=[*GPT.words, "data.batch_size=16"], steps=280, every=8)
OURS = {method: words for method, words in METHODS.items() if "Muon" in method and not method.startswith("ddp")}
LONGER = {"gpt": ("gpt-1440-steps", "gpt-1620-steps")}
"""What ours are trained in, too, with schedules of that length: steps are cheap to them, and who ends a run of as many
steps above a peer may come to its loss sooner all the same."""
RECIPES = {
    "gpt": GPT._replace(methods=METHODS),
    "gpt-1440-steps": GPT._replace(steps=1440, methods=OURS),
    "gpt-1620-steps": GPT._replace(steps=1620, every=30, methods=OURS),
    "gpt-1024-tokens": LARGER_BATCH._replace(methods=METHODS),
    "larger-gpt": PLAIN_RECIPES["larger-gpt"]._replace(methods=METHODS),
}
FREE = "10gbit"
"""Links for the losses: no method waits for them."""
TIMED = {"10mbit": 26, "50mbit": 50}
"""Steps that are run, elsewhere 74; timed are those after the tenth, a multiple of the outer rounds' 8."""


def options_of(steps: int | None, longest: float) -> argparse.Namespace:
    return argparse.Namespace(steps=steps, longest=longest)


def curves(hosts: int, recipe: Recipe, seed: int, steps: int | None, longest: float) -> dict[str, Any]:
    """{method: {"steps", "scores", "bytes_sent", ...}} of whole runs."""
    with cluster(hosts, FREE, name="losses") as place:
        return dict(measure(place, recipe, options_of(steps, longest), seed)["methods"])


def seconds(hosts: int, recipe: Recipe, rate: str, longest: float) -> dict[str, float]:
    """{method: seconds per step at the rate}."""
    steps = TIMED.get(rate, 74)
    with cluster(hosts, rate, name="seconds") as place:
        found = measure(place, recipe._replace(every=steps), options_of(steps, longest), 0)["methods"]
    return {method: run["seconds_per_step"] for method, run in found.items()}


class Table:
    """What was measured of one recipe on so many hosts, over seeds and rates."""

    def __init__(self, results: dict[str, Any], recipe: str, hosts: int) -> None:
        begin = f"{recipe} {hosts} "
        self.title = f"{recipe}, {hosts} hosts"
        self.runs = [run for key, run in results["curves"].items() if key.startswith(begin)]
        names = [f"{name} {hosts} " for name in LONGER.get(recipe, ())]
        self.longer = [[run for key, run in results["curves"].items() if key.startswith(name)] for name in names]
        timed = {key.removeprefix(begin): run for key, run in results["seconds"].items() if key.startswith(begin)}
        self.rates = dict(sorted(timed.items(), key=lambda item: bits_per_second(item[0])))
        self.methods = list(self.runs[0]) if self.runs else []
        self.peers = [method for method in self.methods if method.startswith("ddp")]

    def last(self, method: str) -> float:
        """Test loss after the last step, mean over the seeds."""
        return statistics.mean(run[method]["scores"][-1] for run in self.runs)

    def steps(self, method: str, loss: float, of: list[Any] | None = None) -> float | None:
        """Of the first mark at the loss or below, to the third digit, of the mean curve over the seeds.

        Args:
            of: runs with a longer schedule.
        """
        runs = [run for run in (self.runs if of is None else of) if method in run]
        columns = zip(*(run[method]["scores"] for run in runs), strict=True)
        marks = zip(runs[0][method]["steps"] if runs else [], map(statistics.mean, columns), strict=True)
        return next((step for step, score in marks if round(score, 3) <= round(loss, 3)), None)

    def sooner(self, method: str, peer: str, rate: str, of: list[Any] | None = None) -> str:
        """Times sooner than the peer at the loss that the peer has in the end."""
        mine, theirs = self.steps(method, self.last(peer), of), self.steps(peer, self.last(peer))
        if mine is None or theirs is None:
            return "not reached"
        return f"{theirs * self.rates[rate][peer] / (mine * self.rates[rate][method]):.2f}"

    def losses(self) -> list[list[str]]:
        """Bytes, loss and seconds per step."""
        head = ["method", "MB sent per step", f"{LOSS} at the end", *(f"s per step, {rate}" for rate in self.rates)]
        rows = [head, ["---"] * len(head)]
        for method in self.methods:
            scores = [run[method]["scores"][-1] for run in self.runs]
            spread = f" ± {statistics.stdev(scores):.3f}" if len(scores) > 1 else ""
            row = [method, f"{self.runs[0][method]['bytes_sent'] / 1e6:.3f}", f"{statistics.mean(scores):.3f}{spread}"]
            rows.append([*row, *(f"{self.rates[rate][method]:.3f}" for rate in self.rates)])
        return rows

    def to_the_loss_of(self, peer: str) -> list[list[str]]:
        """Steps to the peer's last loss, and times sooner than the peer, by rate."""
        head = ["method", f"steps to {self.last(peer):.3f}", *self.rates]
        rows = [head, ["---"] * len(head)]
        for method in self.methods:
            steps = self.steps(method, self.last(peer))
            cells = ["" if steps is None else self.sooner(method, peer, rate) for rate in self.rates]
            rows.append(
                [method, "not reached", *([""] * len(cells))] if steps is None else [method, f"{steps}", *cells]
            )
        return rows

    def against_each_peer(self) -> list[list[str]]:
        """The soonest of ours at the loss that each peer has in the end, in as many steps or with a longer schedule."""
        head = ["peer", "its loss", *self.rates]
        rows = [head, ["---"] * len(head)]
        for peer in self.peers:
            cells = [self._soonest(peer, rate) for rate in self.rates]
            rows.append([peer, f"{self.last(peer):.3f}", *cells])
        return rows

    def _soonest(self, peer: str, rate: str) -> str:
        found = []
        for method in (method for method in self.methods if method not in self.peers):
            for runs in (self.runs, *self.longer):
                if self.steps(method, self.last(peer), runs) is not None:
                    name = method if runs is self.runs else f"{method}; {runs[0][method]['steps'][-1]} steps"
                    found.append((float(self.sooner(method, peer, rate, runs)), name))
        return "{:.2f} ({})".format(*max(found)) if found else "none of ours reaches it"

    def markdown(self) -> str:
        steps = self.runs[0]["ddp"]["steps"][-1]
        parts = [f"## {self.title}\n\n{self.title}: {len(self.runs)} seed(s), {steps} steps.", lines(self.losses())]
        for peer in (self.peers[0], "ddp, Muon, fp16 hook"):
            if peer in self.peers:
                parts.append(f"{self.title}: times sooner than `{peer}` at the loss that it has in the end:")
                parts.append(lines(self.to_the_loss_of(peer)))
        parts.append(f"{self.title}: times sooner at the loss that each peer has in the end, the soonest of ours:")
        return "\n\n".join([*parts, lines(self.against_each_peer())])


def lines(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def report(results: dict[str, Any], path: Path) -> str:
    """Writes the page of what has run."""
    places = dict.fromkeys(tuple(key.split(" ")[:2]) for key in results["curves"])
    places = {place: None for place in places if not any(place[0] in names for names in LONGER.values())}
    machine = ", ".join(f"{key} {value}" for key, value in results.get("hardware", {}).items())
    head = "Hosts of one processor thread each, namespaces on one machine; computation is real, on processors that "
    head += f"all hosts share: {machine}."
    if also := results.get("losses also on"):
        head += f" Losses of further seeds also on: {', '.join(also)}."
    tables = [Table(results, recipe, int(hosts)).markdown() for recipe, hosts in places]
    text = "\n\n".join([head, *tables]) + "\n"
    path.with_suffix(".md").write_text(text)
    return text


def about(results: dict[str, Any], timed: bool) -> None:
    """Notes what it is measured on: `hardware` is that of the seconds, losses may come from another machine."""
    here = description()
    if timed or "hardware" not in results:
        results["hardware"] = here
    elif here["processor"] != results["hardware"]["processor"]:
        results["losses also on"] = sorted({*results.get("losses also on", []), here["processor"]})


def run(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Measures the methods that aren't there yet, and keeps them as soon as they are."""
    keys = [("seconds", f"{r} {options.hosts} {rate}", r, rate) for r in options.recipes for rate in options.rates]
    keys += [("curves", f"{r} {options.hosts} {seed}", r, seed) for seed in options.seeds for r in options.recipes]
    with Progress() as progress:
        for kind, key, recipe, what in progress.track(keys, description="runs"):
            known, every = results[kind].get(key, {}), RECIPES[recipe]
            missing = {method: words for method, words in every.methods.items() if method not in known}
            if not missing:
                continue
            left = every._replace(methods=missing)
            if kind == "curves":
                found: Any = curves(options.hosts, left, what, options.steps, options.longest)
            else:
                found = seconds(options.hosts, left, what, options.longest)
            known |= found
            results[kind][key] = {method: known[method] for method in every.methods}
            options.results.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", nargs="*", default=["10mbit", "50mbit", "200mbit", "1gbit"])
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=["gpt"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--steps", type=int, help="of the losses, instead of the recipe's own; give --results, too")
    parser.add_argument("--longest", type=float, default=3000.0, help="seconds after which a launch has failed")
    parser.add_argument("--results", type=Path, default=HERE / "results" / f"loss-per-second-{slug()}.json")
    parser.add_argument("--tables", action="store_true", help="measure nothing, write the page")
    options = parser.parse_args()
    results: dict[str, Any] = {"curves": {}, "seconds": {}}
    if options.results.exists():
        results = json.loads(options.results.read_text())
    if not options.tables:
        about(results, timed=bool(options.rates))
    if not options.tables:
        run(options, results)
    Console().print(Markdown(report(results, options.results)))


if __name__ == "__main__":
    try:
        main()
    except ClusterError as error:
        sys.exit(f"error: {error}")
