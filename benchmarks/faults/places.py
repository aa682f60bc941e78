"""Around the workers: strangers at their ports, a sweep and its socket, and input that is wrong from the start."""

import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer
from omegaconf import DictConfig

from faults.kinds import slow
from faults.row import Place, Row
from faults.runs import CORRUPT, GOES_ON, HANGS, LINE, TRACEBACK, Outcome, Run, differs, judged, unsound
from faults.worker import METHODS, Worker, meeting
from lightning_decentral import gossip, pipeline
from lightning_decentral.recipes import command
from lightning_decentral.recipes import train as recipe
from lightning_decentral.sweep.wire.client import VARIABLE

NOISE = [
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    b"\0" * 64,
    b"\xff" * 4096,
    b"\x16\x03\x01\x02\x00\x01\x00",  # the beginning of TLS
    b"",
    random.Random(0).randbytes(5000),
]

# ---- ports -----------------------------------------------------------------------------------------------------------


def _squatted(answer: bytes) -> Callable[[Place], Outcome]:
    """A program of another kind has the port before the run begins; it says nothing, or this."""

    def run(place: Place) -> Outcome:
        with socket.create_server(("", place.port)) as squatter:
            squatter.setblocking(False)
            started, kept = place.train("run"), []

            def serve(_: float) -> None:
                with suppress(OSError):
                    connection, _address = squatter.accept()
                    connection.sendall(answer)
                    kept.append(connection)

            started.wait(aside=serve)
            return judged(started, (), lambda: "it trained over a stranger's port")

    return run


def _second_job(first: bool) -> Callable[[Place], Outcome]:
    """Two jobs meet at one port; how the first, or the second, ends."""

    def run(place: Place) -> Outcome:
        one = place.train("first", slow(0.2))
        one.wait_for(lambda: "All distributed processes registered" in one.processes[0].printed)
        two = place.train("second")
        two.wait()
        one.wait()
        if first:
            return judged(one, (), lambda: differs(one.folder, place.whole("gossip")))
        return judged(two, (), lambda: "two jobs trained at one port")

    return run


def _stray(place: Place) -> Outcome:
    """A worker of a job with two nodes comes to one of a single node."""
    started = place.train("run", slow(0.1))
    stray = Worker("gossip", 2, 2, place.folder / "stray", trainer={"num_nodes": 2})
    there = {"NODE_RANK": "1", "WORLD_SIZE": "4"}
    process = started.start(stray.train, {**meeting(0, 2, place.port), **there})
    started.wait((2,))
    if not process.said.get("meant"):
        return Outcome(TRACEBACK, f"the stray: {process.said.get('text')}")
    return judged(started, (2,), lambda: differs(started.folder, place.whole("gossip")))


def ports_of(pids: set[int]) -> set[int]:
    """Return the ports on which these processes listen."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                sockets.add(os.readlink(descriptor))
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {
        int(part[1].rpartition(":")[2], 16) for part in lines if part[3] == "0A" and f"socket:[{part[9]}]" in sockets
    }


def _noise(at_data: bool) -> Callable[[Place], Outcome]:
    """Strangers connect again and again, to the store's port or to those of messages, and say anything."""

    def run(place: Place) -> Outcome:
        started, open_ends, said = place.train("run", slow(0.1)), [], 0

        def disturb(_: float) -> None:
            nonlocal said
            found = ports_of({process.pid for process in started.processes})
            for port in (found - {place.port}) if at_data else (found & {place.port}):
                with suppress(OSError):
                    end = socket.create_connection(("127.0.0.1", port), timeout=0.1)
                    end.sendall(NOISE[said % len(NOISE)])
                    open_ends.append(end)
                    said += 1
            if len(open_ends) > 50:
                open_ends.pop(0).close()

        started.wait(aside=disturb)
        check = lambda: differs(started.folder, place.whole("gossip")) if said else "nobody listened"  # noqa: E731
        return judged(started, (), check)

    return run


def at_ports() -> Iterator[Row]:
    yield Row("ports", "a program listens there and says nothing", "gossip", (LINE,), _squatted(b""))
    answer = b"HTTP/1.1 400 Bad Request\r\n\r\n"
    yield Row("ports", "a web server listens there", "gossip", (LINE,), _squatted(answer))
    yield Row("ports", "a second job: the first one's end", "gossip", (GOES_ON,), _second_job(True))
    yield Row("ports", "a second job: the second one's end", "gossip", (LINE,), _second_job(False))
    yield Row("ports", "a worker of a job with other nodes", "gossip", (GOES_ON,), _stray)
    yield Row("ports", "garbage at the store's port", "gossip", (GOES_ON,), _noise(False))
    yield Row("ports", "garbage at the ports of messages", "gossip", (GOES_ON,), _noise(True))


# ---- sweeps ----------------------------------------------------------------------------------------------------------

CONFIG = {"lr": 0.1, "hydra": {"sweep": {"dir": "sweep", "subdir": "${hydra:job.num}"}, "job": {"name": "faults"}}}
ConfigStore.instance().store(name="faults", node=CONFIG)


def _member(cfg: DictConfig) -> float:
    """Trains for a second, and leaves behind how it finds its sweep."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    (folder / "admission").write_text(json.dumps({**json.loads(os.environ[VARIABLE]), "pid": os.getpid()}))
    kind = METHODS["gossip"]
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(**quiet, devices=1, max_epochs=3, enable_checkpointing=False)
    from faults.worker import Batches

    module = kind.module(learning_rate=cfg.lr)
    trainer.fit(
        module, *(Batches(make, 0, length, int) for make, length in ((_slowly(kind.batch), 8), (kind.batch, 1)))
    )
    return float(trainer.callback_metrics["val_loss"])


def _slowly(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def batch(generator: Any) -> Any:
        time.sleep(0.05)
        return make(generator)

    return batch


def _sweep(folder: Path) -> None:
    os.chdir(folder)
    os.environ["HYDRA_MAIN_MODULE"] = recipe.__name__  # Hydra looks for configurations beside it, and needs a package
    tempfile.tempdir = str(folder)  # what a sweep leaves behind would be here
    sys.argv = ["faults", "-m", "hydra/launcher=shard_parallel", "lr=0.1,0.01"]
    hydra.main(version_base="1.3", config_path=None, config_name="faults")(_member)()


def _admitted(place: Place) -> list[dict[str, Any]]:
    files = [file for file in place.folder.glob("sweep/*/admission") if file.stat().st_size]
    return [json.loads(file.read_text()) for file in files]


def _sweep_in_noise(place: Place) -> Outcome:
    run = Run(place.folder, place.seconds)
    run.start(partial(_sweep, place.folder), {})
    run.wait_for(lambda: len(_admitted(place)) == 2)
    address = _admitted(place)[0]["socket"]
    said = [*NOISE, b"{}\n", b"[]\n", b"7\n", b'{"say": 1}\n', b'{"say": "request"}\n', b'{"say": "hello"}\n']
    said += [
        b'{"say": "hello", "member": "x"}\n',
        b'{"say": "hello", "member": "0"}\n',
        b"x" * 3_000_000,
        b'{"say": "he',
    ]
    kept, left = [], list(said)

    def disturb(_: float) -> None:
        if left:
            end = socket.socket(socket.AF_UNIX)
            end.settimeout(0.2)
            with suppress(OSError):
                end.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
                end.sendall(left.pop(0))
                kept.append(end)

    run.wait(aside=disturb)
    return judged(run, (), lambda: _ranking(place) or (f"{len(left)} were never heard" if left else None))


def _ranking(place: Place) -> str | None:
    path = place.folder / "sweep" / "ranking.csv"
    if not path.exists():
        return "there is no ranking"
    rows = path.read_text().splitlines()[1:]
    return None if len(rows) == 2 and all("completed" in row for row in rows) else f"ranking: {rows}"


def _sweep_killed(place: Place) -> Outcome:
    run = Run(place.folder, place.seconds)
    sweep = run.start(partial(_sweep, place.folder), {})
    run.wait_for(lambda: len(_admitted(place)) == 2)
    os.kill(sweep.pid, signal.SIGKILL)
    pids = [admitted["pid"] for admitted in _admitted(place)]
    gone = run.wait_for(lambda: not any(_alive(pid) for pid in pids))
    time.sleep(0.5)
    left = [path.name for path in place.folder.glob("sweep-*")]
    run.wait((0,))
    if not gone:
        return Outcome(HANGS, "members outlive the sweep")
    return Outcome(TRACEBACK, f"left behind: {left}") if left else Outcome(GOES_ON, "members end with it")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def at_sweeps() -> Iterator[Row]:
    yield Row("sweeps", "garbage at its socket", "sweep", (GOES_ON,), _sweep_in_noise)
    yield Row("sweeps", "killed", "sweep", (GOES_ON,), _sweep_killed)


# ---- input -----------------------------------------------------------------------------------------------------------


def _train(*words: str) -> None:
    sys.argv = ["lightning-decentral-train", *words]
    recipe.main()


WRONG: dict[str, Callable[[], object]] = {
    "GossipStrategy(topology=gossip.Ring), without brackets": lambda: gossip.GossipStrategy(topology=gossip.Ring),
    "GossipStrategy(delay=1.5)": lambda: gossip.GossipStrategy(delay=1.5),
    "GossipStrategy(timeout=30)": lambda: gossip.GossipStrategy(timeout=30),
    "GossipStrategy(dely=1)": lambda: gossip.GossipStrategy(dely=1),
    "TokenPipelineStrategy(slicing=3)": lambda: pipeline.TokenPipelineStrategy(slicing=3),
    "train optimizer.lr=fast": lambda: _train("recipe=vit", "optimizer.lr=fast"),
    "train trainer.max_epochs=abc": lambda: _train("recipe=vit", "trainer.max_epochs=abc"),
    "train strategy=coffee": lambda: _train("recipe=vit", "strategy=coffee"),
    "topology coffee --workers 4": lambda: command.main(["topology", "coffee", "--workers", "4"]),
    "topology ring --workers 0": lambda: command.main(["topology", "ring", "--workers", "0"]),
}


def _wrong(act: Callable[[], object]) -> Callable[[Place], Outcome]:
    def run(place: Place) -> Outcome:
        started = Run(place.folder, place.seconds)
        started.start(lambda: (os.chdir(place.folder), act())[0], {})
        started.wait()
        return judged(started, (), lambda: "it was taken, and nothing was said")

    return run


def rows() -> Iterator[Row]:
    yield from at_ports()
    yield from at_sweeps()
    for fault, act in WRONG.items():
        yield Row("input", fault, "command" if fault[0].islower() else "python", (LINE,), _wrong(act))


__all__ = ["CORRUPT", "unsound"]
