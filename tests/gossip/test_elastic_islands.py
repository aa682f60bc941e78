"""An elastic worker of several devices is one member: they train as one, and where one ends all join anew."""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run
from lightning.pytorch import Trainer

from lightning_decentral.gossip import AllReduce, Elastic, FullyShard, GossipStrategy
from tests.gossip import island_training
from tests.gossip.island_training import KILLED
from tests.gossip.weighted_training import BATCH, EXAMPLES, Net, data
from tests.shared.wire.elastic.lobbies import LobbyProcess
from tests.standing_in import Launching

SECONDS = 90.0


def trained(folder: Path, devices: Sequence[int], epochs: int, dies: str = "") -> dict[str, list[dict[str, Any]]]:
    """{device: its lines} of workers a, b of so many devices."""
    killed = [dies] if dies else []
    with LobbyProcess(least=1 if dies else 2, most=2) as lobby, ThreadPoolExecutor(2) as runs:
        ended = [
            runs.submit(launch, folder, number, (lobby.place, name, str(number), str(epochs), *killed)).result
            for name, number in zip("ab", devices, strict=True)
        ]
        for code, output in (result() for result in ended):
            assert code == 0, output[-4000:]
    files = sorted(folder.glob("*.jsonl"))
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files}


def launch(folder: Path, devices: int, words: tuple[str, ...]) -> tuple[int, str]:
    torchrun = ("--standalone", f"--nproc-per-node={devices}", "--max-restarts=3")
    file, script = str(torch.distributed.run.__file__), str(island_training.__file__)
    environment = {"PYTHONPATH": os.getcwd()}
    return Launching(Path(file), (*torchrun, script, str(folder), *words), environment, folder).finish(SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [(2, 2), (2, 1)])
def test_islands_that_all_average_are_one_process_with_all_of_their_examples(
    devices: Sequence[int], tmp_path: Path
) -> None:
    """LAW. An island counts as much as it has devices."""
    epochs, count = 2, sum(devices)
    found = trained(tmp_path, devices, epochs)
    assert sorted(found) == [f"{name}{rank}" for name, of in zip("ab", devices, strict=True) for rank in range(of)]
    steps = EXAMPLES // (BATCH * count)
    plain, (_, x, y) = Net(), data().tensors
    optimizer = plain.configure_optimizers()
    together = [[place for row in rows for place in row["taken"]] for rows in zip(*found.values(), strict=True)]
    for step, places in enumerate(together):
        optimizer.zero_grad()
        (plain.net(x[places]) - y[places]).square().mean().backward()
        optimizer.step()
        for rows in found.values():
            assert rows[step]["weight"] == pytest.approx(plain.net.weight[0].tolist(), abs=1e-12)
    assert {len(row["taken"]) for rows in found.values() for row in rows} == {BATCH}
    assert len(together) == epochs * steps
    assert are_passes(together, steps)


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["b1", "b0"], ids=["other", "first"])
def test_a_member_one_of_whose_devices_is_killed_joins_whole(dies: str, tmp_path: Path) -> None:
    epochs = 12
    found = trained(tmp_path, (2, 2), epochs, dies)
    stays, joins = (
        [{(row["life"], row["step"]): row for row in found[f"{name}{rank}"]} for rank in range(2)] for name in "ab"
    )
    last = max(step for _, step in stays[0])
    assert [step for _, step in stays[0]] == [step for _, step in stays[1]] == [*range(1, last + 1)]
    for one, other in ((stays[0], stays[1]), (joins[0], joins[1])):
        for when in one.keys() & other.keys():
            assert one[when]["weight"] == other[when]["weight"]
            assert one[when]["members"] == other[when]["members"]
    lives = [sorted(step for life, step in of if life == 1) for of in joins]
    assert lives[0] == lives[1] == [*range(lives[0][0], last + 1)]
    assert lives[0][0] > KILLED
    first, then = (stays[0][0, step]["members"] for step in (1, last))
    assert len(first) == len(then) == 2
    assert first != then
    for step in lives[0]:  # all of them average in each step
        assert stays[0][0, step]["weight"] == pytest.approx(joins[0][1, step]["weight"], abs=1e-12)
    together = [[*stays[0][0, s]["taken"], *stays[1][0, s]["taken"], *joins[0][1, s]["taken"], *joins[1][1, s]["taken"]]
                for s in lives[0]]  # fmt: skip
    each = EXAMPLES // len(together[0])
    assert len(together) > 4 * each
    # Where there were fewer a pass has more steps: one begins somewhere among the last ones of a pass.
    assert any(are_passes(together[start:], each) for start in range(2 * each, 3 * each))


def are_passes(together: list[list[int]], each: int) -> bool:
    """Whether every `each` steps have all examples, each of them once."""
    starts = range(0, len(together) - each + 1, each)
    return all(sorted(chain(*together[at : at + each])) == [*range(EXAMPLES)] for at in starts)


def test_islands_that_split_the_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"island=FullyShard\(.*\) doesn't go with elastic yet: use AllReduce\(2\)"):
        GossipStrategy(elastic=Elastic(lobby="127.0.0.1:29400"), island=FullyShard(devices=2))


def test_islands_without_a_lobby_are_told_to_meet_at_one() -> None:
    strategy: Any = GossipStrategy(elastic=Elastic(), island=AllReduce(devices=2))
    with pytest.raises(ValueError, match=r"workers of AllReduce\(devices=2.*meet at a lobby: run `lightning"):
        Trainer(accelerator="cpu", logger=False, strategy=strategy, devices=2)
