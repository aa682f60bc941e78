"""The network's profile in real processes on loopback, nodes simulated by LOCAL_WORLD_SIZE; hard kills."""

import dataclasses
import json
import os
import platform
import re
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from lightning_decentral.cli import network as command
from lightning_decentral.gossip import Exponential
from lightning_decentral.gossip.plan.topology.topology import step_graph
from lightning_decentral.planner.network import OPERATIONS, exchange, neighbours
from lightning_decentral.planner.plan.host_links import read as read_hosts
from lightning_decentral.planner.plan.probes import Start, probes, refuse_starts
from lightning_decentral.shared.plan.profile import BlockCost, LinkCost, Model, Profile, read, write
from lightning_decentral.shared.wire.pending import Pending
from lightning_decentral.shared.wire.transport import GlooTransport, Message, transport
from tests import ports
from tests.world import world

MODEL = Model("recipe=vit", "cpu", (BlockCost("all", 0.1, 0.2, 0.01, 400),))
SIZES = (1024, 65_536)


def measure(
    folder: Path, size: int, per_node: int, *words: str, odd: Sequence[str] = (), seconds: float = 60.0
) -> list[str]:
    """What each worker says, its exit status at the end; all are killed when the time is over.

    Args:
        odd: words that only the last worker gets; `NAME=value` is its environment.
    """
    port = ports.free()
    context = torch.multiprocessing.get_context("fork")  # what is imported stays imported

    def worker(rank: int) -> None:
        there = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "COLUMNS": "160"})
        os.environ.update({name: str(value) for name, value in there.items()})
        own = odd if rank == size - 1 else ()
        os.environ.update(word.split("=") for word in own if "=" in word)
        os.chdir(folder)
        with open(f"{rank}.txt", "w") as file, redirect_stdout(file):
            try:
                command.main([*words, *(word for word in own if "=" not in word)])
            except SystemExit as error:
                print(error)
                raise

    processes = [context.Process(target=worker, args=(rank,), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    end = time.monotonic() + seconds
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [f"{(folder / f'{rank}.txt').read_text()}{process.exitcode}" for rank, process in enumerate(processes)]


@pytest.mark.parametrize(("size", "per_node"), [(2, 1), (4, 2)])
def test_the_profile_gets_a_network(tmp_path: Path, size: int, per_node: int) -> None:
    write(Profile(MODEL, (), (1.0,), {"there": "cpu"}), tmp_path / "profile.json")
    words = ["--sizes", *map(str, SIZES), "--repeats", "2", "--hosts", "hosts.json"]
    output, *others = measure(tmp_path, size, per_node, *words, *(["--json"] if size == 2 else []))
    assert output.endswith("\n0"), output
    if size == 2:
        answered = json.loads(output.removesuffix("\n0"))
        assert [cost["operation"] for cost in answered["network"]][:2] == list(OPERATIONS)[:2]
    assert others == ["0"] * (size - 1), "one worker speaks"
    found = read(tmp_path / "profile.json")
    assert (found.model, found.variation) == (MODEL, (1.0,)), "what was there stays"
    planned = [
        (name, p.reach, p.workers, len(p.groups), p.per_node, peers)
        for p in probes(size, per_node)
        for name in OPERATIONS
        for peers in (neighbours(p.workers) if name == "exchange" else [1])
    ]
    assert [(c.operation, c.reach, c.workers, c.flows, c.per_node, c.peers) for c in found.network] == planned
    for cost in found.network:
        assert [bytes_ for bytes_, _ in cost.points] == list(SIZES)
        assert all(0 < seconds < 30 for _, seconds in cost.points)
        errors = [abs(cost.seconds(bytes_) / seconds - 1) for bytes_, seconds in cost.points]
        assert max(errors) == pytest.approx(cost.error, abs=1e-9)
    assert len(found.hosts) == 1 + size // per_node
    assert len(read_hosts(tmp_path / "hosts.json").hosts) == size // per_node
    assert "reduce_scatter" in output


def test_mistakes_are_one_line_before_anyone_waits() -> None:
    remedy = r"RANK is not set: start it on every host with `torchrun .* -m lightning_decentral\.cli\.network`"
    with pytest.raises(ValueError, match=remedy):
        command.place({})
    for words, message in ((["--sizes", "9", "5"], "ascending"), (["--repeats", "0"], "at least 1, got 0")):
        assert message in command.mistake(command.parser().parse_args(words), rank=1)


@pytest.mark.sampled
@pytest.mark.parametrize(("per_node", "odd", "message"), [
    (2, ["LOCAL_WORLD_SIZE=1"], "workers of a node: 2 for worker 0 on .*, 1 for worker 3 on .*: start equally many"),
    (1, ["--hosts", "h.json"], "--hosts given: False for worker 0 on .*, True for worker 3 on .*: .* same options"),
    (1, ["--sizes", "9", "5"], r"worker 3 on .*: sizes must be ascending numbers of bytes, got \[9, 5\]"),
    (3, [], "4 workers don't divide into nodes of 3: start equally many on each node"),
])  # fmt: skip
def test_hosts_started_otherwise_are_told_on_all(tmp_path: Path, per_node: int, odd: list[str], message: str) -> None:
    write(Profile(MODEL, (), (1.0,), {}), tmp_path / "profile.json")
    said = measure(tmp_path, 4, per_node, odd=odd)
    assert len(set(said)) == 1, said
    assert re.fullmatch(f"error: .*{message}.*\n1", said[0]), said[0]


ALIKE = Start("a", "", 2, "cuda", SIZES, 5, 0.5, False)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Start) if f.name not in ("host", "mistake")])
def test_every_difference_is_refused(field: str) -> None:
    refuse_starts([ALIKE, dataclasses.replace(ALIKE, host="b")])
    odd = dataclasses.replace(ALIKE, **{"host": "b", field: "other"})
    for starts in ([ALIKE, ALIKE, odd], [odd, ALIKE]):
        with pytest.raises(ValueError, match=r"other for worker \d on b"):
            refuse_starts(starts)


def test_a_missing_model_ends_all_workers_and_names_the_host(tmp_path: Path) -> None:
    said = measure(tmp_path, 2, 1, "--model", "absent.json")
    remedy = "make one with `lightning-decentral profile`, or copy it to this host"
    where = f"worker 0 on {re.escape(platform.node())}"
    assert len(set(said)) == 1, said
    assert re.fullmatch(rf"error: {where}: absent\.json can't be read .*: {remedy}\n1", said[0]), said[0]


def test_one_worker_has_no_network(tmp_path: Path) -> None:
    write(Profile(MODEL, (), (1.0,), {}), tmp_path / "profile.json")
    assert measure(tmp_path, 1, 1)[0].startswith("error: a network needs at least 2 workers")


@pytest.mark.threads
def test_operations_do_what_they_are_called() -> None:
    """Each twice; reduce_scatter of ones, by hand."""

    def worker(group: object) -> torch.Tensor:
        over = transport(group, torch.device("cpu"))
        for operation in OPERATIONS.values():
            call = operation(over, 999, torch.device("cpu"))
            call()
            call()
        part = torch.empty(2)
        over.reduce_scatter(part, torch.arange(6.0) + over.rank).wait()
        return part

    parts = world(3, worker)
    assert torch.equal(torch.cat(parts), 3 * torch.arange(6.0) + 3)


@pytest.mark.parametrize(("workers", "found"), [(2, [1]), (3, [1, 2]), (4, [1, 2]), (8, [1, 2, 3]), (9, [1, 2, 4])])
def test_exchanges_are_with_one_two_and_as_many_as_an_exponential_graph_has(workers: int, found: list[int]) -> None:
    assert neighbours(workers) == found
    assert neighbours(workers)[-1] == step_graph(Exponential(), workers, 0).degree


class Listed(GlooTransport):
    """Of worker 1 of 5, on no network: lists what it was asked for."""

    def __init__(self) -> None:
        self.rank, self.size = 1, 5
        self.asked: list[tuple[int, int]] = []

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> tuple[list[Pending], list[Pending]]:
        self.asked += [(m.peer, m.tensor.nbytes) for m in (*sends, *receives)]
        return [], []


def test_an_exchange_with_several_sends_as_many_bytes_as_with_one() -> None:
    over = Listed()
    exchange(over, 1200, torch.device("cpu"), peers=3)()
    assert over.asked == [(peer, 400) for peer in (2, 3, 0, 0, 4, 2)]


def test_hosts_of_one_name_are_told_apart() -> None:
    assert command.unique(["a", "b", "a", "a"]) == ["a", "b", "a-2", "a-3"]


def test_the_table_shows_every_line() -> None:
    table = command.shown([LinkCost("exchange", "between", 2, 1, 1e-3, 25e6, 0.02)])
    assert [column._cells for column in table.columns] == [
        ["exchange"],
        ["between"],
        ["2"],
        ["1"],
        ["1"],
        ["1000"],
        ["25"],
        ["2%"],
    ]
