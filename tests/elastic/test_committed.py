"""Outer rounds of processes, of which one is killed and started again: anchors and momenta are equal bit for bit."""

import os
import signal
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_decentral.elastic.wire.sockets.keys import KEY
from tests.elastic import committed_training
from tests.elastic.committed_training import PLANS, STEPS
from tests.elastic.test_strategy import FIRST, PATH, SECONDS, told, until
from tests.elastic.wire import keyed
from tests.standing_in import Launching


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [("2",), ("1", "2")])
def test_members_that_are_not_reached_train_with_the_others_to_the_same_bits(
    tmp_path: Path, hidden: tuple[str, ...]
) -> None:
    """Under a key; two that don't reach each other by any address are relayed."""
    (tmp_path / "joined").touch()
    script = Launching(
        Path(committed_training.__file__), (str(tmp_path), "int4", *hidden), {**PATH, KEY: keyed.key().path}
    )
    code, output = script.finish(SECONDS)
    assert code == 0, output[-4000:]
    found = defaultdict(list)
    for name in FIRST:
        for line in told(tmp_path, name, "step"):
            found[line["step"]].append(line)
    assert len(found) == STEPS
    for lines in found.values():
        assert [len(line["members"]) for line in lines] == [3, 3, 3]
        assert len({(line["digest"], *line["chain"]) for line in lines}) == 1
    assert len({tuple(lines[0]["chain"]) for lines in found.values()}) > STEPS // 4  # committed rounds
    assert len({told(tmp_path, name, "end")[0]["digest"] for name in FIRST}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("victim", [0, 2])
def test_one_is_killed_another_joins_and_all_anchors_are_equal(tmp_path: Path, plan: str, victim: int) -> None:
    script = Launching(Path(committed_training.__file__), (str(tmp_path), plan), PATH)
    with ThreadPoolExecutor(1) as waiting:
        running = waiting.submit(script.finish, SECONDS)
        until(lambda: all(len(told(tmp_path, n, "step")) > 8 for n in FIRST), "three train", running)
        last = {name: told(tmp_path, name, "step")[-1] for name in FIRST}
        dies = sorted(FIRST, key=lambda name: last[name]["members"].index(last[name]["name"]))[victim]
        os.kill(last[dies]["pid"], signal.SIGKILL)
        until(lambda: bool(told(tmp_path, "w3", "step")), "a newcomer takes part", running)
        (tmp_path / "joined").touch()
        code, output = running.result()
    assert code == 0, output[-4000:]
    assert {f"w{n}" for n in range(9) if told(tmp_path, f"w{n}", "step")} == {*FIRST, "w3"}
    ended = [name for name in (*FIRST, "w3") if told(tmp_path, name, "end")]
    assert len(ended) == 3
    assert len({told(tmp_path, name, "end")[0]["digest"] for name in ended}) == 1  # the mean: the anchors
    found = defaultdict(list)
    for name in (*FIRST, "w3"):
        for line in told(tmp_path, name, "step"):
            found[line["step"]].append(line)
    chains = set()
    for lines in found.values():
        assert len({(line["digest"], *line["chain"]) for line in lines}) == 1
        chains.add(tuple(lines[0]["chain"]))
    assert len(chains) > STEPS // 4  # so many rounds were committed
    assert {len(lines) for lines in found.values()} >= {2, 3}
    losses = [sum(line["loss"] for line in lines) / len(lines) for _, lines in sorted(found.items())]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
