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

WRITTEN = {"10mbit": "10 Mb/s", "50mbit": "50 Mb/s", "200mbit": "200 Mb/s", "1gbit": "1 Gb/s"}
PEERS = ("ddp", "torchft", "decent-dp")
"""Names of methods that aren't this package's begin so."""
LOSS = "1.358"
"""What `ddp` with AdamW has in the end, on `gpt`; a test compares it."""
LARGE = "data.batch_size=16"
DIFFERENCES = "strategy/codec=difference_compression strategy/codec@strategy.codec.inner=int4 optimizer.lr=3e-2"

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


def by_rate(recipe: str, what: str, page: str = "") -> list[Row]:
    """Return the table with this title on the page with this in its name."""
    hosts = {"8-hosts-": 8, "16-hosts-": 16}.get(page, 4)
    found = rows(f"loss-per-second-{page}2-cores")
    return [row for row in found if row["title"].startswith(f"{recipe}, {hosts} hosts: {what}")]


def uneven() -> str:
    found = result("elastic-uneven-2-cores.json")["uneven"]["rows"]
    waits, not_waiting = (found[f"uneven, {order}"]["seconds"] for order in ("waits", "asynchronous"))
    return f"{waits / not_waiting:.2f} times the steps in a second, one of four workers three times slower"


def stragglers() -> str:
    """Times faster than ddp where one of eight hosts at a time is three times slower."""
    slow = [row for row in rows("cluster-speed-2-cores") if row["straggler or model"] == "3"]
    return markdown(tuple(row["method"] for row in slow), [[row["times faster than ddp"] for row in slow]])


def times_sooner(recipe: str, page: str, method: str, rate: str) -> str:
    """Seconds of the soonest peer over the method's, to the loss that `ddp` with AdamW has in the end; same batches."""
    found = {row["method"]: row.get(rate) or "" for row in by_rate(recipe, "times sooner than `ddp` ", page)}
    peers = (float(times) for name, times in found.items() if name.startswith(PEERS) and times[:1].isdigit())
    return f"{float(found[method]) / max(peers):.2f}"


def of_all(page: str, rate: str, ours: bool) -> tuple[str, str]:
    """(times sooner, method): of the soonest of ours over the soonest peer, or the other way round, at `LOSS`."""
    found = {row["soonest"]: row[rate] for row in by_rate("gpt", "seconds to a loss", page) if row["loss"] == LOSS}
    sides = ("of ours", "peer") if ours else ("peer", "of ours")
    (seconds, method), (others, _) = (found[side].split(" s (", 1) for side in sides)
    return found["times sooner"] if ours else f"{float(others) / float(seconds):.2f}", method.rstrip(")")


def trained(words: str) -> str:
    return f"`python recipes/train.py {words}`"


def questions() -> str:
    """Return the table of questions: a command, a number and a reason for the first that is answered with yes."""
    slow = {row["method"]: row for row in rows("cluster-speed-2-cores") if row["straggler or model"] == "3"}
    equal = {(row["recipe"], row["run"]): row["mean ± deviation"] for row in rows("quality-2-cores")}
    body = [
        ["many trainings, few devices",
         trained("-m recipe=vit optimizer.lr=1e-3,3e-4 hydra/launcher=shard_parallel hydra.launcher.devices=2"),
         sweep(), "[one computes](sweeps.md) while another loads"],
        ["a model larger than the one device", trained("recipe=gpt strategy=spilled strategy.memory_bytes=5000000"),
         "2 forwards a block", "[parameters stay](spilled.md) on the host"],
        ["a causal model larger than each device", trained("recipe=gpt strategy=token_pipeline trainer.devices=2"),
         pipeline(), "[stages](token-pipeline.md) work on slices of one sequence at once"],
        ["workers that come and go",
         trained("recipe=gpt strategy=gossip strategy/elastic=elastic trainer=cpu trainer.devices=4"),
         "10 s of silence and a worker counts as dead", "[the others](elastic.md) go on without it"],
        ["a worker that stays slower than others",
         trained("recipe=gpt strategy=gossip strategy/elastic=elastic +strategy/elastic/asynchronous=asynchronous "
                 "trainer=cpu trainer.devices=4"),
         uneven(), "[nobody waits](elastic.md#when-nobody-should-wait): what has come is mixed"],
        ["a worker that is slower now and then",
         trained("recipe=gpt strategy=gossip strategy.delay=4 strategy.combine.rate=0.4 trainer.devices=4"),
         f"{slow['gossip, delay 4']['times faster than ddp']} times as many steps in a second as `ddp`",
         "a message has [four steps](gossip.md) to arrive"],
        ["a network that `ddp` waits for", "the table below, by its rate", "", "fewer bytes, or hidden ones"],
        ["none of these", trained("recipe=vit strategy=ddp trainer.devices=4"),
         f"accuracy of `resnet` {equal['resnet', 'ddp']} after equal steps, gossip {equal['resnet', 'gossip']}",
         "the all-reduce hides behind the backward"],
    ]  # fmt: skip
    return markdown(("first yes", "type", "one number", "why"), body)


OUTER, COMPRESSED = "outer rounds of 8, int4, Muon", "compressed, int8, Muon"
GOSSIP, ACCUM = "gossip, int8, Muon", "gossip, int8, AccumAdamW"
CODED = "gossip, int4 differences, Muon"


def links() -> str:
    """Return the table of links: the method that is the soonest at the loss of `ddp` with AdamW, by rate and model."""
    gossip, ddp = f"experiment=gossip_muon {DIFFERENCES} {LARGE}", "strategy=ddp optimizer=muon"
    few, short = "fewest bytes: one round in 8 steps, 4 bits a number", "in 4 bits, and mixes in every step"
    wide, whole = "8 bits hide behind a step that is longer", "replicas stay equal, in 8 bits"
    chosen = [
        ("10mbit", "text", f"recipe=gpt experiment=outer_muon {FOUR}", of_all("owners-", "10mbit", True), OUTER, few),
        ("10mbit", "text, batches of 16", f"recipe=gpt {gossip} {FOUR}", of_all("", "10mbit", True), CODED, short),
        ("50mbit", "text", f"recipe=gpt experiment=outer_muon {FOUR}", of_all("owners-", "50mbit", True), OUTER, few),
        ("50mbit", "text, batches of 16", f"recipe=gpt {gossip} {FOUR}", of_all("", "50mbit", True), CODED, short),
        ("200mbit", "text", f"recipe=gpt {ddp} trainer.accumulate_grad_batches=4 {FOUR}",
         of_all("owners-", "200mbit", False), "ddp, Muon, fp16 hook, accumulating 4", "its hook halves the bytes"),
        ("200mbit", "text, batches of 16", f"recipe=gpt experiment=compressed_muon {LARGE} {FOUR}",
         of_all("", "200mbit", True), COMPRESSED, whole),
        ("200mbit", "text, a larger model", f"recipe=gpt experiment=gossip_muon {WIDER} {FOUR}",
         (times_sooner("larger-gpt", "larger-gpt-", GOSSIP, "200mbit"), GOSSIP), GOSSIP, wide),
        ("200mbit", "images, a transformer", f"recipe=vit experiment=gossip_muon {FOUR}",
         (times_sooner("vit", "digits-", GOSSIP, "200mbit"), GOSSIP), GOSSIP, wide),
        ("200mbit", "images, a ResNet",
         f"recipe=resnet strategy=gossip strategy/codec=int8 optimizer=accum_adamw {FOUR}",
         (times_sooner("resnet", "digits-", ACCUM, "200mbit"), ACCUM), ACCUM, wide),
        ("1gbit", "text", f"recipe=gpt {ddp} {LARGE} {FOUR}", of_all("", "1gbit", False),
         "ddp, Muon, fp16 hook; gpt-1024-tokens", "codes cost more time than they save"),
    ]  # fmt: skip
    assert all(best.startswith(method) for *_, (_, best), method, _ in chosen), chosen
    body = [[WRITTEN[rate], what, trained(words), times, why] for rate, what, words, (times, _), _, why in chosen]
    return markdown(("links", "model", "type", "times sooner", "why"), body)


FOUR = "trainer.devices=4"
WIDER = "model.config.n_embd=128 model.config.n_layer=4"
TABLES = (questions, links)


def main() -> None:
    print("\n\n".join(table() for table in TABLES))
