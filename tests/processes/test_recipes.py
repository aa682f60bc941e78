"""The command line: a recipe under each strategy as a user starts it, fit and test in one run.

Second workers are forked: that a command starts them as scripts is in tests/recipes/test_train.py.
"""

import json

import pytest

from tests.processes.test_training import ROOT, start


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_recipe_trains_in_a_pipeline(tmp_path):
    small = "data.length=64 model.config.n_embd=16 +trainer.limit_train_batches=4 +trainer.limit_val_batches=2"
    pipeline = "strategy=token_pipeline strategy.start_method=fork callbacks=pipeline"
    words = f"recipe=gpt {pipeline} trainer=cpu trainer.devices=2 {small}"
    more = ("trainer.max_epochs=1", "logger=none", "+trainer.limit_test_batches=2", f"hydra.run.dir={tmp_path}")
    code, output = start(ROOT / "recipes" / "train.py", *words.split(), *more).finish(250)
    assert code == 0, output
    assert "1 of 2 stages" in output
    assert "test/nats_per_token" in output
    assert (tmp_path / "checkpoints" / "best.ckpt").exists()
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events} == {"stage 0", "stage 1"}


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "devices", "said"), [
    ("partial_backprop strategy.start_method=fork", 2, "Starting with 2 processes"),
    ("spilled", 1, "on the device"),
])  # fmt: skip
def test_a_recipe_trains_under_other_strategies(tmp_path, strategy, devices, said):
    small = "model.config.hidden_size=16 model.config.intermediate_size=32 +trainer.limit_train_batches=3"
    words = f"recipe=vit strategy={strategy} trainer=cpu trainer.devices={devices} {small} +trainer.limit_val_batches=2"
    more = ("trainer.max_epochs=1", "logger=none", "+trainer.limit_test_batches=2", f"hydra.run.dir={tmp_path}")
    code, output = start(ROOT / "recipes" / "train.py", *words.split(), *more).finish(250)
    assert code == 0, output
    assert said in output
    assert "test/accuracy" in output
    assert (tmp_path / "checkpoints" / "best.ckpt").exists()
