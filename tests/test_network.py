"""The network's profile in real processes on loopback, nodes simulated by LOCAL_WORLD_SIZE; hard kills."""

import os
import socket
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from lightning_decentral import profile as command
from lightning_decentral.hardware import Block, Cost, Model, Profile, read, write
from lightning_decentral.hosts import read as read_hosts
from lightning_decentral.network import OPERATIONS
from lightning_decentral.probes import probes
from lightning_decentral.transport import transport
from tests.world import world

MODEL = Model("recipe=vit", "cpu", (Block("all", 0.1, 0.2, 0.01, 400),))
SIZES = (1024, 65_536)


def measure(
    folder: Path, size: int, per_node: int, *words: str, seconds: float = 60.0, last: Sequence[str] = ()
) -> list[str]:
    """What each worker says, its exit status at the end; all are killed when the time is over.

    Args:
        last: more words of the last worker.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = torch.multiprocessing.get_context("fork")  # what is imported stays imported

    def worker(rank: int) -> None:
        there = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "COLUMNS": "160"})
        os.environ.update({name: str(value) for name, value in there.items()})
        os.chdir(folder)
        with open(f"{rank}.txt", "w") as file, redirect_stdout(file), redirect_stderr(file):
            command.main([*words, *(last if rank == size - 1 else ())])

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
    output, *others = measure(tmp_path, size, per_node, *words)
    assert output.endswith("\n0"), output
    assert others == ["0"] * (size - 1), "one worker speaks"
    found = read(tmp_path / "profile.json")
    assert (found.model, found.variation) == (MODEL, (1.0,)), "what was there stays"
    planned = [
        (name, p.reach, p.workers, len(p.groups), p.per_node) for p in probes(size, per_node) for name in OPERATIONS
    ]
    assert [(c.operation, c.reach, c.workers, c.flows, c.per_node) for c in found.network] == planned
    for cost in found.network:
        assert [bytes_ for bytes_, _ in cost.points] == list(SIZES)
        assert all(0 < seconds < 30 for _, seconds in cost.points)
        errors = [abs(cost.seconds(bytes_) / seconds - 1) for bytes_, seconds in cost.points]
        assert max(errors) == pytest.approx(cost.error, abs=1e-9)
    assert len(found.hosts) == 1 + size // per_node
    assert len(read_hosts(tmp_path / "hosts.json").hosts) == size // per_node
    assert "reduce_scatter" in output


def test_hosts_started_unlike_all_end_with_the_reason(tmp_path: Path) -> None:
    write(Profile(MODEL), tmp_path / "profile.json")
    words = ["--sizes", "1024", "--repeats", "1"]
    assert [said[-1] for said in measure(tmp_path, 2, 1, *words, seconds=20.0, last=["--repeats", "2"])] == ["1", "1"]
    assert read(tmp_path / "profile.json").network == ()


@pytest.mark.parametrize(
    ("words", "device", "per_node", "message"),
    [
        ([], "cpu", 2, "workers on the node: 2 on b, 4 on a: start equally many"),
        ([], "cuda", 4, "device for each: cuda on b, cpu on a"),
        (["--sizes", "9"], "cpu", 4, r"--sizes: \[9\] on b"),
        (["--longest-seconds", "1"], "cpu", 4, "--longest-seconds: 1.0 on b, 0.5 on a"),
        (["--hosts", "h.json"], "cpu", 4, "--hosts given: True on b, False on a: .* the same words"),
    ],
)
def test_the_unlike_host_is_named(words: list[str], device: str, per_node: int, message: str) -> None:
    def terms(words: list[str], device: str, per_node: int) -> dict[str, object]:
        return command.terms(command.parser().parse_args(words), torch.device(device), per_node)

    usual = terms([], "cpu", 4)
    command.refuse_unlike([("a", usual), ("b", usual)])
    with pytest.raises(ValueError, match=message):
        command.refuse_unlike([("a", usual), ("b", terms(words, device, per_node))])


def test_mistakes_are_one_line_before_anyone_waits() -> None:
    with pytest.raises(ValueError, match="RANK is not set: start it on every host with `torchrun"):
        command.place({})
    for words, message in ((["--sizes", "9", "5"], "ascending"), (["--repeats", "0"], "at least 1, got 0")):
        with pytest.raises(ValueError, match=message):
            command.refuse(command.parser().parse_args(words))


def test_a_missing_model_ends_worker_0_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=r"absent\.json can't be read .*: make one with `lightning-decentral profile`"):
        command.main(["--model", str(tmp_path / "absent.json")])
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit, match="error: a network needs at least 2 workers"):
        command.main([])


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


def test_hosts_of_one_name_are_told_apart() -> None:
    assert command.unique(["a", "b", "a", "a"]) == ["a", "b", "a-2", "a-3"]


def test_the_table_shows_every_line() -> None:
    table = command.shown([Cost("exchange", "between", 2, 1, 1e-3, 25e6, 0.02)])
    assert [column._cells for column in table.columns] == [
        ["exchange"],
        ["between"],
        ["2"],
        ["1"],
        ["1000"],
        ["25"],
        ["2%"],
    ]
