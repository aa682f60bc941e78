"""The command line: stages as processes of their own, fit and test in one run."""

import json

import pytest

from tests.processes.test_training import ROOT, start


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_recipe_trains_in_a_pipeline(tmp_path):
    small = "data.length=64 model.config.n_embd=16 +trainer.limit_train_batches=4 +trainer.limit_val_batches=2"
    words = f"recipe=gpt strategy=token_pipeline callbacks=pipeline trainer=cpu trainer.devices=2 {small}"
    more = ("trainer.max_epochs=1", "logger=none", "+trainer.limit_test_batches=2", f"hydra.run.dir={tmp_path}")
    code, output = start(ROOT / "recipes" / "train.py", *words.split(), *more).finish(250)
    assert code == 0, output
    assert "1 of 2 stages" in output
    assert "test/nats_per_token" in output
    assert (tmp_path / "checkpoints" / "best.ckpt").exists()
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events} == {"stage 0", "stage 1"}
