"""The page for those who come from ddp names tests that exist, and shows the committed results."""

import ast
import json
import re

from conformance.compared import Difference, Outcome, Row, markdown, read_differences, rows, unused
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "from-ddp.md").read_text()
MEANT = read_differences(ROOT / "benchmarks" / "conformance" / "differences.yaml")


def outcome(test: str, ended: str = "passed", line: str = "", asked: tuple[str, ...] = ("ddp",)) -> Outcome:
    return Outcome(test, ended, line, asked, 1.0)


def test_every_row_names_a_test_that_exists() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and "tests/" in line]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`(tests/\S+)::(\w+)`", row.split(" | ")[-1])
        assert len(named) == row.split(" | ")[-1].count("::") >= 1, row
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text())
            assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], row


def test_the_page_shows_the_raw_results_and_every_reason() -> None:
    (path,) = (ROOT / "benchmarks" / "results").glob("conformance-*.json")
    raw = json.loads(path.read_text())
    one = outcome("")
    found = [Row(row["strategy"], row["verdict"], one, outcome(row["test"], row["outcome"])) for row in raw]
    assert markdown(found).partition("\n\n")[0] in PAGE
    assert {row["because"] for row in raw if row["verdict"] != "same"} == {one.because for one in MEANT}
    assert all(f"- {one.because}" in PAGE for one in MEANT)


def test_outcomes_are_compared_with_those_of_ddp() -> None:
    names = ["same", "meant", "worse", "fails anyway", "asks for nothing"]
    ddp = {name: outcome(name) for name in names}
    ddp["fails anyway"] = outcome("fails anyway", "failed")
    ddp["asks for nothing"] = outcome("asks for nothing", asked=())
    under = {name: outcome(name, "passed" if name == "same" else "failed", f"{name} line") for name in names}
    meant = [Difference("mea.*", "a reason", "goss", "line"), Difference("wor.*", "another error", "", "hangs")]
    meant += [Difference("worse", "another strategy", "compressed")]
    found = rows(ddp, {"gossip": under}, [Difference("mea.*", "a reason", "gossip", "line"), *meant])
    assert [(row.found.test, row.verdict) for row in found] == [
        ("same", "same"),
        ("meant", "differs as meant"),
        ("worse", "DIFFERS"),
    ]
    assert unused(found, meant) == meant
    assert markdown(found).splitlines()[2] == "| gossip | 3 | 1 | 1 | 1 |"
