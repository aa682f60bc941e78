"""The tables of docs/choosing.md, from the results beside this file; a test holds the page to them.

    python benchmarks/choosing.py

Prints them; measures nothing.
"""

from collections.abc import Iterator
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
METHODS = ("ddp", "ddp, 4 MB buckets", "gossip", "gossip, int8")
RATES = ("200mbit", "400mbit", "1gbit")
SIZES = ("2", "4", "8", "16")
EQUAL_STEPS = (
    ("resnet", "ddp"), ("resnet", "gossip"), ("gpt", "ddp"), ("gpt", "gossip"), ("gpt", "ddp, AccumAdamW"),
    ("gpt", "gossip, AccumAdamW"),
)  # fmt: skip

Row = dict[str, str]


def rows(name: str) -> Iterator[Row]:
    """Of all tables of a committed page of results, each by its own headings; what stands before a table is `title`."""
    title, heads = "", []
    for line in (RESULTS / name).read_text().splitlines():
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


def steps_on_links() -> str:
    """Seconds of a step by rate, then by the number of hosts; a dash where nothing was measured."""
    found = {
        (row["hosts"], row["rate"], row["method"]): row["s per step"]
        for row in rows("cluster-speed-2-cores.md")
        if row["straggler or model"] == "1"
    }
    places = [("8", rate) for rate in RATES] + [(size, "200mbit") for size in SIZES if size != "8"]
    body = [[size, rate, *(found.get((size, rate, m), "-") for m in METHODS)] for size, rate in places]
    return markdown(("hosts", "rate", *METHODS), body)


def stragglers() -> str:
    """Times faster than ddp where one of eight hosts at a time is three times slower."""
    slow = [row for row in rows("cluster-speed-2-cores.md") if row["straggler or model"] == "3"]
    return markdown(tuple(row["method"] for row in slow), [[row["times faster than ddp"] for row in slow]])


def seconds_to_a_target() -> str:
    """To a target that all methods reach, and the score of the last step."""
    body = []
    for row in rows("cluster-accuracy-2-cores.md"):
        recipe, steps = row["title"].partition(":")[0], row["title"].partition(" steps")[0].split()[-1]
        target = {"resnet": "0.97", "gpt": "1.45", "larger-gpt": "2.5"}[recipe]
        last = next(value for head, value in row.items() if head.endswith("at the end"))
        body.append([recipe, steps, target, row["method"], row[target].partition(" (")[0], last])
    return markdown(("recipe", "steps", "target", "method", "reached after", "at the end"), body)


def at_equal_steps() -> str:
    """Three seeds, four workers."""
    found = {(row["recipe"], row["run"]): row for row in rows("quality-2-cores.md")}
    body = [[*key, found[key]["metric"], found[key]["mean ± deviation"]] for key in EQUAL_STEPS]
    return markdown(("recipe", "run", "metric", "mean ± deviation"), body)


TABLES = (steps_on_links, stragglers, seconds_to_a_target, at_equal_steps)

if __name__ == "__main__":
    print("\n\n".join(table() for table in TABLES))
