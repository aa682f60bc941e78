"""`lightning-decentral topology`: every topology by its Hydra name, against the library's own numbers."""

from pathlib import Path

import numpy as np
import pytest

from lightning_decentral.cli.topology import curves, names, received, topology_of
from lightning_decentral.gossip import BaseGraph, Complete, Hypercube, OnePeerExponential, Ring
from lightning_decentral.recipes import command as cli
from tests.conf.groups import choices

NEEDED = {"from_graph": ["edges=[[0,1],[1,2],[2,3]]"]}


@pytest.mark.sampled
@pytest.mark.parametrize("name", sorted(choices("strategy/topology")))
def test_every_topology_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["topology", name, *NEEDED.get(name, []), "--workers", "4"])
    printed = capsys.readouterr().out
    assert "period: " in printed
    assert "matrix of step 0" in printed


@pytest.mark.parametrize("name", ["auto", "ring", "complete"])
@pytest.mark.parametrize("workers", ["6", "16", "32"])
def test_an_answer_fits_a_terminal(name: str, workers: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["topology", name, "--workers", workers, "--per-node", "2"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_a_gap_is_shown_where_it_tells_something(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["topology", "auto", "--workers", "32", "--per-node", "8"])
    exact = capsys.readouterr().out
    assert "exact in finite time" in exact
    assert "spectral gap" not in exact
    assert "step 1: all of 0..7 all of 8..15 all of 16..31" in exact
    cli.main(["topology", "ring", "--workers", "8"])
    assert "spectral gap 0.195: 0-1" in capsys.readouterr().out


def test_names_are_those_of_the_group() -> None:
    assert set(names()) == choices("strategy/topology")


def test_overrides_are_the_constructors() -> None:
    assert topology_of("base_graph", ["max_degree=2"]) == BaseGraph(max_degree=2)


def test_words_may_stand_behind_options(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["topology", "base_graph", "max_degree=2", "--workers", "6"])
    in_front = capsys.readouterr().out
    cli.main(["topology", "base_graph", "--workers", "6", "max_degree=2"])
    assert capsys.readouterr().out == in_front
    cli.main(["topology", "base_graph", "--workers", "6"])
    assert capsys.readouterr().out != in_front


@pytest.mark.parametrize("words", [
    ["topology", "ring", "--workers", "4", "--coffee", "strong"],
    ["plan", "profile.json", "--workers", "4", "strategy=gossip"],
])  # fmt: skip
def test_other_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words)
    assert f"unrecognized arguments: {' '.join(words[4:])}" in capsys.readouterr().err


def test_distances_are_the_second_singular_values_of_products() -> None:
    found = curves(Ring(), 8)
    eigenvalue = 1 / 3 + 2 / 3 * np.cos(2 * np.pi / 8)
    assert found.distances[:4] == pytest.approx([eigenvalue**t for t in range(4)])
    others = [1 / 3 + 2 / 3 * np.cos(2 * np.pi * k / 8) for k in range(1, 8)]
    assert found.typical[3] == pytest.approx(np.sqrt(np.mean(np.power(others, 6))))
    assert found.gap_per_step == pytest.approx(1 - eigenvalue)


@pytest.mark.parametrize("size", [1, 2, 6, 24])
def test_exact_consensus_is_where_the_distance_ends(size: int) -> None:
    found = curves(BaseGraph(), size)
    assert found.exact is not None
    assert found.distances[found.exact] < 1e-12
    assert all(distance > 1e-6 for distance in found.distances[: found.exact])


def test_who_receives_from_whom() -> None:
    assert received(Hypercube(), 4, 0) == "0-1 2-3"
    assert received(OnePeerExponential(), 4, 0) == "0>1 1>2 2>3 3>0"
    assert received(Ring(), 1, 0) == "silent"
    assert received(Complete(), 5, 0) == "all of 0..4"


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "topology.png"
    cli.main(["topology", "base_graph", "--workers", "6", "--plot", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match=r"--plot .*coffee"):
        cli.main(["topology", "ring", "--workers", "4", "--plot", str(tmp_path / "t.coffee")])
    with pytest.raises(SystemExit, match=r"error: --plot .*No such file or directory"):
        cli.main(["topology", "ring", "--workers", "4", "--plot", str(tmp_path / "absent" / "t.png")])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["coffee", "--workers", "4"],
            "no topology 'coffee': use one of alternating_exponential_ring, auto, base_graph",
        ),
        (["hypercube", "--workers", "6"], "power of two"),
        (["base_graph", "max_degre=2", "--workers", "6"], "can't be composed"),
        (["from_graph", "--workers", "6"], "edges"),
        (["ring", "--workers", "0"], "at least 1, got 0"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=r"^error: [^\n]*$") as error:
        cli.main(["topology", *words])
    assert message in str(error.value)
