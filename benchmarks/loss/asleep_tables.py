"""The page of `loss/per_second.py --asleep`: seconds to a loss where accelerators sleep, and what is missing.

    share = seconds of ddp that sends nothing / seconds of ours
          = (its steps to the loss * seconds alone) / (our steps * seconds alone)     loss per step
          * seconds alone / seconds of our step                                       exposed seconds

Losses by steps are those of the committed runs of `loss/per_second.py`; a hook of half precision moves none by more
than 0.002, and smaller buckets none, so that `ddp` with Muon has them, too.
"""

import json
from collections.abc import Iterable
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from common.hardware import sentence
from common.paths import RESULTS
from loss.tables import BATCHES, PEERS, STRONGEST, Table, Trained, lines

CURVES = (
    "loss-per-second-2-cores",
    "loss-per-second-owners-2-cores",
    "loss-per-second-8-hosts-2-cores",
    "loss-per-second-16-hosts-2-cores",
    "losses-8-hosts-1024-tokens-2-cores",
    "losses-16-hosts-1024-tokens-2-cores",
    "losses-8-hosts-schedules-2-cores",
    "losses-gpt-640-steps-2-cores",
    "loss-per-second-digits-2-cores",
    "losses-digits-owners-2-cores",
)
"""Where losses are from; of one method in one place the last."""
BASE, BUCKETS = "ddp, Muon", (STRONGEST, "compressed, int8, Muon", "compressed, int4, Muon")
LOSSY = ("PowerSGD", "accumulating")
"""In the names of forms of `ddp` that lose more in a step than averages of whole gradients."""
DEVICE = "gpu-nvidia-h100-80gb-hbm3.json"
MODELS = {"GPT-2 small, 8 x 1024 tokens": 124.4e6, "ResNet-50, 64 images of 224 x 224": 25.6e6}
"""Models whose steps were timed on a device, and their parameters."""


@cache
def curves() -> dict[str, dict[str, Any]]:
    """{recipe, hosts and seed: {method: run}} of all results with losses."""
    found: dict[str, dict[str, Any]] = {}
    for path in (RESULTS / f"{name}.json" for name in CURVES):
        for place, runs in (json.loads(path.read_text())["curves"] if path.exists() else {}).items():
            found.setdefault(place, {}).update(runs)
    for runs in found.values():
        for method, like in ((STRONGEST, BASE), *((f"{of}, small buckets", of) for of in BUCKETS)):
            if like in runs:
                halved = 2 if like == BASE else 1
                runs.setdefault(method, {**runs[like], "bytes_sent": runs[like]["bytes_sent"] / halved})
    return found


class Soonest(NamedTuple):
    """Method that reaches a loss first, by its steps."""

    seconds: float
    method: str
    steps: int
    step_seconds: float
    of: Trained
    recipe: str

    def __str__(self) -> str:
        return f"{self.method}{self.of.how(self.method)}"


class Account(NamedTuple):
    """The soonest peer and the soonest of ours at a loss and a rate, and `ddp` that sends nothing."""

    peer: Soonest
    ours: Soonest
    nothing: Soonest
    alone: float
    """Seconds of a step of ours where nothing is sent."""

    @property
    def most(self) -> float:
        """Times sooner than the peer, of hosts that send nothing."""
        return self.peer.seconds / self.nothing.seconds

    @property
    def gain(self) -> float:
        return self.peer.seconds / self.ours.seconds

    @property
    def share(self) -> float:
        return self.gain / self.most

    @property
    def by_steps(self) -> float:
        return self.nothing.seconds / (self.ours.steps * self.alone)

    @property
    def by_exposed(self) -> float:
        return self.alone / self.ours.step_seconds


class Asleep:
    """Rows of one recipe and number of hosts."""

    def __init__(self, results: dict[str, Any], recipe: str, hosts: int) -> None:
        self.results, self.recipe, self.hosts = results, recipe, hosts
        rows = {key: {m: row["seconds"] for m, row in of.items()} for key, of in results["rows"].items()}
        here = [f"{name} {hosts} " for name in (recipe, BATCHES.get(recipe))]
        timed = {method for key, of in rows.items() if key.startswith(tuple(here)) for method in of}
        timed |= {"ddp", STRONGEST}  # whose losses are to be reached
        known = {place: {m: run for m, run in of.items() if m in timed} for place, of in curves().items()}
        self.table = Table({"curves": {place: of for place, of in known.items() if of}, "seconds": rows}, recipe, hosts)
        self.everywhere = (self.table.own, *self.table.schedules, *self.table.others)

    @property
    def place(self) -> dict[str, Any]:
        return dict(self.results["places"][f"{self.recipe} {self.hosts}"])

    def alone(self, of: Trained) -> float | None:
        """Seconds of a step of hosts that send nothing: as timed, or the least of those that send, if that is less."""
        place = f"{of.recipe or self.recipe} {self.hosts}"
        if place not in self.results["places"]:
            return None
        rows = [row for key, row in self.results["rows"].items() if key.startswith(f"{place} ")]
        sent = [one["seconds"] for row in rows for name, one in row.items() if "accumulating" not in name]
        return float(min(self.results["places"][place]["alone"], *sent))

    def soonest(self, methods: Iterable[str], loss: float, rate: str = "") -> Soonest | None:
        """The first at the loss; without a rate of hosts that send nothing."""
        found = []
        for method, of in product(methods, self.everywhere):
            seconds = of.rates.get(rate, {}).get(method) if rate else self.alone(of)
            if (steps := of.steps(method, loss)) and seconds:
                found.append(Soonest(steps * seconds, method, steps, seconds, of, of.recipe or self.recipe))
        return min(found, key=lambda one: one.seconds, default=None)

    def account(self, loss: float, rate: str) -> Account | None:
        peers = [method for method in self.table.methods if method.startswith(PEERS)]
        whole = [method for method in peers if method.startswith("ddp") and not any(word in method for word in LOSSY)]
        peer, nothing = self.soonest(peers, loss, rate), self.soonest(whole, loss)
        ours = self.soonest(self.table.ours, loss, rate)
        alone = ours and self.alone(ours.of)
        return Account(peer, ours, nothing, alone) if peer and ours and nothing and alone else None

    def losses(self) -> dict[str, float]:
        """{peer: loss that it ends at}"""
        return {
            method: round(self.table.last(method), 3) for method in ("ddp", STRONGEST) if method in self.table.methods
        }

    def missing(self, peer: str, loss: float) -> str:
        """Table of what hosts that send nothing would gain, what is gained, and by what it is less."""
        head = ["rate", "the soonest peer", "its s", "most", "the soonest of ours", "gain", "share", "loss per step"]
        body = [[*head, "exposed", "s of a step", "of these alone", "MB"]]
        body.append(["---"] * len(body[0]))
        for rate in self.table.rates:
            found = self.account(loss, rate)
            if found is None:
                body.append([rate, *["-"] * (len(body[0]) - 1)])
                continue
            sent = self.results["rows"][f"{found.ours.recipe} {self.hosts} {rate}"][found.ours.method]["sent"]
            cells = [rate, f"{found.peer}", f"{found.peer.seconds:.1f}", f"{found.most:.2f}", f"{found.ours}"]
            cells += [f"{of:.2f}" for of in (found.gain, found.share, found.by_steps, found.by_exposed)]
            body.append([*cells, f"{found.ours.step_seconds:.3f}", f"{found.alone:.3f}", f"{sent / 1e6:.3f}"])
        at = f"{self.table.title}, at the {loss:.3f} of `{peer}`"
        return f"{at}: times sooner than the soonest peer, most: if nothing were sent:\n\n{lines(body)}"

    def load(self) -> str:
        """Processor seconds of a host's step, those that it waited for a processor, and other work."""
        head = [["method", *self.table.rates], ["---"] * (1 + len(self.table.rates))]
        for method in self.table.methods:
            of = [self.results["rows"][f"{self.recipe} {self.hosts} {rate}"].get(method) for rate in self.table.rates]
            head.append(
                [
                    method,
                    *(f"{row['busy']:.3f}, {row['waited']:.3f}, {row['others']:.1f}" if row else "-" for row in of),
                ]
            )
        what = "processor seconds of a host and step, seconds that it waited for one, cores of other work"
        return f"{self.table.title}: {what}:\n\n{lines(head)}"

    def markdown(self) -> str:
        place, seeds = self.place, len(self.table.runs)
        about = (
            f"Forward and backward sleep {place['sleep']:g} s; a step that sends nothing, Muon's work and the loop in "
        )
        about += (
            f"it, takes {place['alone']:.3f} s; time is stretched {place['stretched']:g} times, so that a host has "
        )
        about += f"{place['share']:g} of a core; {seeds} seed(s)."
        parts = [
            f"## {self.table.title}\n\n{about}\n\n{stands_for(self.table, place['sleep'])}",
            lines(self.table.losses()),
        ]
        parts += [self.missing(peer, loss) for peer, loss in self.losses().items()]
        return "\n\n".join([*parts, self.load()])


def stands_for(table: Table, sleep: float) -> str:
    """Return what the rates stand for on a device: so many times the bytes in so many times the seconds."""
    run = next(iter(table.runs[0].values()))
    timed = json.loads((RESULTS / DEVICE).read_text())
    found = []
    for model, numbers in MODELS.items():
        seconds = sorted(timed["binding"][model]["seconds"]["plain"])[1]
        times, where = (4 * numbers / run["bytes"]) * (sleep / seconds), timed["hardware"]["devices"]
        found.append(f"{model} on an {where}, {1e3 * seconds:.0f} ms a step, at {times:.0f} times the rate")
    return f"Bytes and seconds are in the proportion of {'; of '.join(found)}."


def page(results: dict[str, Any]) -> str:
    """Markdown of what has been timed."""
    head = f"Accelerators that sleep, all else real, on {sentence(results['hardware'])}."
    places = [place.split(" ") for place in results["places"]]
    return "\n\n".join([head, *(Asleep(results, recipe, int(hosts)).markdown() for recipe, hosts in places)]) + "\n"
