"""Results of Lightning's tests under each strategy, compared with results under `ddp`."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

SAME, MEANT, OTHER = "same", "differs as meant", "DIFFERS"


@dataclass(frozen=True)
class Outcome:
    """outcome: passed, failed, skipped, hangs or dies; line: of its error; asked: the strategies that it named."""

    test: str
    outcome: str
    line: str
    asked: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class Difference:
    """One that is meant; all three are regular expressions, strategy and line may be empty: any."""

    test: str
    because: str
    strategy: str = ""
    line: str = ""

    def covers(self, strategy: str, found: Outcome) -> bool:
        pairs = ((self.test, found.test), (self.strategy or ".*", strategy))
        return bool(re.search(self.line, found.line)) and all(re.search(f"(?:{p})$", text) for p, text in pairs)


@dataclass(frozen=True)
class Row:
    """One test under one strategy."""

    strategy: str
    verdict: str
    ddp: Outcome
    found: Outcome
    because: str = ""


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Return the outcomes by test; the last of one that ran twice."""
    if not path.exists():
        return {}
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {one["test"]: Outcome(**{**one, "asked": tuple(one["asked"])}) for one in found}


def read_differences(path: Path) -> list[Difference]:
    """ValueError: an entry that has no reason or names something else."""
    try:
        return [Difference(**entry) for entry in yaml.safe_load(path.read_text()) or []]
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None


def rows(
    ddp: Mapping[str, Outcome], under: Mapping[str, Mapping[str, Outcome]], meant: Sequence[Difference]
) -> list[Row]:
    """Return a row for every test that asks for ddp and ends well under it."""
    good = {name: one for name, one in ddp.items() if one.asked and one.outcome == "passed"}
    pairs = [
        (strategy, good[name], one) for strategy, all_ in under.items() for name, one in all_.items() if name in good
    ]
    return [_row(strategy, one, found, meant) for strategy, one, found in pairs]


def _row(strategy: str, ddp: Outcome, found: Outcome, meant: Sequence[Difference]) -> Row:
    if found.outcome == ddp.outcome:
        return Row(strategy, SAME, ddp, found)
    reason = next((one.because for one in meant if one.covers(strategy, found)), None)
    return Row(strategy, OTHER if reason is None else MEANT, ddp, found, reason or "")


def unused(rows: Iterable[Row], meant: Sequence[Difference]) -> list[Difference]:
    """Return the intended differences that no test shows any more."""
    shown = [row for row in rows if row.verdict == MEANT]
    return [one for one in meant if not any(one.covers(row.strategy, row.found) for row in shown)]


def markdown(rows: Sequence[Row]) -> str:
    """A count for each strategy, then each difference in a line."""
    lines = [f"| strategy | tests | {SAME} | {MEANT} | {OTHER.lower()} |", "| --- | --- | --- | --- | --- |"]
    for strategy in dict.fromkeys(row.strategy for row in rows):
        of = [row.verdict for row in rows if row.strategy == strategy]
        lines.append(f"| {strategy} | {len(of)} | {of.count(SAME)} | {of.count(MEANT)} | {of.count(OTHER)} |")
    return "\n".join([*lines, "", *(_line(row) for row in rows if row.verdict != SAME)])


def _line(row: Row) -> str:
    test = row.found.test.rpartition("tests_pytorch/")[2]
    said = f" ({row.found.line})" if row.found.line else ""
    reason = row.because or "not explained"
    return f"- {row.strategy}, `{test}`: {row.found.outcome}{said}: {reason}"


def plain(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as they are written to a file."""
    return [
        {"strategy": row.strategy, "test": row.found.test, "verdict": row.verdict, "outcome": row.found.outcome}
        | ({"line": row.found.line, "because": row.because} if row.verdict != SAME else {})
        for row in rows
    ]
