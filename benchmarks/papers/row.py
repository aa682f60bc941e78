"""A row of "Against the papers": their numbers, ours on the same work, and what the comparison assumes."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from common.paths import RESULTS

Kind = Literal["formula", "simulated devices", "virtual clock", "measured"]
Compared = tuple[str, float, float]
"""(label, theirs, ours), in one unit."""
DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Row:
    """The fields of `results/paper-NAME.json`.

    Args:
        paper: its number at arXiv.
        headline: their claim, with the table or figure where it stands.
        compared: their numbers and ours.
        kind: how ours were found.
        assumptions: what ours take for granted, a sentence each.
        cannot_compare: what is left out, and why.
        contradicts: where ours contradict the paper; empty where they don't.
        further: numbers of ours that the paper has no counterpart of, by label.
    """

    name: str
    paper: str
    title: str
    headline: str
    compared: tuple[Compared, ...]
    kind: Kind
    assumptions: tuple[str, ...]
    cannot_compare: str
    contradicts: str = ""
    further: tuple[tuple[str, float], ...] = ()

    @property
    def command(self) -> str:
        return f"python benchmarks/papers.py {self.name}"

    @property
    def path(self) -> Path:
        return RESULTS / f"paper-{self.name}.json"

    def record(self) -> dict[str, Any]:
        """The fields as they are written; a ratio is ours over theirs."""
        fields = {key: value for key, value in asdict(self).items() if key not in ("name", "compared", "further")}
        return {
            **fields,
            "assumptions": list(self.assumptions),
            "theirs": _labelled((label, value) for label, value, _ in self.compared),
            "ours": _labelled((label, value) for label, _, value in self.compared),
            "ratios": _labelled((label, ours / theirs) for label, theirs, ours in self.compared),
            "further": _labelled(self.further),
            "command": self.command,
        }


def _labelled(values: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    return [{"label": label, "value": float(f"{value:.{DIGITS}g}")} for label, value in values]


def write(row: Row) -> None:
    """Write the row and print its numbers."""
    found = row.record()
    row.path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{row.title} ({row.paper}): {row.headline}")
    for (label, theirs, ours), ratio in zip(row.compared, found["ratios"], strict=True):
        print(f"  {label:50} theirs {theirs:9.4g}  ours {ours:9.4g}  ratio {ratio['value']:.3f}")
    for label, value in row.further:
        print(f"  {label:50} {value:26.4g}")
    print(f"raw result: {row.path}")
