"""The tables of docs/choosing.md, from the results beside this file; a test holds the page to them.

    python benchmarks/pages.py choosing

Prints them; measures nothing.
"""

import json
import statistics
from collections.abc import Iterator
from typing import Any

from common.paths import RESULTS
from pages.reports import report

METHODS = ("ddp", "ddp, 4 MB buckets", "gossip", "gossip, int8")
RATES = ("200mbit", "400mbit", "1gbit")
WRITTEN = {"10mbit": "10 Mb/s", "50mbit": "50 Mb/s", "200mbit": "200 Mb/s", "1gbit": "1 Gb/s"}
SIZES = ("2", "4", "8", "16")
EQUAL_STEPS = (
    ("resnet", "ddp"), ("resnet", "gossip"), ("gpt", "ddp"), ("gpt", "gossip"), ("gpt", "ddp, AccumAdamW"),
    ("gpt", "gossip, AccumAdamW"),
)  # fmt: skip

Row = dict[str, str]


def rows(name: str) -> Iterator[Row]:
    """Yield the rows of all tables of a report, each by its own headings; `title` is what stands before a table."""
    title, heads = "", []
    for line in report(name).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            title, heads = line or title, []
        elif not heads:
            heads = cells
        elif not line.startswith("| ---"):
            yield {"title": title, **dict(zip(heads, cells, strict=True))}


def markdown(heads: tuple[str, ...], body: list[list[str]]) -> str:
    lines = [[*heads], ["---"] * len(heads), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def sweep() -> str:
    found = result("sweep-2-cores.json")["six trainings of the ViT recipe on the processor"]
    plain, shared = (found[name]["seconds"] for name in ("joblib, n_jobs=2", "shard_parallel, devices=2"))
    return f"{shared:.1f} s in place of {plain:.1f} for six trainings on two devices"


def pipeline() -> str:
    found = result("token-pipeline-width-512-length-2048-2-cores.json")["stages"][0]
    one, sliced = (statistics.median(row[name]["seconds"] for row in found["rows"]) for name in ("alone 1", "8 equal"))
    return f"{one / sliced:.2f} times one process, in 8 slices over two stages"


def sooner(recipe: str, method: str) -> str:
    (found,) = (
        row["times faster than ddp to the last"]
        for row in rows("cluster-accuracy-2-cores")
        if row["title"].startswith(f"{recipe}:") and row["method"] == method
    )
    return f"{found} times sooner at the target than `ddp`"


def by_rate(recipe: str, what: str, page: str = "") -> list[Row]:
    """Return the table with this title on the page with this in its name."""
    hosts = {"8-hosts-": 8, "16-hosts-": 16}.get(page, 4)
    found = rows(f"loss-per-second-{page}2-cores")
    return [row for row in found if row["title"].startswith(f"{recipe}, {hosts} hosts: {what}")]


def at_rate(method: str, rate: str) -> str:
    (found,) = (row[rate] for row in by_rate("gpt", "times sooner than `ddp`") if row["method"] == method)
    return f"{found} times sooner at `ddp`'s loss"


def uneven() -> str:
    found = result("elastic-uneven-2-cores.json")["uneven"]["rows"]
    waits, not_waiting = (found[f"uneven, {order}"]["seconds"] for order in ("waits", "asynchronous"))
    return f"{waits / not_waiting:.2f} times the steps in a second, where one of four is three times slower"


def questions() -> str:
    """Return the table of questions: what to type at the first yes, and one number for it."""
    slow = {row["method"]: row for row in rows("cluster-speed-2-cores") if row["straggler or model"] == "3"}
    equal = {(row["recipe"], row["run"]): row["mean ± deviation"] for row in rows("quality-2-cores")}
    speed, accuracy, text = (
        f"`{name}-2-cores.json`" for name in ("cluster-speed", "cluster-accuracy", "loss-per-second")
    )
    compared = f"accuracy {equal['resnet', 'ddp']} at equal steps, gossip {equal['resnet', 'gossip']}"
    body = [
        ["many trainings, few devices", "`hydra/launcher=shard_parallel`", sweep(), "`sweep-2-cores.json`"],
        ["a model larger than the one device", "`strategy=spilled`", "2 forwards a block; no seconds yet",
         "[its guide](spilled.md#what-it-costs)"],
        ["a causal model larger than each device", "`strategy=token_pipeline`", pipeline(),
         "`token-pipeline-width-512-*.json`"],
        ["workers that come and go", "`GossipStrategy(elastic=Elastic(...))`",
         "10 s of silence and a worker counts as dead", "[its guide](elastic.md)"],
        ["workers that stay slower than others", "`GossipStrategy(elastic=Elastic(asynchronous=Asynchronous()))`",
         uneven(), "`elastic-uneven-2-cores.json`"],
        ["workers that are slower now and then", "`strategy=gossip strategy.delay=4`",
         f"{slow['gossip, delay 4']['times faster than ddp']} times faster steps than `ddp`", speed],
        ["links of 400 Mb/s or less, images", "`strategy=gossip strategy/codec=int8`", sooner("resnet", "gossip, int8"),
         accuracy],
        ["links of 50 Mb/s or less, text", "`experiment=outer_muon`",
         f"at 50 Mb/s {at_rate('outer rounds of 8, int4, Muon', '50mbit')}", text],
        ["the same links, a lower loss at the end", "`experiment=gossip_muon`",
         f"at 50 Mb/s {at_rate('gossip, int8, Muon', '50mbit')}", text],
        ["links of 200 Mb/s, text, equal replicas", "`experiment=compressed_muon`",
         at_rate("compressed, int8, Muon", "200mbit"), text],
        ["none of these", "`strategy=ddp`", compared, "`quality-2-cores.json`"],
    ]  # fmt: skip
    return markdown(("first yes", "type", "one number", "from"), body)


def steps_on_links() -> str:
    """Seconds of a step by rate, then by the number of hosts; a dash where nothing was measured."""
    found = {
        (row["hosts"], row["rate"], row["method"]): row["s per step"]
        for row in rows("cluster-speed-2-cores")
        if row["straggler or model"] == "1"
    }
    places = [("8", rate) for rate in RATES] + [(size, "200mbit") for size in SIZES if size != "8"]
    body = [[size, rate, *(found.get((size, rate, m), "-") for m in METHODS)] for size, rate in places]
    return markdown(("hosts", "rate", *METHODS), body)


def stragglers() -> str:
    """Times faster than ddp where one of eight hosts at a time is three times slower."""
    slow = [row for row in rows("cluster-speed-2-cores") if row["straggler or model"] == "3"]
    return markdown(tuple(row["method"] for row in slow), [[row["times faster than ddp"] for row in slow]])


def seconds_to_a_target() -> str:
    """Return the table of seconds to a target that all methods reach, and the score of the last step."""
    body = []
    for row in rows("cluster-accuracy-2-cores"):
        recipe, steps = row["title"].partition(":")[0], row["title"].partition(" steps")[0].split()[-1]
        target = {"resnet": "0.97", "gpt": "1.45", "larger-gpt": "2.5"}[recipe]
        last = next(value for head, value in row.items() if head.endswith("at the end"))
        body.append([recipe, steps, target, row["method"], row[target].partition(" (")[0], last])
    return markdown(("recipe", "steps", "target", "method", "reached after", "at the end"), body)


def body_by_rate(recipe: str, page: str) -> tuple[list[str], list[list[str]]]:
    """(rates, rows): loss at the end, and times sooner than `ddp` at the loss that it has in the end, by rate."""
    losses = {}
    for row in by_rate(recipe, "", page):
        if "MB sent per step" in row:
            (losses[row["method"]],) = (cell for head, cell in row.items() if head.endswith("at the end"))
    found = by_rate(recipe, "times sooner than `ddp` ", page)
    rates = [head for head in found[0] if head.endswith("bit")]
    return rates, [[r["method"], losses[r["method"]], *(r[rate] or "not reached" for rate in rates)] for r in found]


def text_by_rate(recipe: str, page: str = "") -> str:
    rates, body = body_by_rate(recipe, page)
    return markdown(("method", "loss at the end", *(WRITTEN[rate] for rate in rates)), body)


def gpt_by_rate() -> str:
    return text_by_rate("gpt")


OUTER = (
    "ddp", "ddp, Muon, fp16 hook", "ddp, Muon, fp16 hook, accumulating 4", "torchft's DiLoCo, Muon",
    "gossip, int8, Muon", "gossip, int4 differences, Muon", "compressed, int8, Muon",
)  # fmt: skip


def outer_by_rate() -> str:
    """Outer rounds whose codes owners add up, beside some of the methods."""
    rates, found = body_by_rate("gpt", "owners-")
    body = [row for row in found if row[0] in OUTER or "outer" in row[0]]
    return markdown(("method", "loss at the end", *(WRITTEN[rate] for rate in rates)), body)


def larger_batch_by_rate() -> str:
    return text_by_rate("gpt-1024-tokens")


def larger_model_by_rate() -> str:
    return text_by_rate("larger-gpt", "larger-gpt-")


def eight_hosts_by_rate() -> str:
    return text_by_rate("gpt", "8-hosts-")


def sixteen_hosts_by_rate() -> str:
    return text_by_rate("gpt", "16-hosts-")


def other_text_by_rate() -> str:
    return text_by_rate("sympy")


IMAGES = (
    "ddp", "ddp, fp16 hook", "ddp, AccumAdamW, fp16 hook", "ddp, Muon, fp16 hook", "torchft's DiLoCo, Muon",
    "gossip, int8, AccumAdamW", "gossip, int8, Muon", "compressed, int8, Muon", "outer rounds of 8, int4, Muon",
    "streamed outer rounds of 8, int4, Muon",
)  # fmt: skip


def images_by_rate() -> str:
    """Some of the methods."""
    body = []
    for recipe in ("vit", "resnet"):
        rates, found = body_by_rate(recipe, "digits-")
        body += [[recipe, *row] for row in found if row[0] in IMAGES]
    return markdown(("recipe", "method", "loss at the end", *(WRITTEN[rate] for rate in rates)), body)


def strongest_peer() -> str:
    """The soonest of ours, in batches of either size, at the loss that forms of `ddp` have in the end."""
    body = []
    for recipe in ("gpt", "gpt-1024-tokens"):
        for row in by_rate(recipe, "times sooner at the loss that each peer"):
            if row["peer"] in ("ddp", "ddp, Muon", "ddp, Muon, fp16 hook"):
                body.append([recipe, row["peer"], row["its loss"], *(row[rate] for rate in WRITTEN)])
    return markdown(("recipe", "peer", "its loss", *WRITTEN.values()), body)


def soonest_of_all() -> str:
    """Seconds to a loss of the soonest peer and the soonest of ours, in batches of either size and longer schedules."""
    found = by_rate("gpt", "seconds to a loss")
    body = [[row["loss"], row["soonest"], *(row[rate] for rate in WRITTEN)] for row in found]
    return markdown(("loss", "soonest", *WRITTEN.values()), body)


def at_equal_steps() -> str:
    """Three seeds, four workers."""
    found = {(row["recipe"], row["run"]): row for row in rows("quality-2-cores")}
    body = [[*key, found[key]["metric"], found[key]["mean ± deviation"]] for key in EQUAL_STEPS]
    return markdown(("recipe", "run", "metric", "mean ± deviation"), body)


TABLES = (
    questions, steps_on_links, stragglers, seconds_to_a_target, at_equal_steps, gpt_by_rate, outer_by_rate,
    larger_batch_by_rate, larger_model_by_rate, eight_hosts_by_rate, sixteen_hosts_by_rate, other_text_by_rate,
    images_by_rate, strongest_peer, soonest_of_all,
)  # fmt: skip


def main() -> None:
    print("\n\n".join(table() for table in TABLES))
