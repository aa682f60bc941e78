"""The tables of docs/choosing.md, from the results in this repository; a test compares the page with them.

    python benchmarks/pages.py choosing

Prints them; measures nothing.
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Any

from common.paths import RESULTS
from lightning_decentral.planner.compare import Comparison, plan
from lightning_decentral.shared.plan.forecast import Cluster, Setting
from lightning_decentral.shared.plan.known_losses import KnownLosses, known_losses
from lightning_decentral.shared.plan.network import Network
from lightning_decentral.shared.plan.profile import Model, read
from pages.reports import report

RATES = {"10mbit": "10 Mb/s", "50mbit": "50 Mb/s", "200mbit": "200 Mb/s", "1gbit": "1 Gb/s"}
WRITTEN = {"10000000": "10 Mb/s", "50000000": "50 Mb/s", "200000000": "200 Mb/s", "1000000000": "1 Gb/s"}
PEERS = ("ddp", "torchft", "decent-dp")
"""Names of methods that aren't this package's begin so."""
LARGE = "data.batch_size=16"
SHORT = {
    "ddp": "`ddp`",
    "torchft's DiLoCo": "DiLoCo",
    "outer": "outer rounds",
    "gossip": "gossip",
    "compressed": "`compressed`",
}

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


def trained(words: str) -> str:
    return f"`python recipes/train.py {words}`"


def questions() -> str:
    """Return the table of cases: a command, a number and a reason for the first that applies."""
    slow = {row["method"]: row for row in rows("cluster-speed-2-cores") if row["straggler or model"] == "3"}
    equal = {(row["recipe"], row["run"]): row["mean ± deviation"] for row in rows("quality-2-cores")}
    body = [
        ["many trainings, few devices",
         trained("-m recipe=vit optimizer.lr=1e-3,3e-4 hydra/launcher=shard_parallel hydra.launcher.devices=2"),
         sweep(), "[one training computes](sweeps.md) while another loads data"],
        ["one device, smaller than the model", trained("recipe=gpt strategy=spilled strategy.memory_bytes=5000000"),
         "2 forward passes per block", "[parameters stay](spilled.md) on the host"],
        ["several devices, each smaller than the causal model",
         trained("recipe=gpt strategy=token_pipeline trainer.devices=2"),
         pipeline(), "[the stages](token-pipeline.md) work on slices of one sequence at the same time"],
        ["workers that come and go",
         trained("recipe=gpt strategy=gossip strategy/elastic=elastic trainer=cpu trainer.devices=4"),
         "after 10 s of silence a worker counts as dead", "[the others](elastic.md) train on without it"],
        ["one worker is always slower than the others",
         trained("recipe=gpt strategy=gossip strategy/elastic=elastic +strategy/elastic/asynchronous=asynchronous "
                 "trainer=cpu trainer.devices=4"),
         uneven(), "[nobody waits](elastic.md#when-nobody-should-wait): each worker mixes what has arrived"],
        ["a worker is slower now and then",
         trained("recipe=gpt strategy=gossip strategy.delay=4 strategy.combine.rate=0.4 trainer.devices=4"),
         f"{slow['gossip, delay 4']['times faster than ddp']} times as many steps in a second as `ddp`",
         "a message has [four steps](gossip.md#delay-the-order-of-update-exchange-and-mixing) to arrive"],
        ["`ddp` waits for the network", "the table below, by bandwidth", "",
         "fewer bytes, or sent during the step"],
        ["none of these", trained("recipe=vit strategy=ddp trainer.devices=4"),
         f"accuracy of `resnet` {equal['resnet', 'ddp']} after equal steps, gossip {equal['resnet', 'gossip']}",
         "the all-reduce finishes during the backward pass"],
    ]  # fmt: skip
    return markdown(("case", "type", "one number", "why"), body)


OUTER, COMPRESSED = "outer rounds of 8, int4, Muon", "compressed, int8, Muon"
GOSSIP, ACCUM = "gossip, int8, Muon", "gossip, int8, AccumAdamW"
REASONS = {
    OUTER: "one round in 8 steps, 4 bits per parameter",
    f"streamed {OUTER}": "an eighth of the model in each step, 4 bits per parameter",
    "gossip, int4 differences, Muon": "4 bits per parameter, averaged in every step",
    GOSSIP: "8 bits per parameter, sent during the step",
    ACCUM: "8 bits per parameter, sent during the step",
    COMPRESSED: "replicas stay equal, 8 bits per gradient",
    "ddp, Muon, fp16 hook": "half-precision gradients: half the bytes",
    "ddp, Muon, fp16 hook, accumulating 4": "half-precision gradients, once in 4 batches",
    "ddp, AccumAdamW, fp16 hook": "half-precision gradients: half the bytes",
}
LATENCY, CORES = 1e-4, 2
"""Of the measured hosts: seconds of a message, and processors that all of them share."""
KINDS = {
    "gpt": "text", "gpt-1024-tokens": "text, batches of 16", "larger-gpt": "text, a larger model",
    "vit": "images, a transformer", "resnet": "images, a ResNet",
}  # fmt: skip
EVERY_RATE = ("gpt", "gpt-1024-tokens")
"""Settings that the page shows at every rate; the others at 200 Mb/s."""


def planned(known: KnownLosses, rate: str) -> Comparison:
    """Comparison that `lightning-decentral plan` makes for hosts like those measured, of one thread each."""
    profile = read(RESULTS / f"profile-{known.recipe}-2-cores.json")
    shared = max(1, known.workers / CORES)
    network = Network(profile.network).linked("between", LATENCY, float(rate) / 8)
    return plan(Setting(slowed(profile.model, shared), network, Cluster(known.workers)), profile.variation)


def slowed(model: Model, times: float) -> Model:
    """The model on a processor that takes so many times as long."""
    sides = ("forward_seconds", "backward_seconds", "update_seconds")
    blocks = [replace(block, **{side: times * getattr(block, side) for side in sides}) for block in model.blocks]
    return replace(
        model,
        blocks=tuple(blocks),
        rounds=tuple(work.times(times) for work in model.rounds),
        loop_seconds=times * model.loop_seconds,
        products_per_second=model.products_per_second / times,
    )


def to_loss(known: KnownLosses, rate: str) -> dict[str, float]:
    """{method: measured seconds to the loss}, of those that reach it."""
    found = known.seconds[rate]
    return {method: batches * found[method] for method, batches in known.batches.items() if batches and method in found}


def ahead(known: KnownLosses, rate: str, method: str) -> str:
    """Speed-up over the fastest method of the other side (this package's, or others'), and that method's name."""
    found, theirs = to_loss(known, rate), method.startswith(PEERS)
    spent, name = min((spent, name) for name, spent in found.items() if name.startswith(PEERS) != theirs)
    return f"{spent / found[method]:.2f} over {next(SHORT[start] for start in SHORT if name.startswith(start))}"


def links() -> str:
    """Return the table of links: what `plan` names on the measured hosts, and what was measured of it."""
    body = []
    for known in (one for one in known_losses() if one.workers == 4):
        for rate in known.seconds if known.recipe in EVERY_RATE else ("200000000",):
            found = planned(known, rate)
            assert found.best is not None
            method = found.best.candidate.title
            words = [*found.setting.model.words, *found.best.candidate.overrides.split(), "trainer.devices=4"]
            body.append(
                (
                    float(rate),
                    [
                        WRITTEN[rate],
                        KINDS[known.recipe],
                        trained(" ".join(words)),
                        ahead(known, rate, method),
                        REASONS[method],
                    ],
                )
            )
    return markdown(("links", "model", "type", "speed-up", "why"), [row for _, row in sorted(body, key=itemgetter(0))])


TABLES = (questions, links)


def main() -> None:
    print("\n\n".join(table() for table in TABLES))
