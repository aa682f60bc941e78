"""The command: whole runs, in this process and as a user starts them, and what it says to mistakes."""

import csv
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from lightning_decentral.recipes import train
from tests.fresh import Script
from tests.standing_in import Launching

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "recipes" / "train.py"
INSTALLED = Path(sys.executable).with_name("lightning-decentral-train")
TINY = [
    "trainer=cpu",
    "trainer.max_epochs=1",
    "+trainer.enable_progress_bar=false",
    "+trainer.enable_model_summary=false",
]
TINY_VIT = [*TINY, "data.batch_size=64", "model.config.hidden_size=16", "model.config.num_hidden_layers=1"]
TWO_WORKERS = ["trainer.devices=2", "callbacks.worker_loss_monitor.every_n_steps=2"]
FIT_ALONE = """
from lightning.pytorch import Trainer
from lightning_decentral.recipes.train import main

if __name__ == "__main__":
    Trainer.test = lambda *_, **__: []
    main()
"""
SHORT = ["+trainer.limit_train_batches=4", "+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(train.FULL_ERROR, raising=False)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        # Set by seed_everything: removed again after the test.
        monkeypatch.setenv(name, "0")
    with warnings.catch_warnings():
        yield tmp_path


def run(*words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", *words])
    train.main()


def message(*words, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        run(*words, monkeypatch=monkeypatch)
    assert isinstance(ended.value.code, str), "an exit code of 1 comes with the message"
    assert "\n" not in ended.value.code
    return ended.value.code


def started(command, *words, seconds=110, script=Script):
    """Exit status and output of the command in a process that has the package imported; workers of a Script don't."""
    unseeded = {name: None for name in os.environ if name.startswith("PL_")}
    return script(command, words, unseeded, folder=Path()).finish(seconds)


def only(pattern):
    found = list(Path().glob(pattern))
    assert len(found) == 1, found
    return found[0]


def test_run_leaves_checkpoint_metrics_and_choices(monkeypatch):
    run(*TINY_VIT, monkeypatch=monkeypatch)
    folder = only("outputs/vit-*")
    rows = list(csv.DictReader((folder / "csv" / "metrics.csv").open()))
    assert any(row["train/loss"] for row in rows)
    assert 0 <= float(next(row["test/accuracy"] for row in rows if row.get("test/accuracy"))) <= 1
    choices = yaml.safe_load((folder / "csv" / "hparams.yaml").read_text())
    assert choices["model"]["config"]["hidden_size"] == 16
    assert choices["model"]["config"]["num_labels"] == 10
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert state["network.classifier.weight"].shape == (10, 16)


def test_a_wandb_run_is_named_by_what_it_is_unless_the_user_names_it():
    choices = {"recipe": "gpt", "strategy": "gossip", "strategy/codec": "int8"}
    of = {"_target_": "lightning.pytorch.loggers.WandbLogger", "name": None, "group": "mine", "tags": None}
    cfg = OmegaConf.create({"logger": of, "trainer": {"devices": 4, "num_nodes": 2}})
    train.name_run(cfg, choices)
    assert (cfg.logger.name, cfg.logger.group) == ("gpt-gossip-int8-4x2workers", "mine")
    assert cfg.logger.tags == ["gpt", "gossip", "int8", "4 x 2 workers"]
    without = OmegaConf.create({"logger": False, "trainer": cfg.trainer})
    train.name_run(without, choices)
    assert without.logger is False


@pytest.mark.parametrize(
    ("given", "job"),
    [
        ({}, []),
        ({"SLURM_JOB_ID": "71"}, ["71"]),
        ({"SLURM_JOB_ID": "73", "SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "2"}, ["71_2"]),
        ({"TORCHELASTIC_RUN_ID": "none"}, []),
        ({"TORCHELASTIC_RUN_ID": "mine"}, ["mine"]),
    ],
)
def test_names_of_runs_end_with_their_job(given, job, monkeypatch):
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert train.job() == job
    cfg = OmegaConf.create({"logger": {"_target_": "x.WandbLogger"}, "trainer": {"devices": 4, "num_nodes": 1}})
    train.name_run(cfg, {"recipe": "gpt", "strategy": "ddp"})
    assert cfg.logger.name == "-".join(["gpt-ddp-4x1workers", *job])


@pytest.mark.thorough
def test_a_run_repeats_with_its_seed_and_goes_on_from_its_checkpoint(monkeypatch):
    for folder, *more in (("a",), ("b",), ("c", "seed=1")):
        run(*TINY_VIT, f"hydra.run.dir={folder}", "trainer.max_epochs=2", *more, monkeypatch=monkeypatch)
    a, b, c = (torch.load(f"{folder}/checkpoints/last.ckpt", weights_only=True) for folder in "abc")
    bias = "network.classifier.bias"
    assert torch.equal(a["state_dict"][bias], b["state_dict"][bias])
    assert not torch.equal(a["state_dict"][bias], c["state_dict"][bias])
    further = ["trainer.max_epochs=3", "checkpoint=a/checkpoints/last.ckpt", "hydra.run.dir=d"]
    run(*TINY_VIT, *further, monkeypatch=monkeypatch)
    steps = [torch.load(f"{f}/checkpoints/last.ckpt", weights_only=True)["global_step"] for f in "ad"]
    assert steps == [2 * (1257 // 64), 3 * (1257 // 64)]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_gpt_trains_with_each_optimizer(optimizer, monkeypatch):
    words = ["recipe=gpt", f"optimizer={optimizer}", "scheduler=inverse_sqrt", "model.config.n_layer=1", "logger=none"]
    run(*TINY, *SHORT, *words, "model.config.n_embd=8", monkeypatch=monkeypatch)
    state = torch.load(only("outputs/gpt-*/checkpoints/last.ckpt"), weights_only=True)["state_dict"]
    assert state["network.transformer.wte.weight"].shape == (256, 8)


@pytest.mark.sampled
@pytest.mark.parametrize(("words", "parts"), [
    ("strategy=gossip strategy/topology=rng", ["'strategy/topology/rng'", "choose one of alternating", "torus"]),
    ("recipe=bert", ["'recipe/bert'", "choose one of gpt, resnet, vit"]),
    ("strategy=gossip strategy.dely=2", ["no 'dely' in strategy", "delay", "+strategy.bucket_bytes"]),
    ("modle=vit", ["no 'modle'", "model, data, optimizer"]),
    ("model.config.hiden_size=3", ["no 'hiden_size' in model.config", "hidden_size, num_hidden_layers"]),
    ("+model.config.hiden_size=3", ["ViTConfig has no option hiden_size", "hidden_size"]),
    ("recipe=vit data=pydoc", ["ViTConfig has no option n_positions, vocab_size"]),
    ("+optimizer.rate=1", ["no 'rate' in optimizer", "AdamW takes lr, betas"]),
    ("data=hub_image data.num_labels=2", ["data.source.path must be given", "data.source.path=..."]),
    ("strategy=partial_backprop strategy/depth=per_worker", ["add strategy.depth.fractions=... to the command"]),
    ("data.batch_size=5000", ["1257 training examples", "data.batch_size=1257 or lower"]),
    ("scheduler.warmup=500", ["fraction of all steps, got 500"]),
    ("strategy=gossip strategy.delay=-1", ["delay must be at least 0, got -1"]),
    ("checkpoint=nowhere.ckpt", ["nowhere.ckpt"]),
])  # fmt: skip
def test_mistake_gives_one_line_with_the_remedy(words, parts, monkeypatch):
    line = message(*TINY_VIT, *words.split(), monkeypatch=monkeypatch)
    assert line.startswith("error: ")
    assert [part for part in parts if part not in line] == [], line


def test_full_error_shows_the_traceback(monkeypatch):
    monkeypatch.setenv(train.FULL_ERROR, "1")
    with pytest.raises(ValueError, match="got 500"):
        run(*TINY_VIT, "scheduler.warmup=500", monkeypatch=monkeypatch)


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch):
    monkeypatch.setenv(train.FULL_ERROR, "1")
    monkeypatch.setattr(train, "build_model", lambda cfg, sizes: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(*TINY_VIT, monkeypatch=monkeypatch)


@pytest.mark.parametrize(("package", "words"), [
    ("transformers", []), ("sklearn.datasets", ["data=digits"]), ("datasets", ["data=cifar10"]),
])  # fmt: skip
def test_a_missing_extra_is_named_with_its_command(package, words, monkeypatch):
    # What Python itself takes for a module that can't be imported.
    monkeypatch.setitem(sys.modules, package, None)
    line = message(*TINY_VIT, *words, monkeypatch=monkeypatch)
    assert f"{package} is not installed: pip install 'lightning-decentral[recipes]'" in line


def test_sweep_with_scripts_as_workers_is_refused(monkeypatch):
    line = message("--multirun", *TINY_VIT, "trainer.devices=2", monkeypatch=monkeypatch)
    assert "use strategy=gossip or strategy=ddp, or one device" in line


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize(("command", "strategy", "script"), [
    (SCRIPT, "ddp", Launching), (INSTALLED, "gossip", Script),
], ids=["script", "installed"])  # fmt: skip
def test_two_workers_as_a_user_starts_them(command, strategy, script):
    code, output = started(command, *TINY_VIT, *SHORT, f"strategy={strategy}", *TWO_WORKERS, script=script)
    assert code == 0, output
    assert "Starting with 2 processes" in output
    rows = list(csv.DictReader(only("outputs/vit-*/csv/metrics.csv").open()))
    assert any(row.get("test/accuracy") for row in rows)
    assert ("worker/1/loss" in rows[0]) == (strategy == "gossip")
    assert only("outputs/vit-*/checkpoints/best.ckpt").stat().st_size > 0


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_sweep_with_two_workers_ends(tmp_path):
    """Workers are spawned. A test after the fit would spawn two more, 15 s of a processor that the forked ones of
    tests/processes and tests/gossip spare."""
    command = tmp_path / "fit_alone.py"
    command.write_text(FIT_ALONE)
    sweep = ["strategy=gossip", "trainer.devices=2", "optimizer.lr=1e-3"]
    code, output = started(command, "-m", *TINY_VIT, *SHORT, *sweep, seconds=300)
    assert code == 0, output
    assert len(list(Path().glob("outputs/sweep-*/*/csv/metrics.csv"))) == 1


@pytest.mark.slow
def test_the_installed_command_ends_with_one_line():
    code, output = started(INSTALLED, "recipe=bert")
    assert (code, output.splitlines()[0][:10]) == (1, "error: In ")
