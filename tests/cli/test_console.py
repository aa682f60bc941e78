"""Answers: tables as wide as the screen or blocks, JSON with the documented fields, assumptions said, completion."""

import argparse
import dataclasses
import io
import json
import logging
import re
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from lightning_decentral.cli import (
    cuts,
    gang_schedule,
    network,
    placement,
    planning,
    profile,
    rehearsing,
    report,
    schedule,
    topology,
)
from lightning_decentral.cli.console import Command, blocks, quiet, say
from lightning_decentral.cli.main import options_of
from lightning_decentral.recipes import command as cli
from lightning_decentral.shared.plan.profile import Profile, write
from tests.cli.test_report import run_folder
from tests.cli.test_schedule import JOBS
from tests.planner.plan.test_placement import LINKS
from tests.settings import links, model

ANSWERS = {
    "cuts": (cuts.CutsAnswer, cuts.Depth),
    "plan": (planning.PlanAnswer, planning.MethodAnswer),
    "rehearse": (rehearsing.Rehearsal, rehearsing.Rehearsed),
    "report": (report.Compared, report.Run),
    "topology": (topology.TopologyAnswer,),
    "profile": (profile.Profiled,),
    "network": (network.NetworkAnswer,),
    "placement": (placement.Placed,),
    "schedule": (schedule.ScheduleAnswer, schedule.MemberOutcome, gang_schedule.Gangs, gang_schedule.GangTurn),
}
PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
LONG = "network.encoder.layers.11.attention.self_attention.output_projection.weight"


@pytest.fixture
def profiled(tmp_path: Path) -> str:
    write(Profile(model(), links(rate=1e8).costs, (0.9, 1.0, 1.1)), tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def table(name: str) -> Table:
    found = Table("parameter", "segment", "cut 0", title="verified")
    found.add_row(name, "1", "above")
    found.add_row("head", "2", "")
    return found


@pytest.mark.parametrize(("name", "drawn"), [("bias", True), (LONG, False)])
def test_a_table_too_wide_becomes_blocks_and_no_name_is_cut(name: str, drawn: bool) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    say(console, table(name))
    text = console.export_text()
    assert name in text
    assert ("│" in text) == drawn
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(("terminal", "kind", "lines"), [(True, str, 2), (True, Command, 1), (False, str, 1)])
def test_prose_is_wrapped_on_a_terminal_and_what_is_pasted_or_piped_is_not(
    terminal: bool, kind: type[str], lines: int
) -> None:
    text = " ".join(["strategy=gossip"] * 6)
    printed = io.StringIO()
    say(Console(width=80, file=printed, force_terminal=terminal, highlight=False), kind(text))
    shown = printed.getvalue().splitlines()
    assert len(shown) == lines
    assert " ".join(line.rstrip() for line in shown) == text


def test_blocks_hold_every_cell_that_isnt_empty() -> None:
    assert list(blocks(table(LONG))) == ["verified", LONG, "  segment 1, cut 0 above", "head", "  segment 2"]
    wide = Table("name", *(f"heading {i}" for i in range(20)))
    wide.add_row("row", *(f"value {i}" for i in range(20)))
    lines = list(blocks(wide))
    assert max(map(len, lines)) <= 78
    assert re.findall(r"heading (\d+) value \1\b", " ".join(lines)) == [str(i) for i in range(20)]


@pytest.mark.thorough
def test_a_plan_at_80_columns_cuts_no_strategy(
    profiled: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = "strategy=gossip strategy/topology=one_peer_exponential strategy.delay=0 strategy/codec=int8"
    cli.main(["plan", profiled, "--workers", "8", "--also", words])
    printed = capsys.readouterr().out
    assert f"\n{words}\n  ms/step" in printed
    assert "…" not in printed
    cli.main(["plan", profiled, "--workers", "1000000", "--per-node", "8"])
    lines = capsys.readouterr().out.splitlines()
    rows = lines[: next(i for i, line in enumerate(lines) if line.startswith("assumed:"))]
    assert rows[1].split() == ["method", "ms/step", "p95", "exposed", "card", "memory", "x", "ddp", "to", "loss"]
    assert max(map(len, rows)) <= 80
    cli.main(["plan", profiled, "--workers", "8", "--also", words, "--json"])
    titles = [row["title"] for row in json.loads(capsys.readouterr().out)["methods"]]
    assert all(title in printed for title in titles)


def test_what_a_plan_assumes_is_said(profiled: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["plan", profiled, "--workers", "8", "--bandwidth", "200mbit"])
    assumed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("assumed:")]
    assert [line.rpartition("(")[2] for line in assumed] == ["--per-node)", "--latency)", "--threshold)"]
    assert "100us for a message between nodes" in assumed[1]
    given = ["--per-node", "1", "--latency", "100us", "--threshold", "5"]
    cli.main(["plan", profiled, "--workers", "8", "--bandwidth", "200mbit", *given])
    assert "assumed:" not in capsys.readouterr().out


# ---- JSON ------------------------------------------------------------------------------------------------------------


def commands(folder: Path, profiled: str) -> dict[str, list[str]]:
    LINKS.write(folder / "hosts.json")
    (folder / "jobs.yaml").write_text(JOBS)
    return {
        "placement": ["placement", str(folder / "hosts.json")],
        "schedule": ["schedule", str(folder / "jobs.yaml")],
        "plan": ["plan", profiled, "--workers", "8"],
        "topology": ["topology", "ring", "--workers", "5"],
        "cuts": ["cuts", "recipe=vit", "strategy.cuts=1"],
        "report": ["report", run_folder(folder / "ddp", 3)],
    }


@pytest.mark.parametrize("name", ["plan", "topology", "cuts", "placement", "schedule", "report"])
def test_json_has_the_fields_of_the_answer_and_nothing_else(
    name: str, tmp_path: Path, profiled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main([*commands(tmp_path, profiled)[name], "--json"])
    found = json.loads(capsys.readouterr().out)
    outer, *inner = ANSWERS[name]
    assert list(found) == [field.name for field in dataclasses.fields(outer)]
    rows: list[Any] = [found[key] for key in ("methods", "depths", "policies", "runs") if key in found]
    for kind, row in zip(inner, rows, strict=False):
        first = next(iter(row.values() if name == "schedule" else row))
        assert list(first) == [field.name for field in dataclasses.fields(kind)]


def test_every_command_answers_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    (names,) = re.findall(r"\{(\S+)\}", capsys.readouterr().out.splitlines()[0])
    commands = set(names.split(",")) - {"completion", "lobby"}
    assert commands | {"network"} == set(ANSWERS)  # the meter is a module of its own, for torchrun
    for name in commands:
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        assert "--json" in capsys.readouterr().out, name


def test_the_page_lists_every_field() -> None:
    documented = [
        (line.split("`")[1], re.findall(r"`(\w+)`", line.split("|")[2]))
        for line in PAGE.read_text().partition("| command | keys |")[2].splitlines()
        if line.startswith("| `")
    ]
    fields = [
        (name, [field.name for field in dataclasses.fields(kind)]) for name, kinds in ANSWERS.items() for kind in kinds
    ]
    assert documented == fields


# ---- banners, completion ---------------------------------------------------------------------------------------------


def test_other_libraries_are_silent_for_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("transformers")
    before = logger.level
    with quiet(), warnings.catch_warnings(record=True) as heard:
        assert not logger.isEnabledFor(logging.WARNING)
        warnings.warn_explicit("tip", UserWarning, "x.py", 1, module="lightning.pytorch.trainer")
        warnings.warn_explicit("ours", UserWarning, "x.py", 2, module="lightning_decentral.cli")
    assert logger.level == before
    assert [str(warning.message) for warning in heard] == ["ours"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(("line", "word"), [("pl", "plan"), ("plan --ba", "--bandwidth"), ("completion ba", "bash")])
def test_bash_completes_commands_and_options(line: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["completion", "bash"])
    script = capsys.readouterr().out
    words = ["lightning-decentral", *line.split()]
    ask = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _lightning_decentral; echo ${{COMPREPLY[@]}}"
    bash = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, timeout=200, check=True)
    assert word in bash.stdout.split()
    assert not bash.stderr


def test_options_are_those_of_the_parser() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shell", choices=["bash"])
    parser.add_argument("--out", choices=["a"])
    assert set(options_of(parser)) == {"--help", "--out", "bash"}
