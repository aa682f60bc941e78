"""The tables of docs/measured.md, of elastic.md and of benchmarks/notes.md, from the results; tests hold them to these.

    python benchmarks/pages.py measured           # prints them
    python benchmarks/pages.py measured --write   # puts them into the page

Measures nothing.
"""

import re
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

from common.paths import ROOT
from elastic.aged import compared
from loss.asleep_tables import Asleep
from loss.tables import STRONGEST
from pages.choosing import RATES, markdown, result, rows, stragglers

QUALITY = (
    ("vit", "ddp"), ("vit", "gossip"), ("resnet", "ddp"), ("resnet", "gossip"), ("gpt", "ddp"), ("gpt", "gossip"),
    ("gpt", "ddp, AccumAdamW"), ("gpt", "gossip, AccumAdamW"),
)  # fmt: skip
STEPS = ("ddp", "ddp, 4 MB buckets", "gossip", "gossip, delay 2", "gossip, int8", "decent-dp", "alone")
SLICES = ("1 equal", "4 equal", "8 equal", "16 equal", "8 balanced")
RULES = (
    ("all-reduce", "complete", "0"), ("gossip", "hypercube (Auto)", "0"), ("gossip", "hypercube (Auto)", "1"),
    ("exact diffusion", "hypercube (Auto)", "1"), ("gradient tracking", "hypercube (Auto)", "1"),
    ("gossip", "ring", "1"),
)  # fmt: skip


def quality() -> str:
    found = {(row["recipe"], row["run"]): row for row in rows("quality-2-cores")}
    body = [[*key, found[key]["metric"], found[key]["mean ± deviation"], found[key]["against ddp"]] for key in QUALITY]
    return markdown(("recipe", "run", "metric", "mean ± deviation", "against ddp"), body)


def overhead() -> str:
    """Ratios of medians over turns."""
    found = result("overhead-2-cores.json")
    body = [["1", "gossip", "no strategy", f"{ratio(found['one worker'], 'gossip', 'plain'):.2f}"]]
    for workers in ("2", "4"):
        for name in ("gossip", "blocking"):
            body.append([workers, name, "ddp", f"{ratio(found[f'{workers} workers'], name, 'ddp'):.2f}"])
    return markdown(("workers", "measured", "against", "ratio of seconds per step"), body)


def memory() -> str:
    """Resident bytes beyond a run that exchanges nothing, in copies of the parameters."""
    found = result("overhead-2-cores.json")["memory"]
    names = ("gossip", "blocking", "ddp")
    copies = [(found[name][0]["resident"] - found["silent"][0]["resident"]) / found["model_bytes"] for name in names]
    return markdown(names, [[f"{one:.2f}" for one in copies]])


def ratio(found: dict[str, list[dict[str, Any]]], name: str, against: str) -> float:
    one, other = (statistics.median(row["seconds"] for row in found[key]) for key in (name, against))
    return one / other


def slow_network() -> str:
    """Seconds of a step, and times its bound."""
    found = {(row["rate"], row["method"]): row for row in rows("cluster-speed-2-cores")
             if (row["hosts"], row["straggler or model"]) == ("8", "1")}  # fmt: skip
    cells = [[found[rate, method] for rate in ("200mbit", "400mbit", "1gbit")] for method in STEPS]
    body = [
        [m, *(f"{c['s per step']} ({c['over its bound']})" for c in of)] for m, of in zip(STEPS, cells, strict=True)
    ]
    return markdown(("method", "200 Mb/s", "400 Mb/s", "1 Gb/s"), body)


ASLEEP = {("gpt", 4): "4 hosts, text", ("gpt", 8): "8 hosts, text", ("resnet", 4): "4 hosts, images"}


def asleep() -> str:
    """Times sooner than the soonest peer at the loss of `ddp` with Muon, of what hosts that send nothing would gain."""
    found = result("loss-per-second-asleep-2-cores.json")
    body = []
    for rate, links in RATES.items():
        cells = []
        for recipe, hosts in ASLEEP:
            of = Asleep(found, recipe, hosts)
            account = of.account(of.losses()[STRONGEST], rate)
            cells.append(f"{account.gain:.2f}/{account.most:.2f}" if account else "-")
        body.append([links, *cells])
    return markdown(("links", *ASLEEP.values()), body)


def forecasts() -> str:
    """Return the table of errors of predicted step times, by setting."""
    found: dict[str, list[float]] = {}
    for row in rows("predicted-2-cores"):
        found.setdefault(row["hosts, rate"], []).append(abs(float(row["off by"].rstrip("%"))))
    body = [[where, str(len(off)), f"{max(off):.1f} %"] for where, off in found.items()]
    return markdown(("hosts, rate", "methods", "furthest off"), body)


def pipeline() -> str:
    """Times one process in seconds, compared with the bound 2 S / (S + 1)."""
    found = result("token-pipeline-width-512-length-2048-2-cores.json")["stages"][0]["rows"]
    seconds = {name: statistics.median(row[name]["seconds"] for row in found) for name in ("alone 1", *SLICES)}
    body = [[name, f"{bound(name):.2f}", f"{seconds['alone 1'] / seconds[name]:.2f}"] for name in SLICES]
    return markdown(("slices", "bound", "times one process"), body)


def bound(slices: str) -> float:
    count = int(slices.split()[0])
    return 2 * count / (count + 1)


def unequal_data() -> str:
    heads = ("constant, alpha 1", "constant, alpha 0.01", "falling, alpha 0.01")
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows("convergence-2-cores"):
        found.setdefault((row["rule"], row["graph"], row["delay"]), row)  # of three tables the first has accuracies
    return markdown(
        ("rule", "graph", "delay", *heads), [[*key, *(found[key][head] for head in heads)] for key in RULES]
    )


def faults() -> str:
    ends = [row["outcome"] for row in result("faults-2-cores.json")["rows"]]
    kinds = sorted(set(ends))
    return markdown(("of them", *kinds), [["faults", *(str(ends.count(end)) for end in kinds)]])


def elastic() -> str:
    found = result("elastic-2-cores.json")
    pairs = found["steps"]["rows"]
    more = result("elastic-50-kills-2-cores.json").values()  # on another processor
    body = [
        *(row for part in (found["kills"], *more) for row in kills(part)),
        [f"no faults, {len(pairs)} of each in turn", "a step against one of plain gossip",
         f"{statistics.median(row['elastic'] / row['plain'] for row in pairs):.3f}"],
        *stormy(found["storm"]), *stormy(result("elastic-hosts-2-cores.json")["storm"]),
    ]  # fmt: skip
    return markdown(("faults", "measured", "found"), body)


def kills(found: dict[str, Any]) -> list[list[str]]:
    rows = found["rows"]
    return [
        [f"one of {found['workers']} killed, {len(rows)} times", "a survivor's longest step beyond its usual one",
         spread([one for row in rows for one in row["beyond"]])],
        ["", "until a newcomer takes part", spread([row["joined"] for row in rows])],
    ]  # fmt: skip


KEPT = {
    "memory": "a member's memory, MiB", "threads": "its threads", "descriptors": "its open files",
    "lobby memory": "the lobby's memory, MiB", "given": "bytes that a newcomer is given",
    "joined": "seconds from a kill until a newcomer takes part",
}  # fmt: skip
"""Of the series of `elastic.aging`."""


def aged() -> str:
    found = compared(result("elastic-aging-2-cores.json")["row"])
    body = [[text, *(f"{value:.4g}" if value < 1e5 else f"{value:,.0f}" for value in found[name])]
            for name, text in KEPT.items()]  # fmt: skip
    return markdown(("in a run of 240 kills", "second quarter", "last quarter"), body)


ORDERS = {"elastic": "", "asynchronous": "-asynchronous", "torchft's DDP": "-torchft-ddp",
          "torchft's LocalSGD": "-torchft-localsgd"}  # fmt: skip


def beside() -> str:
    found = [result(f"elastic-hosts{order}-2-cores.json") for order in ORDERS.values()]
    kills, storms = ([one[part] for one in found] for part in ("kills", "storm"))
    rows = [one["rows"] for one in storms]
    faults = [{**one["storm"]["faults"], "fallen": 0} for one in rows]  # who ended for one is no further one
    body = [
        ["a survivor's longest step beyond its usual one, median", *(f"{median_of(one, 'beyond')} s" for one in kills)],
        ["until a newcomer takes part, median", *(f"{median_of(one, 'joined')} s" for one in kills)],
        ["a step without faults", *(f"{1000 * one['calm']['seconds'] / one['calm']['steps']:.0f} ms" for one in rows)],
        ["minutes of the storm, faults", *(
            f"{one['storm']['seconds'] / 60:.0f}, {sum(of.values())}" for one, of in zip(rows, faults, strict=True)
        )],
        ["steps per second over those without faults", *(percent(one["share"]) for one in rows)],
        ["workers that took part", *(percent(one["storm"]["participation"]) for one in rows)],
        ["final loss over that without faults", *(percent(one["storm"]["loss"] / one["calm"]["loss"]) for one in rows)],
    ]  # fmt: skip
    return markdown(("one of 4 killed; a storm", *ORDERS), body)


def median_of(part: dict[str, Any], what: str) -> str:
    each = [row[what] for row in part["rows"]]
    flat = [one for of in each for one in (of if isinstance(of, list) else [of])]
    return f"{statistics.median(flat):.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


CHANGES = {
    "one, then three again": "3-1-3",
    "eight, half of them replaced": "half-of-8",
    "four, links of 10 Mb/s, sixty faults an hour": "10mbit",
}


def changing() -> str:
    part = result("elastic-uneven-2-cores.json")["uneven"]
    even, slow = part["rows"]["even, waits"], f"one of four {part['settings']['slow']:g} times slower"
    body = []
    for name, row in part["rows"].items():
        who = "four alike" if name.startswith("even") else slow
        how = "asynchronous" if "asynchronous" in name else "who wait"
        body.append([f"{who}, {how}", *shares(even, row)])
    for title, name in CHANGES.items():
        (part,) = result(f"elastic-{name}-2-cores.json").values()
        body.append([title, *shares(part["rows"]["calm"], part["rows"].get("changed") or part["rows"]["storm"])])
    return markdown(("workers", "steps in a second, of those of the calm run", "took part", "final loss"), body)


def shares(calm: dict[str, Any], changed: dict[str, Any]) -> list[str]:
    found = calm["seconds"] / changed["seconds"], changed["participation"], changed["loss"] / calm["loss"]
    return [percent(share) for share in found]


LOST_STAGE = {
    "another pipeline's longest step beyond its usual one, s": "beyond", "its usual step, s": "usual",
    "until the lost pipeline's other stage has ended, s": "ended",
    "until a new pipeline takes part, s": "joined", "steps in which one was missing": "missed",
}  # fmt: skip
"""Of `elastic.pipelines`: a number of a loss, or of each other pipeline."""


def lost_stages() -> str:
    rows = result("elastic-pipelines-2-cores.json")["losses"]
    of_stage = [[row for row in rows if row["stage"] == stage] for stage in sorted({row["stage"] for row in rows})]
    body = []
    for what, key in LOST_STAGE.items():
        numbers = [[one for row in of for one in flat(row[key])] for of in of_stage]
        body.append([what, *(f"{statistics.median(each):.3g}, {max(each):.3g}" for each in numbers)])
    number = len(of_stage[0])
    return markdown(("median, largest", f"first stage killed, {number} times", f"last stage, {number} times"), body)


def flat(value: Any) -> list[float]:
    return value if isinstance(value, list) else [value]


def lost_in_storms() -> str:
    body = []
    for row in result("elastic-pipelines-2-cores.json")["storms"]:
        faults = row["storm"]["faults"]
        body.append([f"{faults['kill']}, {faults['stall']}", *shares(row["calm"], row["storm"])])
    return markdown(
        ("stages killed, stalled", "steps in a second, of those of the calm run", "took part", "final loss"), body
    )


HAPPENED = {"kill": "killed", "stall": "stalled", "cut": "cut off", "fallen": "ended for it"}


def stormy(found: dict[str, Any]) -> list[list[str]]:
    storm, settings = found["rows"], found["settings"]
    faults = ", ".join(f"{number} {HAPPENED[kind]}" for kind, number in storm["storm"]["faults"].items())
    return [
        [f"{faults} ({settings['faults_per_hour']:.0f} an hour)", "steps per second over those without faults",
         f"{100 * storm['share']:.1f} %"],
        ["", "workers that took part", f"{100 * storm['storm']['participation']:.1f} %"],
        ["", "final loss over that without faults", f"{100 * storm['storm']['loss'] / storm['calm']['loss']:.1f} %"],
    ]  # fmt: skip


def spread(seconds: list[float]) -> str:
    return f"median {statistics.median(seconds):.2f} s, largest {max(seconds):.2f} s"


def device() -> str:
    """Return the table of the first hour on a device: times over those that the bytes take at a copy's rate."""
    parts = result("first-hour-nvidia-h100-80gb-hbm3.json")["parts"]
    found = {row["name"]: (row["value"], row["predicted"]) for part in parts.values() for row in part["rows"]}
    timed = {
        "`x += rate sum_j w_j (heard_j - sent)`, 1 GiB": "correct, ms",
        "the same, and the copy that leaves next": "correct, and copy what leaves next, ms",
        "`Int8()`: encode and replace": "int8 encode, ms",
        "`Int8()`: decode": "int8 decode, ms",
        "a round of 4 GiB, one neighbour": "Plain(), 1 heard, 4096 MiB in 4 buckets: ms",
        "a round of 4 GiB, one neighbour, `Int8()`": "Int8(block=256), 1 heard, 4096 MiB in 4 buckets: ms",
        "a round of 64 MiB, one neighbour": "Plain(), 1 heard, 64 MiB in 1 buckets: ms",
    }
    body = [
        [what, f"{value:.2f}", f"{(bound := float(words.partition(',')[0])):.2f}", f"{value / bound:.2f}"]
        for what, (value, words) in ((what, found[name]) for what, name in timed.items())
    ]
    return markdown(("on an H100", "ms", "by its bytes", "over it"), body)


TABLES = (
    quality, overhead, memory, slow_network, stragglers, forecasts, unequal_data, pipeline,
    faults, elastic,
)  # fmt: skip
ELASTIC, NOTES = (beside,), (changing, lost_stages, lost_in_storms, aged, device, asleep)


def written(page: str, tables: Sequence[Callable[[], str]]) -> str:
    """The page with the tables as they are now, each where one with its headings stands."""
    for table in tables:
        made = table()
        heads = re.escape(made.partition("\n")[0])
        table_of = re.compile(rf"^{heads}(\n\|.*)*", re.MULTILINE)
        page, number = table_of.subn(made.replace("\\", r"\\"), page)
        assert number == 1, f"the page has {number} tables of {table.__name__}"
    return page


DOCS = ROOT / "docs"
PAGES = {DOCS / "measured.md": TABLES, DOCS / "elastic.md": ELASTIC, ROOT / "benchmarks" / "notes.md": NOTES}


def main() -> None:
    for page, tables in PAGES.items():
        if sys.argv[1:] == ["--write"]:
            page.write_text(written(page.read_text(), tables))
        else:
            print("\n\n".join(table() for table in tables))
