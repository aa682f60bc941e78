"""Orders of hosts against all orders; files of hosts; the command."""

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from lightning_decentral.cli.placement import graph
from lightning_decentral.planner.plan.host_links import HostLinks, of, read
from lightning_decentral.planner.plan.placement import (
    ChainPlacement,
    Graph,
    Listed,
    RingPlacement,
    cost,
    held_karp,
    place,
    search,
)
from lightning_decentral.recipes import command as cli

GRAPHS = [
    RingPlacement(),
    ChainPlacement(),
    graph("exponential", []),
    graph("hypercube", []),
    graph("one_peer_ring", []),
]


def links(size: int, seed: int = 0) -> np.ndarray:
    """Asymmetric, with many equal ones as in real racks."""
    random = np.random.default_rng(seed)
    seconds = random.choice([1.0, 2.0, 2.5, 4.0], (size, size)) + random.choice([0.0, 0.25], (size, size))
    np.fill_diagonal(seconds, 0)
    return seconds


def slow_cost(shape: Graph, seconds: np.ndarray, order: tuple[int, ...]) -> tuple[float, float]:
    """In plain words."""
    steps = shape.steps(len(seconds))
    messages = [[seconds[order[j], order[i]] for j, i in step] for step in steps]
    return sum(max(step, default=0) for step in messages) / len(steps), sum(map(sum, messages)) / len(steps)


@pytest.mark.parametrize("shape", GRAPHS, ids=lambda shape: type(shape).__name__)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_small_is_exact(shape: Graph, size: int) -> None:
    for seed in range(5):
        seconds = links(size, seed)
        found = place(shape, seconds)
        best = min(slow_cost(shape, seconds, order) for order in permutations(range(size)))
        assert found.exact
        assert found.after == pytest.approx(best)
        assert slow_cost(shape, seconds, found.order) == pytest.approx(best)
        assert found.before == pytest.approx(slow_cost(shape, seconds, tuple(range(size))))


@pytest.mark.parametrize("shape", [RingPlacement(), ChainPlacement()], ids=["ring", "chain"])
@pytest.mark.parametrize("size", [3, 6, 7])
def test_held_karp_is_as_good_as_trying_all(shape: Graph, size: int) -> None:
    for seed in range(3):
        seconds = links(size, seed)
        assert cost(shape.steps(size), seconds, shape.exact(seconds)) == pytest.approx(
            cost(shape.steps(size), seconds, Listed(shape.steps).exact(seconds))
        )


def test_held_karp_by_hand() -> None:
    line = [[abs(i - j) for j in (3, 0, 2, 1)] for i in (3, 0, 2, 1)]
    assert held_karp(line, lambda a, b: a + b, closed=False) == (3, (0, 2, 3, 1))
    assert held_karp(line, max, closed=True)[0] == 2, "a ring over a line jumps over every second one"


@pytest.mark.parametrize("shape", GRAPHS[:4], ids=lambda shape: type(shape).__name__)
def test_local_search_comes_close(shape: Graph) -> None:
    """As good as exact in its slowest message for 7 hosts and less (8 for the hypercube)."""
    size = 8 if shape is GRAPHS[3] else 7
    seconds = links(size, 1)
    found = search(shape.steps(size), seconds, seed=0, starts=8)
    exact = cost(shape.steps(size), seconds, shape.exact(seconds))
    assert cost(shape.steps(size), seconds, found)[0] == pytest.approx(exact[0])


def test_two_racks_are_put_side_by_side() -> None:
    """24 hosts of two racks in shuffled order: a pipeline crosses between the racks once, a ring twice."""
    rack = np.random.default_rng(0).permutation([0, 1] * 12)
    seconds = np.where(rack[:, None] == rack, 1.0, 10.0)
    np.fill_diagonal(seconds, 0)
    for shape, crossings in ((ChainPlacement(), 1), (RingPlacement(), 2)):
        found = place(shape, seconds)
        assert not found.exact
        assert sorted(found.order) == list(range(24))
        around = [*found.order, *found.order[: crossings - 1]]
        assert int((np.diff(rack[around]) != 0).sum()) == crossings
        assert place(shape, seconds) == found, "the same again"


NAMES = ["a", "b", "c"]
FROM_A = [(0, 0), (1e-3, 1e6), (2e-3, 2e6)]
FROM_B = [(3e-3, 3e6), (0, 0), (4e-3, 4e6)]
FROM_C = [(5e-3, 5e6), (6e-3, 6e6), (0, 0)]
LINKS = of(NAMES, [FROM_A, FROM_B, FROM_C])


def equal(one: HostLinks, other: HostLinks) -> bool:
    same = [np.array_equal(one.seconds(size), other.seconds(size)) for size in (0, 1e6)]
    return one.hosts == other.hosts and all(same)


def test_files_of_both_kinds_say_the_same(tmp_path: Path) -> None:
    LINKS.write(tmp_path / "h.json")
    rows = [(a, b, LINKS.latency_seconds[i, j], LINKS.bytes_per_second[i, j])
            for i, a in enumerate(NAMES) for j, b in enumerate(NAMES) if a != b]  # fmt: skip
    lines = ["source,target,latency_seconds,bytes_per_second", *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "h.csv").write_text("\n".join(lines))
    assert equal(read(tmp_path / "h.json"), LINKS)
    assert equal(read(tmp_path / "h.csv"), LINKS)
    assert LINKS.seconds(2e6)[0, 1] == pytest.approx(2.001)
    assert equal(LINKS.only(["c", "a"]), of(["c", "a"], [[(0, 0), (5e-3, 5e6)], [(2e-3, 2e6), (0, 0)]]))


def changed(name: str, value: object) -> str:
    there = {"format": "lightning_decentral hosts", "version": 1, "hosts": ["a", "b"],
             "latency_seconds": [[0, 1], [1, 0]], "bytes_per_second": [[0, 1], [1, 0]]}  # fmt: skip
    return json.dumps({**there, name: value})


@pytest.mark.parametrize(("text", "message"), [
    ("{", "is no JSON"),
    ("[]", "is not a file of hosts"),
    (changed("format", "lightning_decentral profile"), "is not a file of hosts"),
    (changed("version", 2), '"version": 1'),
    (changed("hosts", ["a", "b", "c"]), "latency_seconds is 2 x 2, and there are 3 hosts: give 3 rows of 3"),
    (changed("hosts", ["a", "a"]), "different names"),
    (changed("latency_seconds", [[0, 1, 2], [1, 0, 2]]), "latency_seconds must be square, got 2 x 3"),
    (changed("latency_seconds", [[0, 1], [1]]), "all equally long"),
    (changed("latency_seconds", [[0, -1], [1, 0]]), "latency_seconds from a to b must be 0 or more seconds, got -1.0"),
    (changed("bytes_per_second", [[0, 1], [0, 0]]), "bytes_per_second from b to a must be more than 0, got 0.0"),
    (changed("bytes_per_second", [[0, 1], [float("nan"), 0]]), "more than 0, got nan"),
])  # fmt: skip
def test_other_matrices_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "h.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "h.json")


HEAD = "source,target,latency_seconds,bytes_per_second\n"


@pytest.mark.parametrize(("text", "message"), [
    ("a,b,1,1\n", "must begin with the line source,target,"),
    (HEAD + "a,b,1,1\n", "has no link from b to a"),
    (HEAD + "a,b,fast,1\nb,a,1,1\n", "no numbers in the link from a to b"),
    (HEAD + "a,b,1\nb,a,1,1\n", "no numbers in the link from a to b"),
])  # fmt: skip
def test_other_lists_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "h.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "h.csv")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rack = [0, 1, 0, 1]
    names = [f"host{i}" for i in range(4)]
    of(names, [[(1e-4 if a == b else 1e-2, 1e9) for b in rack] for a in rack]).write(tmp_path / "h.json")
    words = ["placement", str(tmp_path / "h.json"), "--topology", "pipeline", "--hostfile", str(tmp_path / "hosts.txt")]
    cli.main(words)
    ordered = (tmp_path / "hosts.txt").read_text().split()
    assert [int(name[-1]) % 2 for name in ordered] in ([0, 0, 1, 1], [1, 1, 0, 0])
    printed = capsys.readouterr().out
    assert ",".join(ordered) in printed
    assert "66.000 ms, 26.400 ms" in printed.replace("\n", " "), "six messages over the wire of 10 ms became two"
    cli.main([*words[:4], "--among", "host3,host1"])
    assert "host3,host1" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), [
    (["absent.json"], "absent.json can't be read"),
    (["h.json", "--among", "a,d"], "host d is missing: there are a, b, c; measure it, too"),
    (["h.json", "--topology", "coffee"], "no topology 'coffee': take pipeline, .*exponential"),
    (["h.json", "--topology", "hypercube"], "Hypercube needs a power of two workers, got 3"),
    (["h.json", "strategy.topology.max_degree=2"], "ring has nothing to set, got strategy.topology.max_degree=2"),
    (["h.json", "--topology", "pipeline", "x=1", "y=2"], "pipeline has nothing to set, got x=1 y=2: leave it out"),
    (["h.json", "--message-bytes", "0"], "more than 0.*got 0.0"),
])  # fmt: skip
def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    LINKS.write("h.json")
    with pytest.raises(SystemExit, match=message):
        cli.main(["placement", *words])
