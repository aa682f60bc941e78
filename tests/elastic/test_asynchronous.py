"""Trainers that don't wait for each other: a slow one leaves rounds out, and Lightning counts as if it hadn't.

The slow one is on a device, which is simulated.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_decentral.gossip import Asynchronous, Elastic, GossipStrategy, QuasiGlobalMomentum
from tests.elastic import asynchronous_training
from tests.elastic.asynchronous_training import ACCUMULATED, CHECK, EPOCHS, GAMMA, ROUNDS, SLOW
from tests.standing_in import Launching

PATH = {"PYTHONPATH": os.getcwd()}


def told(folder: Path) -> Iterator[list[dict[str, Any]]]:
    for number in range(3):
        yield [json.loads(line) for line in (folder / f"w{number}.jsonl").read_text().splitlines()]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_slow_trainer_holds_up_nobody(tmp_path: Path) -> None:
    code, output = Launching(Path(asynchronous_training.__file__), (str(tmp_path),), PATH).finish(90.0)
    assert code == 0, output[-4000:]
    workers = list(told(tmp_path))
    batches = [[line for line in worker if line["kind"] == "batch"] for worker in workers]
    assert len(batches[0]) == len(batches[2]) == ROUNDS * ACCUMULATED
    assert [{line["device"] for line in of} for of in batches] == [{"cpu"}, {"cuda:0"}, {"cpu"}]
    # The slow one took part in all rounds behind which they validate, and in few others.
    assert ROUNDS * ACCUMULATED // CHECK <= len(batches[1]) // ACCUMULATED < 0.75 * ROUNDS
    seconds = [of[-1]["at"] - of[0]["at"] for of in batches]
    assert max(seconds) < 0.8 * SLOW * ROUNDS, seconds
    assert batches[1][-1]["watched"]["left_out_rounds"] == ROUNDS - len(batches[1]) / ACCUMULATED
    for worker, of in zip(workers, batches, strict=True):
        assert (worker[-1]["kind"], worker[-1]["step"], worker[-1]["epoch"]) == ("end", ROUNDS, EPOCHS)
        for batch in of:
            rounds = ROUNDS // EPOCHS
            assert batch["rate"] == pytest.approx(0.1 * GAMMA ** batch["step"])
            assert batch["step"] == batch["epoch"] * rounds + (batch["batch"] + 1) // ACCUMULATED
    validated = [[(line["step"], line["x"]) for line in worker if line["kind"] == "validated"] for worker in workers]
    assert [step for step, _ in validated[0]] == [*range(CHECK // ACCUMULATED, ROUNDS + 1, CHECK // ACCUMULATED)]
    assert validated[0] == validated[1] == validated[2]
    saved = torch.load(next(tmp_path.glob(f"saved/step={ROUNDS}.ckpt")), weights_only=False)
    assert saved["global_step"] == ROUNDS
    assert saved["state_dict"]["x"].tolist() == validated[0][-1][1]
    # No example of a pass is taken twice.
    for epoch in range(EPOCHS):
        taken = [e for of in batches for line in of if line["epoch"] == epoch for e in line["examples"]]
        assert len(taken) == len(set(taken))


def test_only_what_can_be_mixed_whenever_it_comes() -> None:
    elastic = Elastic(lobby="127.0.0.1:29400", asynchronous=Asynchronous())
    assert GossipStrategy(elastic=elastic).elastic == elastic
    with pytest.raises(ValueError, match=r"QuasiGlobalMomentum.* isn't compatible with asynchronous rounds"):
        GossipStrategy(elastic=elastic, combine=QuasiGlobalMomentum())
    with pytest.raises(ValueError, match="delay=2 isn't compatible with asynchronous rounds"):
        GossipStrategy(elastic=elastic, delay=2)
