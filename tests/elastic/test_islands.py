"""An elastic worker of several devices is one member: they train as one, and where one ends all join anew."""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_decentral.gossip import AllReduce, Elastic, FullyShard, GossipStrategy, Island, Solo
from tests.elastic.weighted_training import BATCH, EXAMPLES, data
from tests.elastic.wire.lobbies import LobbyProcess
from tests.gossip import island_training
from tests.gossip.island_training import KILLED, POISONED, WRITTEN, Deep, flat
from tests.standing_in import Launching
from tests.tiny import QUIET, in_processes

SECONDS = 90.0
Lines = list[dict[str, Any]]


def trained(
    folder: Path,
    islands: Sequence[Island],
    epochs: int,
    rounds: str = "averaged",
    dies: str = "-",
    checkpoint: str = "-",
    **environment: str,
) -> dict[str, Lines]:
    """{device: its lines} of workers a, b that are these."""
    with LobbyProcess(least=2 if dies == "-" else 1, most=2) as lobby, ThreadPoolExecutor(2) as runs:
        ended = [
            runs.submit(
                launch,
                folder,
                island,
                (lobby.place, name, str(island), rounds, str(epochs), dies, checkpoint),
                environment,
            ).result
            for name, island in zip("ab", islands, strict=True)
        ]
        for code, output in (result() for result in ended):
            assert code == 0, output[-4000:]
    return {file.stem: lines(file) for file in sorted(folder.glob("*.jsonl"))}


def lines(file: Path) -> Lines:
    return [json.loads(line) for line in file.read_text().splitlines()]


def launch(folder: Path, island: Island, words: tuple[str, ...], more: Mapping[str, str]) -> tuple[int, str]:
    torchrun = ("--standalone", f"--nproc-per-node={island.devices}", "--max-restarts=3")
    file, script = str(torch.distributed.run.__file__), str(island_training.__file__)
    environment = {"PYTHONPATH": os.getcwd(), **more}
    return Launching(Path(file), (*torchrun, script, str(folder), *words), environment, folder).finish(SECONDS)


def together(found: dict[str, Lines]) -> list[list[int]]:
    """Examples of each step."""
    return [[place for row in rows for place in row["taken"]] for rows in zip(*found.values(), strict=True)]


def assert_one_process(found: dict[str, Lines], plain: Deep, optimizer: torch.optim.Optimizer) -> None:
    """All of them are, in every step, one process with all of their examples that goes on from here."""
    _, x, y = data().tensors
    for step, places in enumerate(together(found)):
        optimizer.zero_grad()
        (plain.net(x[places]) - y[places]).square().mean().backward()
        optimizer.step()
        for rows in found.values():
            assert rows[step]["weight"] == pytest.approx(flat(plain), abs=1e-12)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(240)  # two runs
@pytest.mark.parametrize("islands", [(FullyShard(2), AllReduce(2)), (AllReduce(2), Solo())], ids=str)
def test_islands_that_all_average_are_one_process_with_all_of_their_examples(
    islands: Sequence[Island], tmp_path: Path
) -> None:
    """LAW. An island counts as much as it has devices, also after a resume from what the oldest has saved, which is on
    devices: simulated ones."""
    epochs, devices = 2, [island.devices for island in islands]
    first, resumed = tmp_path / "first", tmp_path / "resumed"
    first.mkdir(), resumed.mkdir()
    found = trained(first, islands, epochs)
    assert sorted(found) == [f"{name}{rank}" for name, of in zip("ab", devices, strict=True) for rank in range(of)]
    steps, plain = EXAMPLES // (BATCH * sum(devices)), Deep()
    assert_one_process(found, plain, plain.configure_optimizers())
    assert {len(row["taken"]) for rows in found.values() for row in rows} == {BATCH}
    assert len(together(found)) == epochs * steps
    assert are_passes(together(found), steps)

    for device, rows in found.items():
        assert [row["apart"] for row in rows[:2]] == pytest.approx([0, 0], abs=1e-9)
        assert_validated(lines(first / f"{device}.validated"), rows)
        whole = torch.load(first / f"{device}.pt")
        assert torch.cat([t.flatten() for t in whole.values()]).tolist() == pytest.approx(rows[-1]["weight"], abs=1e-12)
    saved = first / "saved" / f"step={epochs * steps}.ckpt"
    checkpoint = torch.load(saved, weights_only=False)
    plain = Deep()
    plain.load_state_dict(checkpoint["state_dict"])
    optimizer = plain.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    assert flat(plain) == pytest.approx(found["a0"][-1]["weight"], abs=1e-12)
    again = trained(resumed, islands[::-1], epochs + 1, checkpoint=str(saved), DEVICE="simulated")
    assert [row["step"] for row in again["a0"]] == [*range(epochs * steps + 1, (epochs + 1) * steps + 1)]
    assert_one_process(again, plain, optimizer)


def assert_validated(rows: Lines, steps: Lines) -> None:
    """Of the mean, over all examples."""
    plain, (_, x, y) = Deep(), data().tensors
    assert rows
    for row in rows:
        mean = next(step["weight"] for step in steps if step["step"] == row["step"])
        assert row["mean"] == pytest.approx(mean, abs=1e-12)
        torch.nn.utils.vector_to_parameters(torch.tensor(mean, dtype=torch.float64), plain.parameters())
        assert row["error"] == pytest.approx(float((plain.net(x) - y).detach().square().mean()), rel=1e-6)


class Replayed(Deep):
    """Takes the batches that were taken elsewhere."""

    def __init__(self, batches: list[list[list[int]]]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data(), batch_sampler=self.batches[self.global_rank])


class Weights(Callback):
    def __init__(self, folder: Path) -> None:
        self._folder, self._rows = folder, list[list[float]]()

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self._rows.append(flat(module))

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        (self._folder / f"{trainer.global_rank}.json").write_text(json.dumps(self._rows))


def fixed(folder: Path, island: Island, batches: list[list[list[int]]]) -> None:
    trainer = Trainer(
        **{**QUIET, "use_distributed_sampler": False},
        strategy=GossipStrategy(island=island, start_method="fork"),
        devices=len(batches),
        max_steps=len(batches[0]),
        limit_val_batches=0,
        callbacks=[Weights(folder)],
    )
    trainer.fit(Replayed(batches))


@pytest.mark.thorough
@pytest.mark.slow
def test_devices_of_a_member_end_alike_with_what_a_callback_has_written(tmp_path: Path) -> None:
    """Each member with its own model; what was in flight has landed on all of its devices."""
    trained(tmp_path, (FullyShard(2), AllReduce(2)), 1, "written")
    ends = {name: torch.load(tmp_path / f"{name}.pt") for name in ("a0", "a1", "b0", "b1")}
    for name, end in ends.items():
        assert bool((end["net.0.weight"] == WRITTEN).all())
        assert all(torch.equal(value, ends[f"{name[0]}0"][key]) for key, value in end.items())
    assert not torch.equal(ends["a0"]["net.2.weight"], ends["b0"]["net.2.weight"])


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("island", [AllReduce(2), FullyShard(2)], ids=str)
def test_while_members_stay_the_same_islands_train_as_in_a_fixed_world(island: Island, tmp_path: Path) -> None:
    found = trained(tmp_path, [island, island], 2, "delayed")
    in_processes(fixed, tmp_path, island, [[row["taken"] for row in rows] for rows in found.values()], seconds=90)
    for rank, rows in enumerate(found.values()):
        expected = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [row["weight"] for row in rows] == [pytest.approx(row, abs=1e-12) for row in expected]
    assert found["a0"][0]["weight"] != pytest.approx(found["b0"][0]["weight"], abs=1e-3)
    assert found["a0"][0]["apart"] > 1e-3


@pytest.mark.slow
def test_where_one_device_of_shards_is_poisoned_all_are_healed(tmp_path: Path) -> None:
    """Its rows spread to the others' gradients; what their optimizers keep begins anew, too."""
    found = trained(tmp_path, (FullyShard(2), Solo()), 1, rounds="poisoned")
    assert {name: [row["healed"] for row in rows][-1] for name, rows in found.items()} == {"a0": 1, "a1": 1, "b0": 0}
    assert len(found["a0"]) > POISONED + 2
    for one, other, third in zip(*found.values(), strict=True):
        assert one["weight"] == other["weight"] == pytest.approx(third["weight"], abs=1e-12)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("island", "dies", "device"), [(AllReduce(2), "b0", "simulated"), (FullyShard(2), "b1", "cpu")]
)
def test_a_member_one_of_whose_devices_is_killed_joins_whole(
    island: Island, dies: str, device: str, tmp_path: Path
) -> None:
    epochs = 12
    found = trained(tmp_path, (island, island), epochs, dies=dies, DEVICE=device)
    stays, joins = (
        [{(row["life"], row["step"]): row for row in found[f"{name}{rank}"]} for rank in range(2)] for name in "ab"
    )
    last = max(step for _, step in stays[0])
    began = min(step for _, step in stays[0])  # the other may have begun alone
    assert [step for _, step in stays[0]] == [step for _, step in stays[1]] == [*range(began, last + 1)]
    assert began < KILLED
    for one, other in ((stays[0], stays[1]), (joins[0], joins[1])):
        for when in one.keys() & other.keys():
            assert one[when]["weight"] == other[when]["weight"]
            assert one[when]["members"] == other[when]["members"]
    lives = [sorted(step for life, step in of if life == 1) for of in joins]
    assert lives[0] == lives[1] == [*range(lives[0][0], last + 1)]
    assert lives[0][0] > KILLED
    killed = max(step for life, step in joins[0] if life == 0)
    first, then = (stays[0][0, step]["members"] for step in (killed, last))
    assert len(first) == len(then) == 2
    assert first != then
    given = [line["digest"] for line in lines(tmp_path / "a0.digests") if line["kind"] == "copied"]
    begun = [line["digest"] for line in lines(tmp_path / "b0.digests") if line["kind"] == "begins"]
    assert begun[-1] in given
    for step in lives[0]:  # all of them average in each step
        assert stays[0][0, step]["weight"] == pytest.approx(joins[0][1, step]["weight"], abs=1e-12)
    taken = [[*stays[0][0, s]["taken"], *stays[1][0, s]["taken"], *joins[0][1, s]["taken"], *joins[1][1, s]["taken"]]
             for s in lives[0]]  # fmt: skip
    each = EXAMPLES // len(taken[0])
    assert len(taken) > 4 * each
    # Where there were fewer a pass has more steps: one begins somewhere among the last ones of a pass.
    assert any(are_passes(taken[start:], each) for start in range(2 * each, 3 * each))


def are_passes(together: list[list[int]], each: int) -> bool:
    """Whether every `each` steps have all examples, each of them once."""
    starts = range(0, len(together) - each + 1, each)
    return all(sorted(chain(*together[at : at + each])) == [*range(EXAMPLES)] for at in starts)


def test_islands_without_a_lobby_are_told_to_meet_at_one() -> None:
    strategy: Any = GossipStrategy(elastic=Elastic(), island=AllReduce(devices=2))
    with pytest.raises(ValueError, match=r"workers of 2 devices need a lobby: run `lightning"):
        Trainer(accelerator="cpu", logger=False, strategy=strategy, devices=2)
