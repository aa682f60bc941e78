"""Numbers in running text, and the phrases that committed results make of them.

A page's phrase is built here from a file of `benchmarks/results`, and must stand on the page. What no result is behind
is in `SETTINGS`: what was set, counted, computed by a test or quoted.
"""

import json
import re
from collections.abc import Iterator
from statistics import mean
from typing import Any

from lightning_decentral.planner.rehearsal.answer import OF_FORECAST
from lightning_decentral.shared.plan.known_losses import known_losses
from pages.choosing import by_rate
from pages.reports import report
from tests.docs.pages import ROOT
from tests.docs.prose import paragraphs

RESULTS = ROOT / "benchmarks" / "results"
NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+(?:e-?\d+)?|(?= ?%| ms\b| times\b))")
PAPER, VERSION = re.compile(r"\d{4}\.\d{4,5}"), re.compile(r"(?:python|torch|lightning|Python) \d+(?:\.\d+)*\S*")


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}-2-cores.json").read_text())


def table(name: str) -> dict[str, list[str]]:
    """Rows of a committed table by their first cell."""
    lines = report(f"{name}-2-cores").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


def text(page: str) -> str:
    """Running text in one line: no code but its marks, no links, no versions, no papers."""
    read = " ".join(paragraphs((ROOT / page).read_text()))
    return PAPER.sub("", VERSION.sub("", re.sub(r"\]\([^)]*\)|\[", "", re.sub(r"\*\*", "", read))))


def unexplained(page: str, phrases: list[str]) -> list[str]:
    """Numbers that stand in none of these phrases, each with what surrounds it."""
    left = text(page)
    for phrase in phrases:
        left = left.replace(phrase, "")
    left = re.sub(r"`[^`]*`|\$[^$]*\$", "", left)
    return [left[max(0, found.start() - 40) : found.end() + 20] for found in NUMBER.finditer(left)]


def sweeps() -> Iterator[str]:
    found = result("sweep")
    hand = found["hand-over between two members of one device"]
    yield f"takes {hand['median_ms']:.2f} ms. That is the median of {hand['handovers']}; it is {hand['p99_ms']:.2f} ms"
    yield f"99th percentile, {hand['worst_ms']:.2f} ms at worst"
    of = found["two simulated devices, makespan / optimum of five small sets"]
    times = {name: (f"{row['mean']:.2f}", f"{row['worst']:.2f}") for name, row in of.items()}
    yield "{} times the optimum in the mean ({} at worst) with `lrtf`".format(*times["LRTF"])
    typed = {"RoundRobin": "round_robin", "FIFO": "fifo", "Complementary": "complementary", "SRTF": "srtf"}
    yield from ("{} ({}) with `{}`".format(*times[name], word) for name, word in typed.items())
    alone, joblib, ours = found["six trainings of the ViT recipe on the processor"].values()
    yield f"They took {alone['seconds']:.1f} s one after the other, {joblib['seconds']:.1f} s by joblib's"
    yield f"two jobs, {ours['seconds']:.1f} s with `shard_parallel`"


def scheduling() -> Iterator[str]:
    real, dummy, ways = result("rehearsal-real"), result("rehearsal"), table("jigsaw")
    yield f"Lower bound {real['bound_seconds']:.2f} s"
    off = sorted(100 * (row["real_seconds"] / row["simulated_seconds"] - 1) for row in dummy["rows"])
    yield f"is off by {off[0]:.1f} to {off[-1]:+.1f} %"
    predicted, turns = float(ways["jigsaw"][2]) / float(ways["one after the other"][2]), float(ways["jigsaw"][3])
    yield f"predict a speed-up of {predicted:.2f} over one after the other; {turns:.2f} was measured"
    places = float(ways["complementary"][4])
    yield f"places gain {places - 1:.0%}".replace("%", " %")
    yield f"turns another {float(ways['jigsaw'][0]) / float(ways['complementary'][0]) - 1:.0%}".replace("%", " %")


def codecs() -> Iterator[str]:
    lines = [line.split(" | ") for line in report("cluster-speed-2-cores").splitlines()]
    rows = {(row[0].strip("| "), row[1], row[3]): row[4] for row in lines if len(row) > 4 and row[2] == "1"}
    int8, plain = (rows["8", "1gbit", method] for method in ("gossip, int8", "gossip"))
    yield f"a step takes {int8} s with `Int8` and {plain} s without"


def partial() -> Iterator[str]:
    rows = list(table("partial-cost").values())
    most = max(float(measured) / float(formula) - 1 for measured, formula, *_ in rows)
    assert 0.06 < most < 0.07
    yield "within 7 % of its formula at every depth"
    runs = [line.split(" | ") for line in report("partial-accuracy-2-cores").splitlines()]
    default = "full and half in turn, warm-up of a quarter, equal compute"
    (behind,) = (row[6] for row in runs if row[0] == "| gpt" and row[1] == default)
    yield f"and {float(behind.strip(' |')):.2f} nats behind on GPT"


def rules() -> Iterator[str]:
    rows = [line.strip("| ").split(" | ") for line in report("convergence-2-cores").splitlines()]
    first = next(at for at, row in enumerate(rows) if row[0] == "rule" and "constant, alpha 0.01" in row)
    column = rows[first].index("constant, alpha 0.01")
    accuracy = {tuple(row[:3]): float(row[column].split()[0]) for row in rows[first + 2 : first + 10]}
    heads = [row for row in rows[first + 2 :] if row[:2] == ["quasi-global momentum", "hypercube (Auto)"]][:2]
    lost = [float(heads[0][at].split()[0]) - float(heads[1][at].split()[0]) for at in range(4, 7)]
    yield f"up to {max(lost):.1f} under `QuasiGlobalMomentum`"
    ring, all_reduce = accuracy["gossip", "ring", "0"], accuracy["all-reduce", "complete", "0"]
    yield f"(a ring: {ring:.0f} % where all-reduce has {all_reduce:.0f} %)"
    transformer = table("quality-rules")
    names = {
        name.partition("(")[0].partition(", Every")[0]: row for name, row in transformer.items() if "(rate" not in name
    }
    yield from (f"`{name}` {float(row[2].split()[0]):.3f}" for name, row in names.items())


def outer_rounds() -> Iterator[str]:
    runs = result("tuning")["runs"]
    ddp, coded = runs["ddp, Muon | 0.02 | 0.8"], runs["gossip, int8, Muon | 0.02 | 0.9"]
    yield f"`ddp` with Muon has {ddp:.3f}, gossip with `Int8` {coded:.3f}"
    losses = result("variants")["losses"]
    ways = {"null, null": "with None and None", "0.7, 0.5": "with 0.7 and 0.5", "0.7, 0.9": "with 0.7 and 0.9"}
    short, exact = ([losses[f"rounds, Every, {way}{more}"] for way in ways] for more in ("", ", after 40 exact steps"))
    yield ", ".join(f"{loss:.3f} {said}" for loss, said in zip(short, ways.values(), strict=True))
    yield "these are {:.3f}, {:.3f} and {:.3f}".format(*exact)


def measured() -> Iterator[str]:
    rows, found = table("small-models"), {"perceptron": 0, "convolutions": 2}
    ours, ddp = rows["AccumAdamW at 1e-3"], rows["AdamW at 1e-3"]
    yield from (f"at {ours[at + 1][:5]} against {ddp[at][:5]} on {'a ' * (not at)}{name}" for name, at in found.items())


def optimizers() -> Iterator[str]:
    rows = result("newton-schulz")["summary"][-2:]
    ours, torch = ([f"{row[name]:.1f}" for row in reversed(rows)] for name in ("bfloat16, together", "torch's"))
    runs = result("tuning")["runs"]
    for method, momenta in (("ddp, Muon", (0.8, 0.95)), ("gossip, int8, Muon", (0.9, 0.95))):
        least = [min(v for name, v in runs.items() if name.startswith(f"{method} |") and name.endswith(f"| {m:g}"))
                 for m in momenta]  # fmt: skip
        words = "a momentum of " if method.startswith("ddp") else ""
        yield f"reaches {least[0]:.3f} with {words}{momenta[0]:g}"
        yield f"and {least[1]:.3f} with {momenta[1]:g}"
    yield f"large matrices take {ours[0]} to {ours[1]} of the time, and in torch's function {torch[0]} to {torch[1]}"
    losses, curves = result("variants")["losses"], result("loss-per-second")["curves"]
    stays = {"ddp, 2e-2": "ddp, Muon", "own, 2e-2": "gossip, int8, Muon"}
    stays["travels, 3e-2"] = "gossip, int8, Muon and its momentum"
    rises = {way: [losses[f"warm-up, {way}{seed}"] for seed in ("", ", seed 1", ", seed 2")] for way in stays}
    before = {way: [curves[f"gpt 4 {seed}"][stays[way]]["scores"][-1] for seed in range(3)] for way in stays}
    gained = [a - b for way in stays for a, b in zip(before[way], rises[way], strict=True)]
    yield f"by {min(gained):.3f} to {max(gained):.3f}"
    nearest = mean(rises["travels, 3e-2"])
    yield f"ends {nearest - mean(before['ddp, 2e-2']):.3f} above `ddp` with constant momentum"
    yield f"and {nearest - mean(rises['ddp, 2e-2']):.3f} above `ddp` whose momentum rises"
    ways = ("warm-up, 8 workers, travels", "blocking, 8 workers, ddp")
    rising, ddp = (mean(losses[f"{way}, seed {seed}"] for seed in range(3)) for way in ways)
    yield f"it ends {rising - ddp:.3f} above `ddp` with constant momentum, over three seeds"
    own, travels = (result("variants")["losses"][f"states, 4 workers, 2e-2, {way}"] for way in ("own", "travels"))
    yield f"the loss is {travels:.3f} instead of {own:.3f}."


def rehearse() -> Iterator[str]:
    found, foretold = result("rehearsed"), result("foretold")
    yield f"{found['steps_within']} of {found['values']} numbers of steps are within 15 % of"
    yield f"the median is {100 * found['steps_median_off']:.1f} % off"
    yield f"are within 15 % in {found['step_seconds_within']} of the {found['values']}"
    yield f"Seconds to a loss: {found['seconds_within']} are within 15 %"
    yield "between {} and {} times the forecast".format(*OF_FORECAST)
    yield f"is named in {found['best_right']} of {found['clear']} such settings"
    asleep = result("rehearsed-asleep")
    yield f"{asleep['step_seconds_within']} of the {asleep['values']} seconds of a step are within 15 %"
    yield f"Of the seconds to a loss, {asleep['seconds_within']} are"
    yield f"is named in {asleep['best_right']} of {asleep['clear']} settings in which"
    for one in (found, asleep):
        yield f"{one['pairs_right']} of {one['pairs']} pairs of methods"
        yield f"{one['apart_right']} of the {one['apart']} that differ by more than 10 %"
    other = result("rehearsed-unsteady")
    seconds = f"{other['seconds_within']} of the {other['values']}"
    fastest, order = f"{other['best_right']} of {other['clear']}", f"{other['pairs_right']} of {other['pairs']}"
    yield f"{seconds} within 15 %, the fastest in {fastest}, the order in {order}"
    off = foretold["beyond"]
    half, most_off = (100 * off[name] for name in ("median off", "nine in ten within"))
    errors = f"within {half:.1f} % of the real steps, nine in ten within {most_off:.1f} %"
    yield f"{errors}. So the interval is widened by 11 %"
    rows = [row for of in foretold["apart"].values() for row in of]
    near, coded, far = (
        [row["foretold"] / row["came"] for row in rows if row["method"] in some]
        for some in (
            ("gossip", "gossip, ring"),
            ("gossip, int8",),
            ("gossip, every eighth step", "streamed outer rounds"),
        )
    )
    assert min(near + coded + far) >= 1
    yield f"was {min(near):.1f} to {max(near):.1f} times the measured excess"
    yield f"with `int8` {min(coded):.1f} to {max(coded):.1f} times"
    yield f"every eighth step or in streams it was {min(far):.1f} to {max(far):.1f} times"
    long = found["long"]
    yield f"where a step takes 25 ms or more in {long['step_seconds_within']} of {long['values']}"
    yield f"took {foretold['whole']['minutes']:.1f} minutes"


def pipelines() -> Iterator[str]:
    found = result("slice-launches")["rows"].values()
    (gpt, gpt_compiled), (llama, llama_compiled) = (
        [row[name]["launches"] for name in ("as they are", "compiled")] for row in found
    )
    yield f"for each slice {gpt_compiled} where GPT-2's block needs {gpt}, and {llama_compiled} for Llama's {llama} ("


def cluster() -> Iterator[str]:
    ways = {way: f"{row['over its bound']:.2f}" for way, row in result("congestion")["ways"].items()}
    yield f"took {ways['bbr']} times their bound for a step under BBR and {ways['reno']} under Reno"
    yield "it was {} with Reno and {} with Cubic".format(
        *(ways[f"bbr, route congctl {name}"] for name in ("reno", "cubic"))
    )


def ends(name: str) -> dict[str, float]:
    """Losses of `gpt` after the last step."""
    found = [row for row in by_rate("gpt", "", name) if "MB sent per step" in row]
    return {r["method"]: float(v.split()[0]) for r in found for head, v in r.items() if head.endswith("at the end")}


def seconds_to_ddps_loss(rate: str) -> dict[str, str]:
    """{peer or of ours: seconds} of the soonest, in batches of one size."""
    found = by_rate("gpt", "seconds to a loss", "owners-")
    return {
        row["soonest"]: row[rate].partition(" s (")[0]
        for row in found
        if row["loss"] == f"{known_losses()[0].loss:.3f}"
    }


def why() -> Iterator[str]:
    slow, fast = seconds_to_ddps_loss("10mbit"), seconds_to_ddps_loss("1gbit")
    yield f"outer rounds here reach the final loss of `ddp` with AdamW in {slow['of ours']} s."
    yield f"The fastest variant of `ddp` takes {slow['peer']}."
    yield f"{fast['peer']} s against {fast['of ours']}."
    yield f"`ddp` with Muon ends at {ends('owners-')['ddp, Muon']:.3f}, and no other method of this package ends lower"


def index() -> Iterator[str]:
    slow, fast = seconds_to_ddps_loss("10mbit"), seconds_to_ddps_loss("1gbit")
    yield f"need {slow['of ours']} s, and the fastest variant of `ddp` needs {slow['peer']} s"
    yield f"On links of 1 Gb/s `ddp` is ahead: {fast['peer']} s against {fast['of ours']} s"


def log_keys() -> Iterator[str]:
    found = result("consensus")["recipes"]
    for name, digits in (("vit", 5), ("resnet", 5), ("gpt", 5)):
        early, late = found[name]["relative"]["49"], found[name]["relative"]["149"]
        yield f"{early:.4f}, then {late:.{digits}f}"
    gaps = [{at: of["own"][at] / loss - 1 for at, loss in of["mean"].items()} for of in (found["vit"], found["resnet"])]
    most = max(gap for of in gaps for gap in of.values())
    yield f"at most {100 * most:.1f} % above the mean's on"
    yield f"at most {100 * max(of['155'] for of in gaps):.1f} % in the end"


FROM_RESULTS = {
    "docs/index.md": index,
    "docs/why.md": why,
    "docs/cluster.md": cluster,
    "docs/codecs.md": codecs,
    "docs/log-keys.md": log_keys,
    "docs/measured.md": measured,
    "docs/optimizers.md": optimizers,
    "docs/outer-rounds.md": outer_rounds,
    "docs/partial-backprop.md": partial,
    "docs/rehearse.md": rehearse,
    "docs/rules.md": rules,
    "docs/scheduling.md": scheduling,
    "docs/sweeps.md": sweeps,
    "docs/pipeline-models.md": pipelines,
}
