"""The page of `loss/per_second.py`: losses, seconds per step, and how many times faster each method reaches a loss."""

import re
import statistics
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

from network.accuracy import CROSS_ENTROPY, LOSS
from network.cluster import bits_per_second

BATCHES = {"gpt": "gpt-1024-tokens", "gpt-1024-tokens": "gpt"}
"""The same model and as many examples in batches of another size, in which ours may be sooner."""
SAME_STEPS = {"sympy": "gpt"}
"""Another text in the same model and batches: its steps take as long, and aren't timed again."""
PEERS = ("ddp", "torchft", "decent-dp")
"""How the names of peers begin."""
STRONGEST = "ddp, Muon, fp16 hook"
SCORES = dict.fromkeys(("vit", "resnet"), CROSS_ENTROPY)
"""What is measured after a mark, if it isn't `LOSS`."""


def scheduled(name: str) -> tuple[str, int]:
    """("gpt", 1440) of "gpt-1440-steps"; (name, 0) of a recipe with its own number of steps."""
    found = re.fullmatch(r"(.+)-(\d+)-steps", name)
    return (found[1], int(found[2])) if found else (name, 0)


class Trained(NamedTuple):
    """Runs of one schedule, by seed, with the seconds of a step there, {rate: {method: seconds}}.

    `recipe` is named where it isn't the table's own, and steps where the schedule isn't.
    """

    runs: list[Any]
    rates: dict[str, dict[str, float]]
    recipe: str = ""
    other: bool = False

    def losses(self, method: str) -> Iterator[tuple[int, float]]:
        """Mean over the seeds, to the third digit, at each mark."""
        of = [run[method] for run in self.runs if method in run]
        for step, *scores in zip(of[0]["steps"] if of else (), *(run["scores"] for run in of), strict=True):
            yield step, round(statistics.mean(scores), 3)

    def steps(self, method: str, loss: float) -> int | None:
        """Return the step of the first mark at the loss or below."""
        return next((step for step, found in self.losses(method) if found <= round(loss, 3)), None)

    def how(self, method: str) -> str:
        """Return in what its settings differ from the table's own runs."""
        of = [run[method] for run in self.runs if method in run]
        steps = f"{of[0]['steps'][-1]} steps{', one seed' if len(of) == 1 else ''}" if self.other else ""
        return "".join(f"; {word}" for word in (self.recipe, steps) if word)


def trained(results: dict[str, Any], recipe: str, hosts: int, named: str = "") -> list[Trained]:
    """Return the runs with the recipe's own schedule, then those with others, the shortest first."""
    found, rates = [], rates_of(results, f"{SAME_STEPS.get(recipe, recipe)} {hosts} ")
    names = {scheduled(key.partition(" ")[0])[::-1] for key in results["curves"] if key.split(" ")[1] == f"{hosts}"}
    for name in (recipe, *(f"{recipe}-{steps}-steps" for steps, of in sorted(names) if steps and of == recipe)):
        runs = [run for key, run in results["curves"].items() if key.startswith(f"{name} {hosts} ")]
        found.append(Trained(runs, rates, named, name != recipe))
    return found


class Table:
    """Results of one recipe and number of hosts, over seeds and rates."""

    def __init__(self, results: dict[str, Any], recipe: str, hosts: int) -> None:
        self.title, self.recipe = f"{recipe}, {hosts} hosts", recipe
        self.own, *self.schedules = trained(results, recipe, hosts)
        self.runs, self.rates, other = self.own.runs, self.own.rates, BATCHES.get(recipe, "")
        self.others = trained(results, other, hosts, other) if other else []
        self.methods = list(max(self.runs, key=len)) if self.runs else []
        self.peers = [method for method in self.methods if method.startswith(PEERS)]
        self.ours = [method for method in self.methods if method not in self.peers]

    def last(self, method: str) -> float:
        """Test loss after the last step, mean over the seeds."""
        return statistics.mean(self._ends(method))

    def _ends(self, method: str) -> list[float]:
        return [run[method]["scores"][-1] for run in self.runs if method in run]

    def steps(self, method: str, loss: float, of: Trained | None = None) -> int | None:
        """Return the step at which the mean curve over the seeds first is at the loss or below, to the third digit."""
        return (of or self.own).steps(method, loss)

    def sooner(self, method: str, peer: str, rate: str, of: Trained | None = None) -> str:
        """Speed-up over the peer in the time to the peer's final loss.

        Where `of` is another schedule, than the peer in that of its own that is there first.
        """
        mine, theirs = self.steps(method, self.last(peer), of), self.steps(peer, self.last(peer))
        if mine is None or theirs is None:
            return "not reached"
        if of not in (None, self.own):
            others = [self.steps(peer, self.last(peer), each) for each in self.schedules]
            theirs = min([theirs, *filter(None, others)])
        own, its = (of or self.own).rates.get(rate, {}).get(method), self.rates[rate].get(peer)
        return f"{theirs * its / (mine * own):.2f}" if own and its else "-"

    def losses(self) -> list[list[str]]:
        """Bytes, loss and seconds per step."""
        head = [
            "method",
            "MB sent per step",
            f"{SCORES.get(self.recipe, LOSS)} at the end",
            *(f"s per step, {rate}" for rate in self.rates),
        ]
        rows = [head, ["---"] * len(head)]
        for method in self.methods:
            scores, run = self._ends(method), next(run[method] for run in self.runs if method in run)
            spread = f" ± {statistics.stdev(scores):.3f}" if len(scores) > 1 else ""
            row = [method, f"{run['bytes_sent'] / 1e6:.3f}", f"{statistics.mean(scores):.3f}{spread}"]
            timed = [self.rates[rate].get(method) for rate in self.rates]
            rows.append([*row, *("-" if value is None else f"{value:.3f}" for value in timed)])
        return rows

    def to_the_loss_of(self, peer: str) -> list[list[str]]:
        """Steps to the peer's final loss, and speed-up over the peer, by rate."""
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
        """The fastest of our methods to each peer's final loss.

        In as many steps of as many tokens, with another schedule, or in batches of another size.
        """
        head = ["peer", "its loss", *self.rates]
        rows = [head, ["---"] * len(head)]
        for peer in self.peers:
            cells = [self._soonest(peer, rate) for rate in self.rates]
            rows.append([peer, f"{self.last(peer):.3f}", *cells])
        return rows

    def _soonest(self, peer: str, rate: str) -> str:
        if peer not in self.rates[rate]:
            return "-"
        found = []
        for method, of in product(self.ours, (self.own, *self.schedules, *self.others)):
            sooner = self.sooner(method, peer, rate, of)
            if sooner not in ("-", "not reached"):
                found.append((float(sooner), f"{method}{of.how(method)}"))
        return "{:.2f} ({})".format(*max(found)) if found else "none of ours reaches it"

    def at_each_loss(self) -> list[list[str]]:
        """Seconds to the losses that `ddp` and its strongest form end at in batches of either size.

        The fastest peer and the fastest of our methods, with both batch sizes and all schedules that were tried.
        """
        everywhere = (self.own, *self.schedules, *self.others)
        ends = [(runs, peer) for runs in (self.own, *self.others[:1]) for peer in (self.peers[0], STRONGEST)]
        losses = sorted({found for runs, peer in ends for _, found in [*runs.losses(peer)][-1:]}, reverse=True)
        rows = [["loss", "soonest", *self.rates], ["---"] * (2 + len(self.rates))]
        for loss in losses:
            both = [
                [_first(methods, everywhere, loss, rate) for rate in self.rates] for methods in (self.peers, self.ours)
            ]
            for who, found in zip(("peer", "of ours"), both, strict=True):
                rows.append([f"{loss:.3f}", who, *(f"{one[0]:.1f} s ({one[1]})" if one else "-" for one in found)])
            times = [
                f"{theirs[0] / mine[0]:.2f}" if theirs and mine else "-" for theirs, mine in zip(*both, strict=True)
            ]
            rows.append([f"{loss:.3f}", "times sooner", *times])
        return rows

    def markdown(self) -> str:
        steps = self.runs[0]["ddp"]["steps"][-1]
        timed = f" Seconds of a step are those of `{same}`." if (same := SAME_STEPS.get(self.recipe)) else ""
        parts = [
            f"## {self.title}\n\n{self.title}: {len(self.runs)} seed(s), {steps} steps.{timed}",
            lines(self.losses()),
        ]
        for peer in (self.peers[0], STRONGEST):
            if peer in self.peers:
                parts.append(f"{self.title}: times sooner than `{peer}` at the loss that it has in the end:")
                parts.append(lines(self.to_the_loss_of(peer)))
        parts.append(f"{self.title}: times sooner at the loss that each peer has in the end, the soonest of ours:")
        parts.append(lines(self.against_each_peer()))
        if self.recipe == "gpt" and STRONGEST in self.peers:
            parts.append(f"{self.title}: seconds to a loss, batches of either size, every schedule that was tried:")
            parts.append(lines(self.at_each_loss()))
        return "\n\n".join(parts)


def _first(methods: list[str], of: Iterable[Trained], loss: float, rate: str) -> tuple[float, str] | None:
    """(seconds, which) of the method that is at the loss first."""
    found = []
    for method, runs in product(methods, of):
        steps, seconds = runs.steps(method, loss), runs.rates.get(rate, {}).get(method)
        if steps and seconds:
            found.append((steps * seconds, f"{method}{runs.how(method)}"))
    return min(found, default=None)


def rates_of(results: dict[str, Any], begin: str) -> dict[str, dict[str, float]]:
    """{rate: {method: seconds per step}} of the places that begin so, the slowest link first."""
    timed = {key.removeprefix(begin): run for key, run in results["seconds"].items() if key.startswith(begin)}
    return dict(sorted(timed.items(), key=lambda item: bits_per_second(item[0])))


def lines(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def page(results: dict[str, Any]) -> str:
    """Markdown of what has run."""
    places = dict.fromkeys(tuple(key.split(" ")[:2]) for key in results["curves"])
    places = {place: None for place in places if not scheduled(place[0])[1]}
    machine = ", ".join(f"{key} {value}" for key, value in results.get("hardware", {}).items())
    head = "Hosts of one processor thread each, namespaces on one machine; computation is real, on processors that "
    head += f"all hosts share: {machine}."
    if also := results.get("losses also on"):
        head += f" Losses of further seeds also on: {', '.join(also)}."
    tables = [Table(results, recipe, int(hosts)).markdown() for recipe, hosts in places]
    return "\n\n".join([head, *tables]) + "\n"
