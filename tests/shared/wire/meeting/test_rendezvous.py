"""The first meeting in real processes: who is missing, who has the port, whose port it is."""

import os
import re
import signal
import socket
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest

from lightning_decentral.shared.wire.meeting import rendezvous
from lightning_decentral.shared.wire.meeting.rendezvous import TOKEN, Meeting
from tests import ports
from tests.crew import Outcome, crew

TIMEOUT = timedelta(seconds=1)


def meet(size: int, layout: tuple[int, int] = (1, 3), timeout: timedelta = TIMEOUT) -> str:
    """What a worker reads of another's word."""
    rendezvous.LINGER_SECONDS = 0.5
    rank, port = int(os.environ["LOCAL_RANK"]), int(os.environ["MASTER_PORT"])
    store = Meeting("127.0.0.1", port, rank, size, timeout, hosted=False, layout=layout).store()
    store.set(f"word/{rank}", f"of {rank}")
    word: str = store.get(f"word/{(rank + 1) % size}").decode()
    store.set(f"read/{rank}", "yes")
    store.wait([f"read/{other}" for other in range(size)])
    time.sleep(0.3)  # worker 0 has the store
    return word


def meet_late(size: int) -> str:
    """As `meet`; the last one comes late, unless LATE is 0."""
    rendezvous.SLOW_SECONDS = 0.5
    if int(os.environ["LOCAL_RANK"]) == size - 1:
        time.sleep(float(os.environ["LATE"]))
    return meet(size, timeout=timedelta(seconds=20))


@pytest.mark.parametrize("late", [0.0, 2.0])
def test_a_long_wait_says_for_whom_and_where(late: float) -> None:
    outcomes = crew(3, meet_late, 3, environment={"LATE": str(late)})
    line = r"lightning_decentral: waiting for 1 of 3 workers at 127.0.0.1:\d+: worker 2\n"
    found = [len(re.findall(line, outcome.output)) for outcome in outcomes]
    assert found == [int(late > 0), 0, 0]


def meet_killed(size: int) -> str:
    rendezvous.SLOW_SECONDS = 0.5
    if int(os.environ["LOCAL_RANK"]) == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return meet(size, (3, 1), timeout=timedelta(seconds=2))


def test_where_the_first_worker_was_killed_each_node_says_that_it_waits_for_it() -> None:
    for outcome in crew(3, meet_killed, 3)[1:]:
        assert re.search(r"lightning_decentral: waiting for worker 0 at 127.0.0.1:\d+\n", outcome.output)


def said(outcomes: list[Outcome]) -> list[str]:
    return [outcome.value or outcome.error for outcome in outcomes]


@pytest.mark.parametrize("environment", [{}, {TOKEN: "a secret"}], ids=["open", "closed"])
def test_all_meet(environment: dict[str, str]) -> None:
    assert said(crew(3, meet, 3, environment=environment)) == ["of 1", "of 2", "of 0"]


@pytest.mark.parametrize("absent", [0, 1])
def test_who_is_missing_is_said_in_time(absent: int) -> None:
    outcomes = [o for rank, o in enumerate(crew(3, meet, 3, absent=(absent,))) if rank != absent]
    waited = r"waited .*at .* for worker 1: not started"
    line = waited if absent else r"reached no store at 127.0.0.1:\d+: worker 0"
    for outcome in outcomes:
        assert outcome.error.startswith("MeetingFailed: worker")
        assert re.search(line, outcome.error), outcome
        assert outcome.seconds < 60


def test_a_program_that_has_the_port_is_no_store() -> None:
    """It takes connections and says nothing, which keeps torch's own store waiting for ever."""
    port = ports.free()
    with closing(socket.create_server(("127.0.0.1", port))):
        first, second = crew(2, meet, 2, environment={"MASTER_PORT": str(port)}, seconds=15)
    assert f"worker 0 can't listen at 127.0.0.1:{port}: another program or training has the port" in first.error
    assert f"worker 1 reached no store at 127.0.0.1:{port}" in second.error


def test_another_jobs_worker_at_the_same_port_is_told_so() -> None:
    outcomes = crew(3, meet, 3, own={2: {"LOCAL_RANK": "1"}})
    assert sum("a worker 1 is at" in o.error and "another job meets at this port" in o.error for o in outcomes) == 1
    assert "waited 1 s" in outcomes[0].error
    assert "for worker 2" in outcomes[0].error


@pytest.mark.sampled
@pytest.mark.parametrize("first", ["a", ""], ids=["another token", "no token"])
def test_a_job_with_another_token_is_another_job(first: str) -> None:
    one, other = crew(2, meet, 2, own={0: {TOKEN: first}, 1: {TOKEN: "b"}})
    assert "worker 1 found another job at" in other.error
    assert "for worker 1" in one.error


def meet_as_told() -> str:
    """A node's worker, by what that node was told: its place in the world follows from it."""
    nodes, devices = (int(os.environ[name]) for name in ("NODES", "DEVICES"))
    os.environ["LOCAL_RANK"] = str(int(os.environ["NODE_RANK"]) * devices + int(os.environ["LOCAL_RANK"]))
    time.sleep(float(os.environ["LATE"]) * int(os.environ["NODE_RANK"]))
    # Who comes late has more time left than a busy machine takes to start it.
    return meet(nodes * devices, (nodes, devices), timedelta(seconds=4))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("first", "second", "late"),
    [((2, 2), (2, 3), 0), ((2, 2), (2, 1), 2.5), ((2, 1), (3, 2), 0)],
    ids=["more devices", "fewer, and just before the end", "more nodes"],
)
def test_nodes_that_were_told_other_numbers_of_devices_or_nodes_all_say_so(
    first: tuple[int, int], second: tuple[int, int], late: float
) -> None:
    """Their ranks overlap or leave gaps: to wait for them, or to take them for another job's, would mislead."""
    places = [(0, local) for local in range(first[1])] + [(1, local) for local in range(second[1])]
    told = {0: first, 1: second}
    own = {
        index: {
            "NODE_RANK": str(node),
            "LOCAL_RANK": str(local),
            "NODES": str(told[node][0]),
            "DEVICES": str(told[node][1]),
            "LATE": str(late),
        }
        for index, (node, local) in enumerate(places)
    }
    outcomes = crew(len(places), meet_as_told, own=own)
    line = rf"ValueError: worker \d has num_nodes={second[0]}, devices={second[1]}, worker 0 has num_nodes={first[0]}, "
    for outcome in outcomes:
        assert re.fullmatch(rf"{line}devices={first[1]}: give every worker the same, .*", outcome.error), outcome
        assert outcome.seconds < 60
    assert len({outcome.error for outcome in outcomes}) == 1


def meet_beside_a_stray(stray: str, came: Path, ended: Path) -> str:
    """Worker 2 is another job's, which has other nodes and devices; worker 1 comes after it, and both see it end."""
    rank, patience = int(os.environ["LOCAL_RANK"]), timedelta(seconds=60)
    if rank == 2:
        os.environ["LOCAL_RANK"] = stray
        reach = Meeting._reach
        with patch.object(Meeting, "_reach", lambda meeting: (reach(meeting), came.touch())[0]):
            try:
                return meet(4, (2, 2), patience)
            finally:
                ended.touch()
    if rank == 1:
        wait_for(came)
        time.sleep(0.3)
    word = meet(2, (1, 2), patience)
    wait_for(ended)
    return word


def wait_for(file: Path) -> None:
    end = time.monotonic() + 60
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.05)


@pytest.mark.parametrize("stray", ["1", "3"], ids=["a rank of ours", "a rank of its own"])
def test_a_stray_worker_with_another_layout_ends_alone(tmp_path: Path, stray: str) -> None:
    first, second, third = crew(3, meet_beside_a_stray, stray, tmp_path / "came", tmp_path / "ended")
    assert said([first, second]) == ["of 1", "of 0"]
    assert third.error.startswith(f"ValueError: worker {stray} has num_nodes=2, devices=2, worker 0 has num_nodes=1, ")
    assert third.error.endswith("every job a MASTER_PORT of its own")


@pytest.mark.parametrize(("port", "rank", "said"), [
    (0, 0, "MASTER_PORT must be from 1 to 65535, got 0"),
    (70000, 0, "MASTER_PORT must be from 1 to 65535, got 70000"),
    (29500, 2, "there is no worker 2 among 2"),
    (29500, -1, "there is no worker -1 among 2"),
])  # fmt: skip
def test_a_place_that_cannot_be_is_refused(port: int, rank: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Meeting("127.0.0.1", port, rank, 2, TIMEOUT, hosted=False, layout=(1, 2))


def test_an_address_that_nobody_knows_is_said_in_one_line() -> None:
    place = Meeting("no.such.host.invalid", ports.free(), 0, 2, TIMEOUT, hosted=False, layout=(1, 2))
    with pytest.raises(rendezvous.MeetingFailed, match=r"worker 0 knows no address no.such.host.invalid \("):
        place.store()


def test_only_the_address_asked_for_reaches_the_store() -> None:
    """torch's own store listens on all of a machine's addresses."""
    place = Meeting("127.0.0.1", ports.free(), 0, 2, TIMEOUT, hosted=False, layout=(1, 2))
    with closing(socket.socket(fileno=place._listen())) as listening:
        assert listening.getsockname() == ("127.0.0.1", place.port)
        rows = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert f"0100007F:{place.port:04X}" in rows
        assert f"00000000:{place.port:04X}" not in rows


@pytest.mark.parametrize(("address", "nodes"), [("127.0.0.1", 2), ("192.0.2.1", 1)])
def test_an_address_that_others_cant_use_or_this_machine_hasnt_is_listened_for_everywhere(
    address: str, nodes: int
) -> None:
    place = Meeting(address, ports.free(), 0, 2, TIMEOUT, hosted=False, layout=(nodes, 2))
    with closing(socket.socket(fileno=place._listen())) as listening:
        assert listening.getsockname() == ("0.0.0.0", place.port)
