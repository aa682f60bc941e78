"""The page of `loss_per_second.py`: losses, seconds per step, and how many times sooner each method is at a loss."""

import statistics
from pathlib import Path
from typing import Any

from cluster import bits_per_second
from cluster_accuracy import LOSS

LONGER = {"gpt": ("gpt-1440-steps", "gpt-1620-steps")}
"""What ours are trained in, too, with schedules of that length: steps are cheap to them, and who ends a run of as many
steps above a peer may come to its loss sooner all the same."""
BATCHES = {"gpt": "gpt-1024-tokens", "gpt-1024-tokens": "gpt"}
"""The same model and as many examples in batches of another size, in which ours may be sooner."""
PEERS = ("ddp", "torchft", "decent-dp")
"""How the names of peers begin."""


class Table:
    """What was measured of one recipe on so many hosts, over seeds and rates."""

    def __init__(self, results: dict[str, Any], recipe: str, hosts: int) -> None:
        begin = f"{recipe} {hosts} "
        self.title = f"{recipe}, {hosts} hosts"
        self.runs = [run for key, run in results["curves"].items() if key.startswith(begin)]
        names = [f"{name} {hosts} " for name in LONGER.get(recipe, ())]
        self.longer = [[run for key, run in results["curves"].items() if key.startswith(name)] for name in names]
        self.rates = rates_of(results, begin)
        other = f"{BATCHES.get(recipe)} {hosts} "
        self.other = [run for key, run in results["curves"].items() if key.startswith(other)]
        self.others, self.others_rates = BATCHES.get(recipe), rates_of(results, other)
        self.methods = list(max(self.runs, key=len)) if self.runs else []
        self.peers = [method for method in self.methods if method.startswith(PEERS)]

    def last(self, method: str) -> float:
        """Test loss after the last step, mean over the seeds."""
        return statistics.mean(self._ends(method))

    def _ends(self, method: str) -> list[float]:
        return [run[method]["scores"][-1] for run in self.runs if method in run]

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
        own = (self.others_rates if of is self.other else self.rates).get(rate, {}).get(method)
        its = self.rates[rate].get(peer)
        return f"{theirs * its / (mine * own):.2f}" if own and its else "-"

    def losses(self) -> list[list[str]]:
        """Bytes, loss and seconds per step."""
        head = ["method", "MB sent per step", f"{LOSS} at the end", *(f"s per step, {rate}" for rate in self.rates)]
        rows = [head, ["---"] * len(head)]
        for method in self.methods:
            scores, run = self._ends(method), next(run[method] for run in self.runs if method in run)
            spread = f" ± {statistics.stdev(scores):.3f}" if len(scores) > 1 else ""
            row = [method, f"{run['bytes_sent'] / 1e6:.3f}", f"{statistics.mean(scores):.3f}{spread}"]
            timed = [self.rates[rate].get(method) for rate in self.rates]
            rows.append([*row, *("-" if value is None else f"{value:.3f}" for value in timed)])
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
        """The soonest of ours at the loss that each peer has in the end.

        In as many steps of as many tokens, with a longer schedule, or in batches of another size.
        """
        head = ["peer", "its loss", *self.rates]
        rows = [head, ["---"] * len(head)]
        for peer in self.peers:
            cells = [self._soonest(peer, rate) for rate in self.rates]
            rows.append([peer, f"{self.last(peer):.3f}", *cells])
        return rows

    def _soonest(self, peer: str, rate: str) -> str:
        found = []
        for method in (method for method in self.methods if method not in self.peers):
            for runs in (self.runs, *self.longer, self.other):
                sooner = self.sooner(method, peer, rate, runs)
                if sooner not in ("-", "not reached"):
                    found.append((float(sooner), f"{method}{self._how(runs, method)}"))
        return "{:.2f} ({})".format(*max(found)) if found else "none of ours reaches it"

    def _how(self, runs: list[Any], method: str) -> str:
        """In what these runs differ from the recipe's."""
        steps = next(run[method]["steps"][-1] for run in runs if method in run)
        return "" if runs is self.runs else f"; {self.others}" if runs is self.other else f"; {steps} steps"

    def markdown(self) -> str:
        steps = self.runs[0]["ddp"]["steps"][-1]
        parts = [f"## {self.title}\n\n{self.title}: {len(self.runs)} seed(s), {steps} steps.", lines(self.losses())]
        for peer in (self.peers[0], "ddp, Muon, fp16 hook"):
            if peer in self.peers:
                parts.append(f"{self.title}: times sooner than `{peer}` at the loss that it has in the end:")
                parts.append(lines(self.to_the_loss_of(peer)))
        parts.append(f"{self.title}: times sooner at the loss that each peer has in the end, the soonest of ours:")
        return "\n\n".join([*parts, lines(self.against_each_peer())])


def rates_of(results: dict[str, Any], begin: str) -> dict[str, dict[str, float]]:
    """{rate: {method: seconds per step}} of the places that begin so, the slowest link first."""
    timed = {key.removeprefix(begin): run for key, run in results["seconds"].items() if key.startswith(begin)}
    return dict(sorted(timed.items(), key=lambda item: bits_per_second(item[0])))


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
