"""The table of losses that were measured, which `plan`, hints, error texts and docs/choosing.md read.

    python benchmarks/pages.py known --write   # writes lightning_decentral/shared/plan/known_losses.json

From the results of `loss.py per_second`: to the loss that `ddp` with AdamW has in the end, how many batches each
method takes, and how many seconds a batch of it takes hosts of one processor thread, by the rate of their links.
Measures nothing.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from hydra import compose, initialize_config_module

from common.paths import RESULTS, ROOT
from loss.methods import METHODS, tuned
from loss.per_second import RECIPES, TUNED
from loss.tables import Table
from network.cluster import bits_per_second

PATH = ROOT / "lightning_decentral" / "shared" / "plan" / "known_losses.json"
SOURCES = (
    ("gpt", 4, "owners-", "text"),
    ("gpt-1024-tokens", 4, "", "text"),
    ("larger-gpt", 4, "larger-gpt-", "text"),
    ("gpt", 8, "8-hosts-", "text"),
    ("gpt", 16, "16-hosts-", "text"),
    ("vit", 4, "digits-", "images, a transformer"),
    ("resnet", 4, "digits-", "images, a ResNet"),
)
"""(recipe of `loss/per_second.py`, hosts, which of its results, kind of model)."""
NEWER = "losses-digits-owners-2-cores.json"
OLDER = "streamed outer rounds of 8, int4, Muon"
"""Losses on images of methods whose codes have changed since, and one that hasn't run with the codes of today."""
PLANNED = (
    "ddp, Muon",
    "ddp, Muon, fp16 hook",
    "ddp, Muon, fp16 hook, accumulating 4",
    "ddp, AccumAdamW, fp16 hook",
    "compressed, int8, Muon",
    "compressed, int4, Muon",
    "gossip, int8, Muon",
    "gossip, int8, AccumAdamW",
    "gossip, int4 differences, Muon",
    "outer rounds of 8, int4, Muon",
    "streamed outer rounds of 8, int4, Muon",
)
"""What `plan` compares: those that are the soonest somewhere, or close to it, and `ddp`'s strongest forms."""
HOOK, FOUR = "strategy=ddp_fp16", "trainer.accumulate_grad_batches=4"
TYPED = {"strategy=ddp": "strategy=ddp", "hook=fp16": HOOK, "accumulate=4": FOUR}
"""What a user types in place of the benchmark's own words."""


def typed(recipe: str, hosts: int, method: str) -> str:
    """Overrides on the command line of `recipes/train.py` that train with a method, at its rate and momentum there."""
    rates, more = RESULTS / f"tuning-{recipe}-2-cores.json", TUNED.get((recipe, hosts), {})
    if rates.exists():
        more = tuned(json.loads(rates.read_text())["runs"])
    words = [TYPED.get(word, word) for word in (*METHODS[method], *more.get(method, []))]
    kept = {word.partition("=")[0]: word for word in words}  # of two rates the latter is what Hydra takes
    return " ".join(word for word in kept.values() if not (word == "strategy=ddp" and HOOK in words))


def settings() -> Iterator[dict[str, Any]]:
    for recipe, hosts, page, kind in SOURCES:
        results = json.loads((RESULTS / f"loss-per-second-{page}2-cores.json").read_text())
        for place, newer in json.loads((RESULTS / NEWER).read_text())["curves"].items():
            if place.startswith(f"{recipe} {hosts} "):
                results["curves"][place] |= newer
                results["curves"][place].pop(OLDER, None)
        table = Table(results, recipe, hosts)
        loss = table.last("ddp")
        with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
            batch = compose("train", RECIPES[recipe].words).data.batch_size
        sent = table.runs[0]["ddp"]["bytes_sent"]  # 2 (n - 1) / n of the parameters' bytes
        yield {
            "kind": kind,
            "recipe": recipe,
            "workers": hosts,
            "batch": batch,
            "parameter_bytes": round(sent * hosts / (2 * (hosts - 1))),
            "loss": round(loss, 3),
            "seeds": len(table.runs),
            "batches": {method: table.steps(method, loss) for method in table.methods},
            "overrides": {method: typed(recipe, hosts, method) for method in PLANNED if method in table.methods},
            "seconds": {
                str(int(bits_per_second(rate))): {name: round(of, 4) for name, of in timed.items()}
                for rate, timed in table.rates.items()
            },
        }


def written() -> str:
    return json.dumps([*settings()], indent=1) + "\n"


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        PATH.write_text(written())
    else:
        print(written(), end="")
