"""Environments that place workers as they like, each with a device to itself, as an actor pool does: the numbers of
workers and hosts are theirs, and training is bit for bit that of workers that Lightning counts itself."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

import lightning_decentral
from lightning_decentral import GossipStrategy, SpilledStrategy
from lightning_decentral.gossip.fabric import FabricGossipStrategy
from tests.crew import crew
from tests.pipeline.training import Language
from tests.processes.ray_training import STRATEGIES
from tests.tiny import QUIET, Net, SizedBatches

Hosts = tuple[int, ...]  # workers of each host


class Pool(ClusterEnvironment):
    """A user's own: whoever started the processes has numbered them."""

    creates_processes_externally = True
    main_address = property(lambda self: os.environ["MASTER_ADDR"])
    main_port = property(lambda self: int(os.environ["MASTER_PORT"]))

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    def node_rank(self) -> int:
        return int(os.environ["NODE_RANK"])

    def set_world_size(self, size: int) -> None: ...

    def set_global_rank(self, rank: int) -> None: ...


def places(hosts: Hosts) -> dict[int, dict[str, str]]:
    found = [(host, local, size) for host, size in enumerate(hosts) for local in range(size)]
    return {
        rank: {"RANK": str(rank), "NODE_RANK": str(host), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(size)}
        for rank, (host, local, size) in enumerate(found)
    }


def fit(name: str, options: dict[str, Any]) -> tuple[list[Tensor], tuple[Any, ...]]:
    module, strategy = Language(), STRATEGIES[name]()
    trainer = Trainer(**QUIET, strategy=strategy, max_epochs=2, **options)
    trainer.fit(module)
    replicas = strategy.distributed_sampler_kwargs["num_replicas"]
    layout = (trainer.num_nodes, strategy.num_processes, trainer.world_size, replicas)
    return [p.detach().clone() for p in module.parameters()], layout


@pytest.mark.sampled
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hosts", [(2,), (2, 2)])
def test_training_is_that_of_workers_that_lightning_counts(strategy: str, hosts: Hosts) -> None:
    size, own = sum(hosts), places(hosts)
    counted = crew(size, fit, strategy, {"devices": hosts[0], "num_nodes": len(hosts)}, own=own)
    placed = crew(size, fit, strategy, {"devices": 1, "plugins": [Pool()]}, own=own)
    for one, other in zip(counted, placed, strict=True):
        assert not one.error + other.error, one.output + other.output
        assert one.value[1] == other.value[1]
        assert all(torch.equal(a, b) for a, b in zip(one.value[0], other.value[0], strict=True))


@pytest.mark.parametrize(("hosts", "nodes"), [((2, 1, 1), 4), ((3, 1), 4), ((1, 1), 2)])
def test_where_hosts_differ_every_worker_counts_as_one(hosts: Hosts, nodes: int) -> None:
    for worker in crew(sum(hosts), fit, "gossip", {"devices": 1, "plugins": [Pool()]}, own=places(hosts)):
        assert not worker.error, worker.output
        assert worker.value[1] == (nodes, 1, sum(hosts), sum(hosts))


def test_without_numbers_of_hosts_those_of_the_trainer_count() -> None:
    own = {rank: {**one, "LOCAL_WORLD_SIZE": "0"} for rank, one in places((2, 2)).items()}
    for worker in crew(4, fit, "compressed", {"devices": 1, "num_nodes": 2, "plugins": [Pool()]}, own=own):
        assert worker.value[1][:2] == (2, 2), worker.output


def loop(options: dict[str, Any]) -> tuple[list[Tensor], int]:
    fabric = Fabric(accelerator="cpu", strategy=FabricGossipStrategy(), **options)
    fabric.launch()
    torch.manual_seed(0)
    module, optimizer = fabric.setup(model := Net(dropout=0.0), torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in SizedBatches(4):
        optimizer.zero_grad()
        fabric.backward(torch.nn.functional.cross_entropy(module(batch[0]), batch[1]))
        optimizer.step()
    fabric.strategy.finish()  # type: ignore[attr-defined]
    return [p.detach().clone() for p in model.parameters()], fabric.strategy.num_nodes  # type: ignore[attr-defined]


def test_a_fabric_loop_too() -> None:
    own = places((1, 1))
    counted = crew(2, loop, {"devices": 1, "num_nodes": 2}, own=own)
    placed = crew(2, loop, {"devices": 1, "plugins": [Pool()]}, own=own)
    for one, other in zip(counted, placed, strict=True):
        assert not one.error + other.error, one.output + other.output
        assert one.value[1] == other.value[1] == 2
        assert all(torch.equal(a, b) for a, b in zip(one.value[0], other.value[0], strict=True))


@pytest.mark.parametrize(("named", "expected"), [("cuda:2", "cuda:2"), ("cpu", "cuda:0"), (None, "cuda:0")])
def test_the_environment_names_the_device(named: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the variable that Accelerate reads, too; one of another kind is no device of this Trainer."""
    for name, value in {**places((4,))[1], "WORLD_SIZE": "4", "ACCELERATE_TORCH_DEVICE": named}.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    strategy = GossipStrategy(parallel_devices=[torch.device("cuda:0")], cluster_environment=Pool())
    strategy._configure_launcher()
    assert strategy.root_device == torch.device(expected)
    assert (strategy.num_nodes, strategy.num_processes) == (1, 4)


def test_they_are_ray_s_kind_of_strategy_and_spilled_stays_none() -> None:
    """For `prepare_trainer`. A virtual base's own bases count, too: Lightning would take `spilled` for distributed."""

    class RayDDPStrategy(DDPStrategy): ...

    lightning_decentral._prepare(SimpleNamespace(RayDDPStrategy=RayDDPStrategy))  # type: ignore[arg-type]
    assert all(isinstance(make(), RayDDPStrategy) for make in STRATEGIES.values())
    assert not isinstance(SpilledStrategy(), DDPStrategy)


def spill() -> None:
    torch.distributed.init_process_group("gloo", rank=int(os.environ["RANK"]))
    Trainer(**QUIET, strategy=SpilledStrategy(), devices=1, max_steps=1).fit(Net())


def test_spilled_is_refused_in_a_group_of_workers() -> None:
    for worker in crew(2, spill, own=places((2,))):
        assert "trains on one device, and this process has joined 2 workers: start one" in worker.error
