"""A token pipeline whose replicas come and go is one member: it trains as one model, restarts and joins as a whole."""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.run
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_decentral import TokenPipelineStrategy
from lightning_decentral.elastic.pipelines import ElasticPipeline
from lightning_decentral.elastic.wire.rounds.holding import StagesHolding
from lightning_decentral.elastic.wire.rounds.wholes import StageBucket
from lightning_decentral.gossip import Elastic, GossipReplicas
from lightning_decentral.gossip.wire.optimizer_mixer import Written
from lightning_decentral.pipeline import Chain, blocks_of
from lightning_decentral.pipeline.compute.model import StagePlace
from lightning_decentral.pipeline.wire.ownership import Ownership
from tests.elastic.test_islands import Lines, Weights, assert_one_process, lines, together
from tests.elastic.weighted_training import BATCH, EXAMPLES, data
from tests.elastic.wire.lobbies import LobbyProcess
from tests.gossip import pipeline_training
from tests.gossip.island_training import KILLED, Deep, flat
from tests.gossip.pipeline_training import STAGES, Piped
from tests.standing_in import Launching
from tests.tiny import QUIET, in_processes

SECONDS = 150.0


def trained(
    folder: Path, epochs: int, rounds: str = "averaged", dies: str = "-", checkpoint: str = "-", **environment: str
) -> dict[str, Lines]:
    """{stage: its lines} of pipelines a, b."""
    with LobbyProcess(least=2 if dies == "-" else 1, most=2) as lobby, ThreadPoolExecutor(2) as runs:
        ended = [
            runs.submit(launch, folder, (lobby.place, name, rounds, str(epochs), dies, checkpoint), environment).result
            for name in "ab"
        ]
        for code, output in (result() for result in ended):
            assert code == 0, output[-4000:]
    return {file.stem: lines(file) for file in sorted(folder.glob("*.jsonl"))}


def launch(folder: Path, words: tuple[str, ...], more: Mapping[str, str]) -> tuple[int, str]:
    torchrun = ("--standalone", f"--nproc-per-node={STAGES}", "--max-restarts=3")
    file, script = str(torch.distributed.run.__file__), str(pipeline_training.__file__)
    environment = {"PYTHONPATH": os.getcwd(), **more}
    return Launching(Path(file), (*torchrun, script, str(folder), *words), environment, folder).finish(SECONDS)


def models(found: dict[str, Lines]) -> dict[str, Lines]:
    """Of both pipelines, with the whole model's weights."""
    pairs = {name: zip(*(found[f"{name}{stage}"] for stage in range(STAGES)), strict=True) for name in "ab"}
    whole: dict[str, Lines] = {}
    for name, rows in pairs.items():
        whole[name] = []
        for row in rows:
            assert len({json.dumps([line["taken"], line["members"], line["step"]]) for line in row}) == 1
            whole[name].append({**row[0], "weight": [x for line in row for x in line["weight"]]})
    return whole


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(360)  # two runs
def test_pipelines_that_all_average_are_one_process_with_all_of_their_examples(tmp_path: Path) -> None:
    """LAW. Also after a resume from what the oldest has saved, which is on devices: simulated ones."""
    epochs, steps = 2, EXAMPLES // (BATCH * 2)
    first, resumed = tmp_path / "first", tmp_path / "resumed"
    first.mkdir(), resumed.mkdir()
    found = models(trained(first, epochs))
    plain = Deep()
    assert_one_process(found, plain, plain.configure_optimizers())
    assert len(together(found)) == epochs * steps
    for name in "ab":
        whole = torch.load(first / f"{name}0.pt")
        assert torch.cat([t.flatten() for t in whole.values()]).tolist() == pytest.approx(flat(plain), abs=1e-12)
        assert [row["apart"] for row in found[name][:2]] == pytest.approx([0, 0], abs=1e-9)
    saved = first / "saved" / f"step={epochs * steps}.ckpt"
    checkpoint = torch.load(saved, weights_only=False)
    plain = Deep()
    plain.load_state_dict(checkpoint["state_dict"])
    assert flat(plain) == pytest.approx(found["a"][-1]["weight"], abs=1e-12)
    optimizer = plain.configure_optimizers()
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    again = models(trained(resumed, epochs + 1, checkpoint=str(saved), DEVICE="simulated"))
    assert [row["step"] for row in again["a"]] == [*range(epochs * steps + 1, (epochs + 1) * steps + 1)]
    assert_one_process(again, plain, optimizer)


class ReplayedStages(Piped):
    """Takes the batches that were taken elsewhere."""

    def __init__(self, batches: list[list[list[int]]]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data(), batch_sampler=self.batches[self.global_rank])


def fixed(folder: Path, batches: list[list[list[int]]]) -> None:
    strategy: Any = TokenPipelineStrategy(stages=STAGES, replicas=GossipReplicas(), start_method="fork")
    trainer = Trainer(
        **{**QUIET, "use_distributed_sampler": False},
        strategy=strategy,
        devices=len(batches),
        max_steps=len(batches[0]),
        limit_val_batches=0,
        callbacks=[Weights(folder)],
    )
    trainer.fit(ReplayedStages(batches))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(360)
def test_while_members_stay_the_same_pipelines_train_as_in_a_fixed_world(tmp_path: Path) -> None:
    found = trained(tmp_path, 2, "delayed")
    in_processes(fixed, tmp_path, [[row["taken"] for row in rows] for rows in found.values()], seconds=150)
    for rank, rows in enumerate(found.values()):
        expected = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [row["weight"] for row in rows] == [pytest.approx(row, abs=1e-12) for row in expected]
    assert found["a0"][0]["weight"] != pytest.approx(found["b0"][0]["weight"], abs=1e-3)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.parametrize(("dies", "device"), [("b1", "cpu"), ("b0", "simulated")])
def test_a_pipeline_one_of_whose_stages_is_killed_joins_whole(dies: str, device: str, tmp_path: Path) -> None:
    found = trained(tmp_path, 5, dies=dies, DEVICE=device)
    by_life: dict[str, dict[Any, Any]] = {
        name: {(row["life"], row["step"]): row for row in rows} for name, rows in found.items()
    }
    last = max(step for _, step in by_life["a0"])
    for stage in range(STAGES):
        stays, joins = by_life[f"a{stage}"], by_life[f"b{stage}"]
        began = min(step for _, step in stays)  # the other may have begun alone
        assert [step for _, step in stays] == [*range(began, last + 1)]
        assert began < KILLED
        lived = sorted(step for life, step in joins if life == 1)
        assert lived == [*range(lived[0], last + 1)]
        assert lived[0] > KILLED
        given = [line["digest"] for line in lines(tmp_path / f"a{stage}.digests") if line["kind"] == "copied"]
        begun = [line["digest"] for line in lines(tmp_path / f"b{stage}.digests") if line["kind"] == "begins"]
        assert begun[-1] in given
        for step in lived:  # all of them average in each step
            assert stays[0, step]["weight"] == pytest.approx(joins[1, step]["weight"], abs=1e-12)
            assert not set(stays[0, step]["taken"]) & set(joins[1, step]["taken"])


@pytest.mark.parametrize("parts", [3, 2])
def test_pipelines_that_are_cut_otherwise_are_refused(parts: int) -> None:
    strategy: Any = SimpleNamespace(stage=0, devices=2, _module=Deep())
    given = {"stages": [{"state_dict": {"net.2.bias": torch.zeros(1)}}] * parts}
    with pytest.raises(ValueError, match=rf"has 2 stages, the run's pipelines have {parts}, or other blocks"):
        ElasticPipeline._take(strategy, None, given)  # type: ignore[arg-type]


def test_parameters_that_are_unfrozen_later_are_refused() -> None:
    stages = object.__new__(StagesHolding)
    stages._packed = True
    with pytest.raises(ValueError, match="unfrozen during training, but elastic pipelines mix the same parameters"):
        stages.pack(list(Deep().parameters()), None)


def test_members_have_their_parameters_in_the_order_of_the_model_without_the_frozen() -> None:
    """Means take the members' by position; of some hundred, the order of their addresses is no other one by chance."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(64)))
    model[1].requires_grad_(False)
    wanted = [p for p in model.parameters() if p.requires_grad]
    chain = Chain(model, blocks_of(list(model)))
    owned = Ownership(model, chain, StagePlace(0, 64, True, True), None)
    stage: Any = SimpleNamespace(_stage=SimpleNamespace(holdings=owned))
    found = ElasticPipeline.counted(stage)
    assert [id(p) for p in found] == [id(p) for p in wanted]


def test_nothing_is_written_where_a_stage_has_no_parameters() -> None:
    """Of other stages the first one's host has flat tensors alone."""
    written = Written([StageBucket(None, 1, 8, torch.float32)])  # type: ignore[arg-type]
    written.note()
    written.note()
    assert written.found == set()


def test_a_trainer_is_one_pipeline() -> None:
    elastic = Elastic(lobby="127.0.0.1:29400")
    strategy: Any = TokenPipelineStrategy(stages=2, replicas=GossipReplicas(elastic=elastic))
    assert type(strategy).__name__ == "ElasticTokenPipelineStrategy"
    Trainer(**QUIET, strategy=strategy, devices=4)
    strategy.connect(Deep())
    with pytest.raises(ValueError, match=r"is one pipeline, this Trainer has 2 of 2 stages: start a torchrun with"):
        strategy.refuse(Deep(), fitting=False)


def test_pipelines_without_a_lobby_are_told_to_meet_at_one() -> None:
    strategy: Any = TokenPipelineStrategy(replicas=GossipReplicas(elastic=Elastic()))
    with pytest.raises(ValueError, match=r"workers of 2 devices need a lobby: run `lightning"):
        Trainer(**QUIET, strategy=strategy, devices=2)
