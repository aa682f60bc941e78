"""Manifests of docs/examples for Kubernetes and SkyPilot: they fit their schemas, and their commands train here."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from tests import ports
from tests.docs.pages import ROOT
from tests.docs.test_examples import EXAMPLES, finish
from tests.elastic.wire.lobbies import LobbyProcess
from tests.fresh import Script

VERSIONS = ("1.31", kubernetes_validate.latest_version())


def read(name: str) -> list[Any]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def command(kind: str) -> list[str]:
    """Command of the Deployment's, or the Job's, container."""
    (found,) = (one for one in read("kubernetes_elastic.yaml") if one["kind"] == kind)
    (container,) = found["spec"]["template"]["spec"]["containers"]
    words: list[str] = container["command"]
    return words


@pytest.mark.parametrize("version", VERSIONS)
def test_elastic_workers_on_kubernetes_fit_the_schema(version: str) -> None:
    found = read("kubernetes_elastic.yaml")
    assert [one["kind"] for one in found] == ["Service", "Deployment", "Job"]
    for manifest in found:
        kubernetes_validate.validate(manifest, version, strict=True)
    service, lobby, _ = found
    assert lobby["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
    address = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert command("Job")[-1] == address
    assert f"--port={address.partition(':')[2]}" in command("Deployment")


def test_a_train_job_fits_the_schema() -> None:
    (job,) = read("kubernetes.yaml")
    found = TrainerV1alpha1TrainJob.from_dict(job)
    assert found is not None
    assert found.to_dict() == job, "a field that the schema doesn't know is dropped"
    trainer = job["spec"]["trainer"]
    assert f"--nodes={trainer['numNodes']}" in trainer["args"]
    assert f"--devices={trainer['numProcPerNode']}" in trainer["args"]


def test_a_task_of_skypilot_fits_the_schema() -> None:
    pytest.importorskip("sky")
    from sky.utils import common_utils, schemas

    common_utils.validate_schema(*read("skypilot.yaml"), schemas.get_task_schema(), "")


def test_the_train_job_trains() -> None:
    """With the variables that torchrun gives the worker of each node."""
    (job,) = read("kubernetes.yaml")
    trainer = job["spec"]["trainer"]
    program, script = trainer["command"]
    assert program == "torchrun"
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.free()), "TORCHELASTIC_RUN_ID": "none"}
    size, one = str(trainer["numNodes"]), {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    words = (*trainer["args"], "--steps=16")
    nodes = [
        Script(ROOT / script, words, {**place, **one, "WORLD_SIZE": size, "RANK": f"{rank}", "GROUP_RANK": f"{rank}"})
        for rank in range(int(size))
    ]
    assert "4 workers, accuracy 0." in finish(nodes)


def test_elastic_workers_of_kubernetes_train() -> None:
    python, script, address = command("Job")
    assert (python, address) == ("python", "lobby:29400")
    with LobbyProcess(least=2, most=2) as lobby:
        words = (lobby.place, "--most=2", "--steps=8")
        assert "step 8, accuracy" in finish([Script(ROOT / script, words) for _ in range(2)])


def test_a_task_of_skypilot_trains(tmp_path: Path) -> None:
    """Its shell commands on each of two machines."""
    (task,) = read("skypilot.yaml")
    given = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    run = task["run"].rstrip().replace("29500", str(ports.free()))
    with started(["bash", "-c", run + " --steps=16"], [{**given, "SKYPILOT_NODE_RANK": rank} for rank in "01"]) as both:
        assert "2 workers, accuracy 0." in "".join(one.communicate(timeout=110)[0] for one in both)
        assert [one.returncode for one in both] == [0, 0]


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_the_commands_as_they_stand() -> None:
    (job,) = read("kubernetes.yaml")
    trainer, port = job["spec"]["trainer"], str(ports.free())
    size, workers = str(trainer["numNodes"]), str(trainer["numProcPerNode"])
    place = {"PET_NNODES": size, "PET_NPROC_PER_NODE": workers, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    nodes = [{**place, "PET_NODE_RANK": str(rank)} for rank in range(int(size))]
    with started([*trainer["command"], *trainer["args"]], nodes) as every:
        assert re.search("4 workers, accuracy (0.9|1)", "".join(one.communicate(timeout=250)[0] for one in every))
    lobby = str(ports.free())
    words = [word.replace("29400", lobby) for word in command("Deployment")]
    worker = [word.replace("lobby:29400", f"127.0.0.1:{lobby}") for word in command("Job")]
    with started(words, [{}]), started(worker, [{}, {}]) as members:
        assert re.search("step 10000, accuracy (0.9|1)", "".join(one.communicate(timeout=250)[0] for one in members))


@contextmanager
def started(words: list[str], environments: list[Mapping[str, str]]) -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes of one command with these variables; killed with what they have started."""
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    every = [subprocess.Popen(words, cwd=ROOT, env={**os.environ, **path, **one}, **output) for one in environments]
    try:
        yield every
    finally:
        for one in every:
            if one.poll() is None:
                os.killpg(one.pid, 9)
                one.wait()
