"""`cluster=slurm`: what SLURM would be asked for. No cluster is needed, the submission itself isn't made."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_decentral.shared.errors import one_line
from tests.conf.groups import CONF, read

there = find_spec("hydra_plugins.hydra_submitit_launcher") if find_spec("hydra_plugins") else None
with_launcher = pytest.mark.skipif(there is None, reason="needs hydra-submitit-launcher: the extra slurm")
WORDS = ["cluster=slurm", "recipe=gpt", "strategy=gossip", "trainer=gpu", "trainer.num_nodes=8", "trainer.devices=4"]


def composed(*words: str) -> DictConfig:
    with initialize_config_module("lightning_decentral.conf", version_base="1.3"):
        cfg = compose("train", [*WORDS, *words], return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    return cfg


@with_launcher
def test_one_task_for_each_device() -> None:
    cfg = composed("hydra.launcher.partition=fast")
    launcher = cfg.hydra.launcher
    assert (launcher.nodes, launcher.tasks_per_node, launcher.gpus_per_node) == (8, 4, 4)
    assert launcher.partition == "fast"
    assert cfg.strategy._target_.endswith("GossipStrategy")


@with_launcher
def test_the_batch_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher's own text up to the point where it would be handed to sbatch."""
    import submitit

    written: list[str] = []

    def map_array(executor: Any, *_: Any) -> list[Any]:
        written.append(executor._executor._make_submission_file_text("COMMAND", "0"))
        return []

    monkeypatch.setattr(submitit.AutoExecutor, "map_array", map_array)
    monkeypatch.setattr(shutil, "which", lambda name, *_: f"/usr/bin/{name}")
    cfg = composed(f"hydra.sweep.dir={tmp_path}", "hydra.job.name=train", "hydra.launcher.setup=['export A=1']")
    launcher = instantiate(cfg.hydra.launcher)
    launcher.setup(hydra_context=None, task_function=None, config=cfg)
    launcher.launch([["recipe=gpt"]], initial_job_idx=0)
    (text,) = written
    lines = text.splitlines()
    for asked in ("--nodes=8", "--ntasks-per-node=4", "--gpus-per-node=4", "--time=1440", "--job-name=train"):
        assert f"#SBATCH {asked}" in lines
    assert lines.index("export A=1") < next(i for i, line in enumerate(lines) if line.startswith("srun"))


@pytest.mark.skipif(there is not None, reason="the launcher is installed")
def test_without_the_extra_the_error_names_what_is_missing() -> None:
    with pytest.raises(Exception, match="submitit_slurm") as raised:
        composed()
    assert one_line(raised.value).endswith("is missing: run pip install 'lightning-decentral[slurm]'")


def test_it_asks_for_what_the_trainer_runs_on() -> None:
    node = read(CONF / "cluster" / "slurm.yaml")
    asked = OmegaConf.create({"trainer": {"num_nodes": 3, "devices": 2}, **node})
    assert dict(asked.hydra.launcher) == {"nodes": 3, "tasks_per_node": 2, "gpus_per_node": 2, "timeout_min": 1440}
    assert "NOT RUN HERE" in (CONF / "cluster" / "slurm.yaml").read_text()
