"""The cluster of namespaces: what it builds, what it limits, and that it leaves nothing behind."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_decentral.gossip import AllReduce, Auto
from network import cluster as clusters
from tests import namespaces
from tests.fresh import Script
from tests.gossip.test_islands import expected
from tests.tiny import recorded

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

RATE_BITS = 50e6
NAME = f"test{os.getpid()}"
TALKS = """
import os, socket, sys, time
rank, address = int(os.environ["NODE_RANK"]), os.environ["MASTER_ADDR"]
if rank == 0:
    with socket.create_server((address, 4000)) as server, server.accept()[0] as peer:
        received = 0
        while chunk := peer.recv(1 << 16):
            received += len(chunk)
    print(received)
else:
    for _ in range(100):
        try:
            peer = socket.create_connection((address, 4000))
            break
        except OSError:
            time.sleep(0.05)
    peer.sendall(bytes(2_000_000))
    peer.close()
"""
GOSSIPS = """
import sys
import torch
from pathlib import Path
from tests.namespaces import enter
enter(sys.argv[1])
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset
import lightning_decentral
class Point(LightningModule):
    def __init__(self):
        super().__init__()
        self.x = torch.nn.Parameter(torch.zeros(4))
    def training_step(self, batch, _):
        return (self.x - self.global_rank).square().sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = Trainer(strategy="gossip", accelerator="cpu", devices=1, num_nodes=2, max_steps=40, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
point = Point()
trainer.fit(point, DataLoader(TensorDataset(torch.zeros(200, 1))))
torch.save((trainer.world_size, point.x.detach()), Path(__file__).with_name(f"{trainer.global_rank}.pt"))
"""
TORCHRUN = """
import sys
from torch.distributed.run import main
from tests.namespaces import enter
enter(sys.argv[1])
main(sys.argv[2:])
"""
ISLANDS = """
import os, sys
from pathlib import Path
from lightning_decentral.gossip import AllReduce
from tests.gossip.test_islands import fit_quadratic
from tests.namespaces import enter
enter(sys.argv[1])
options = {"island": AllReduce(2), "start_method": sys.argv[2]}
if options["start_method"] == "fork":
    del os.environ["LOCAL_RANK"]  # the second process of a host is Lightning's to start
fit_quadratic(Path(__file__).parent, 2, options, {"num_nodes": 2})
"""


def reason() -> str:
    try:
        clusters.check_machine()
        if not clusters.existing("none"):
            probe = clusters.Cluster(f"{NAME}p", 1)
            probe.up("1gbit")
            clusters.down(probe.name)
    except clusters.ClusterError as error:
        return str(error)
    return ""


needs_cluster = pytest.mark.skipif(bool(why := reason()), reason=why or "namespaces work")


@pytest.fixture
def two() -> Iterator[clusters.Cluster]:
    with clusters.cluster(2, "50mbit", name=NAME) as made:
        yield made


@needs_cluster
def test_a_link_carries_no_more_than_its_rate(two: clusters.Cluster, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    assert two.run([sys.executable, "-c", TALKS], seconds=60) == [0, 0]
    assert time.monotonic() - start > 8 * (2_000_000 - 2 * 65_536) / RATE_BITS
    assert "[0] 2000000" in capfd.readouterr().out


@needs_cluster
def test_another_rate_takes_the_place_of_the_first(two: clusters.Cluster) -> None:
    two.limit("80mbit")
    for namespace, device in ((two.host(1), "eth0"), (two.switch, "port1")):
        shown = subprocess.run(["tc", "-n", namespace, "qdisc", "show", "dev", device], capture_output=True, text=True)
        assert "rate 80Mbit" in shown.stdout


@needs_cluster
def test_lightnings_own_environment_makes_one_world_of_the_hosts(two: clusters.Cluster, tmp_path: Path) -> None:
    file = tmp_path / "gossips.py"
    file.write_text(GOSSIPS)
    finished([Script(file, (two.host(i),), two.environment(i, port=29500)) for i in range(2)])
    (size, first), (_, second) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert size == 2
    assert torch.equal(first, second), "training ends with all hosts at the mean"
    torch.testing.assert_close(first, torch.full((4,), 0.5), atol=0.01, rtol=0)


def finished(scripts: list[Script]) -> None:
    for code, output in [script.finish(60) for script in scripts]:
        assert code == 0, output[-4000:]


def assert_islands_equal_the_simulation(folder: Path) -> None:
    rows = expected(4, AllReduce(2), Auto(), delay=1)
    torch.testing.assert_close(recorded(folder, 4), rows, rtol=1e-12, atol=1e-12)


@pytest.fixture
def islands(tmp_path: Path) -> Path:
    file = tmp_path / "islands.py"
    file.write_text(ISLANDS)
    return file


@needs_cluster
def test_lightning_starts_islands_of_two_processes_on_each_host(two: clusters.Cluster, islands: Path) -> None:
    finished([Script(islands, (two.host(i), "fork"), two.environment(i, port=29500)) for i in range(2)])
    assert_islands_equal_the_simulation(islands.parent)


@needs_cluster
def test_torchrun_starts_islands_of_two_processes_on_each_host(two: clusters.Cluster, islands: Path) -> None:
    """No name leads to an address in there, so torchrun is told both: its own, and whether the others meet with it."""
    folder = islands.parent
    launcher = folder / "torchrun.py"
    launcher.write_text(TORCHRUN)
    words = ["--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={two.address(0)}:29400"]
    here = [(f"--rdzv-conf=is_host={int(i == 0)}", f"--local-addr={two.address(i)}", "--no-python") for i in range(2)]
    worker = str(namespaces.stand_in(folder))
    hosts = [Script(launcher, (two.host(i), *words, *here[i], worker), two.environment(i, port=1)) for i in range(2)]
    ranks = namespaces.given(folder, 4)
    assert [ranks[i]["NODE_RANK"] for i in (0, 2)] == [ranks[i]["NODE_RANK"] for i in (1, 3)]
    finished([Script(islands, (two.host(int(rank["NODE_RANK"])), "popen"), rank) for rank in ranks])
    for rank in range(4):
        (folder / f"{rank}.code").write_text("0")
    finished(hosts)
    assert_islands_equal_the_simulation(folder)


@needs_cluster
def test_a_failing_host_ends_the_others(two: clusters.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "GRACE_SECONDS", 0.5)
    start = time.monotonic()
    codes = two.run(["sh", "-c", "test $NODE_RANK = 0 && exit 3; exec sleep 600"], seconds=300)
    assert codes[0] == 3
    assert codes[1] < 0, "ended by a signal"
    assert time.monotonic() - start < 200


@needs_cluster
def test_nothing_is_left_behind_by_a_failure() -> None:
    with pytest.raises(clusters.ClusterError, match="tc refuses the rate 'fast', give one like 200mbit"):
        clusters.Cluster(NAME, 2).up("fast")
    assert clusters.existing(NAME) == []
    with pytest.raises(KeyboardInterrupt), clusters.cluster(2, "50mbit", name=NAME):
        raise KeyboardInterrupt
    assert clusters.existing(NAME) == []


@needs_cluster
def test_what_a_killed_run_left_is_ended_and_removed() -> None:
    clusters.Cluster(NAME, 3).up("50mbit")
    orphan = subprocess.Popen(["ip", "netns", "exec", f"{NAME}-2", "sleep", "60"])
    while not clusters._ip("netns", "pids", f"{NAME}-2").strip():
        time.sleep(0.01)
    clusters.Cluster(NAME, 1).up("50mbit")
    assert orphan.wait(timeout=100) < 0
    assert sorted(clusters.existing(NAME)) == [f"{NAME}-0", f"{NAME}-switch"]
    assert clusters.find(NAME).hosts == 1
    assert clusters.main(["--name", NAME, "down"]) == 0
    assert clusters.existing(NAME) == []


@pytest.mark.parametrize(("broken", "message"), [
    ({"geteuid": lambda: 1000}, "need root, this is user 1000: run it with sudo"),
    ({"which": lambda tool: None if tool == "tc" else "/sbin/ip"}, "tc not found: install iproute2"),
])  # fmt: skip
def test_says_what_it_needs(broken: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", broken.get("which", lambda tool: f"/sbin/{tool}"))
    monkeypatch.setattr(os, "geteuid", broken.get("geteuid", lambda: 0))
    with pytest.raises(clusters.ClusterError, match=message):
        clusters.Cluster(NAME, 2).up("50mbit")


@needs_cluster
def test_a_namespace_of_a_run_killed_while_it_built_is_removed() -> None:
    clusters._ip("netns", "add", f"{NAME}-7")
    assert clusters.existing(NAME) == [f"{NAME}-7"]
    with clusters.cluster(1, "50mbit", name=NAME):
        assert sorted(clusters.existing(NAME)) == [f"{NAME}-0", f"{NAME}-switch"]
    assert clusters.existing(NAME) == []


@needs_cluster
@pytest.mark.parametrize(
    ("rate", "size"), [("10mbit", 2**14), ("50mbit", 2**14), ("200mbit", 2**15), ("400mbit", 2**16), ("1gbit", 2**17)]
)
def test_a_silent_link_saves_up_milliseconds(rate: str, size: int) -> None:
    assert clusters.burst_of(rate) == size


@pytest.mark.parametrize(("words", "message"), [
    (["run", "--", "true"], "is up: run `cluster.py up"),
    (["run"], "no command given"),
    (["up", "--hosts", "65"], "hosts must be from 1 to 64, got 65"),
    (["up", "--hosts", "1", "--rate", "fast"], "tc refuses the rate 'fast', give one like 200mbit or 1gbit"),
    (["up", "--hosts", "1", "--rate", "0mbit"], "tc refuses the rate '0mbit'"),
])  # fmt: skip
def test_one_line_errors(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert clusters.main(["--name", NAME, *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert clusters.existing(NAME) == []
