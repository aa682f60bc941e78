"""What a long elastic run's workers and lobby keep: hours of faults in one real run, compressed into minutes.

    python benchmarks/elastic.py aging                  # 240 kills, as 60 an hour have in four: some 15 minutes
    python benchmarks/elastic.py aging --kills 8        # a minute

Workers are killed by SIGKILL and replaced, one after another; the `spared` one lives through all of it. Of ten faults
one is two kills at once, one kills a newcomer while it is healed, and one stops a worker for longer than `dead_after`,
which ends by itself as it goes on. Workers validate, save checkpoints and log. By the spared worker's steps, and by
joins:

    memory, threads, descriptors, pace   the spared worker's resident MiB, threads, open files, seconds of a step
    lobby                                the lobby's resident MiB, threads and open files
    given, joined                        bytes that a newcomer is given; seconds from the kill to its first step

Each must be in the last quarter what it was in the second one: in the first what is bounded fills. rc 1 otherwise.
"""

import argparse
import faulthandler
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from common.paths import RESULTS

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from common.hardware import description, slug
from elastic.aged import Row, compared, faults_of, joined
from elastic.run import Here, Run, lines
from elastic.worker import BATCH, HELD_OUT, Job, Student, Tell, begin, examples
from lightning_decentral.elastic.wire import joining as healed
from lightning_decentral.shared.wire.plain import pack

SPARED = "w1"
"""Not the first one, which is the oldest and logs: that is killed, too."""
EVERY, BEFORE_THE_END = 25, 100
"""Steps between two looks; and from the last fault to the end."""
KINDS = ("one",) * 7 + ("two", "healing", "stopped")


# ---- a worker -------------------------------------------------------------------------------------------------------


class Validated(Student):
    """The loss is logged, and the mean validated."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        found = self.loss(batch[0])
        self.log("loss", found)
        return found

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0]), sync_dist=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(examples(3, HELD_OUT // 8)), BATCH * 4)


class Ages(Callback):
    """Tells of a step now and then what this process holds, and ends where all do."""

    def __init__(self, job: Job, tell: Tell) -> None:
        self._job, self._tell, self._first = job, tell, True

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(self._job.sleep)
        step = trainer.global_step
        if self._first or step % EVERY == 0:
            self._first = False
            self._tell.tell("age", step=step, loss=float(outputs["loss"]), **held(os.getpid()))
            over = self._job.folder / "over"
            trainer.should_stop = over.exists() and step >= int(over.read_text())


def held(pid: int) -> dict[str, float]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    found = {"memory": int(status["VmRSS"].split()[0]) / 1024, "threads": int(status["Threads"])}
    return {**found, "descriptors": len(os.listdir(f"/proc/{pid}/fd"))}


def train(parent: int, job: Job, name: str) -> None:
    """Train until the file `over` exists."""
    begin(parent, job, name)
    faulthandler.register(signal.SIGUSR1)  # where it is, into its log
    tell = Tell(job, name)
    fetched = healed.fetched

    def noting(place: str, seconds: float) -> Any:
        found = fetched(place, seconds)
        packed = pack(found[0])
        tell.tell("given", bytes=len(packed.head) + sum(tensor.nbytes for tensor in packed.payload))
        return found

    healed.fetched = noting
    module = Validated()
    saves = ModelCheckpoint(job.folder / "saved", every_n_train_steps=200, save_top_k=1, monitor=None, save_last=True)
    trainer = Trainer(
        strategy=job.strategy(),
        accelerator="cpu",
        devices=1,
        max_steps=-1,
        max_epochs=-1,
        val_check_interval=40,
        num_sanity_val_steps=0,
        callbacks=[Ages(job, tell), saves],
        logger=CSVLogger(job.folder / "logs", flush_logs_every_n_steps=50),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    with torch.no_grad():
        tell.tell("end", step=trainer.global_step, loss=float(module.loss(examples(3, HELD_OUT))))


# ---- faults ---------------------------------------------------------------------------------------------------------


class Storm:
    """Faults of one run, one after another.

    Args:
        pause: seconds between two of them, from and to.
    """

    def __init__(self, run: Run, pause: tuple[float, float], seed: int) -> None:
        self._run, self._pause, self._draw = run, pause, random.Random(seed)
        self.kills = 0
        self.faults: list[Row] = []
        self.fallen: list[str] = []
        self.lobby: list[Row] = []

    def until(self, kills: int) -> None:
        while self.kills < kills:
            # Nobody goes on without a majority, which sixty faults an hour leave.
            self._run.until(lambda: len(self._victims()) >= self._run.job.workers - 2)
            self._fault(self._draw.choice(KINDS))
            self._let_go_on(self._draw.uniform(*self._pause))

    def _victims(self) -> list[str]:
        """Return the members that take part, but for the spared one."""
        return [name for name in self._run.alive if name != SPARED and self._run.said(name, "age")]

    def _fault(self, kind: str) -> None:
        run, there = self._run, self._victims()
        chosen = self._draw.sample(there, min(len(there), 2 if kind == "two" else 1))
        row: Row = {"kind": kind, "at": time.monotonic(), "names": chosen, "newcomers": []}
        for name in chosen:
            self._stop(name) if kind == "stopped" else self._kill(name)
            row["newcomers"].append(run.start())
        if kind == "healing" and chosen:
            self._let_go_on(self._draw.uniform(0.1, 1.5))
            self._kill(row["newcomers"].pop())
            row["at"] = time.monotonic()
            row["newcomers"].append(run.start())
        self.faults.append(row)

    def _kill(self, name: str) -> None:
        self._run.kill(name)
        self.kills += 1

    def _stop(self, name: str) -> None:
        """Another one takes its place meanwhile; when it goes on it finds that out, and ends."""
        mend = self._run.begin("stall", name)
        self._let_go_on(self._run.job.dead_after * 1.5)
        mend()
        self._run.until(lambda: not self._run.alive[name].is_alive(), 30.0)
        self._run.alive.pop(name)

    def _let_go_on(self, seconds: float) -> None:
        """Whoever ended by himself is replaced; nobody should."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name in self._run.fallen():
                self.fallen.append(name)
                print(f"{name} ended by itself: {self._last_line(name)}", flush=True)
                self._run.start()
            time.sleep(0.1)
        self.lobby.append({"at": time.monotonic(), **held(self._run.lobby_pid)})

    def _last_line(self, name: str) -> str:
        text = (self._run.job.folder / f"{name}.log").read_text().strip()
        return text.rpartition("\n")[2]


def aged(job: Job, kills: int, pause: tuple[float, float], seed: int) -> Row:
    """One run of so many kills."""
    with Run(job, Here(), train) as run:
        run.until(lambda: all(run.said(name, "age") for name in run.alive))
        storm = Storm(run, pause, seed)
        storm.until(kills)
        over = run.said(SPARED, "age")[-1]["step"] + BEFORE_THE_END
        (run.job.folder / "over").write_text(str(over))
        try:
            run.until(lambda: run.has_ended(SPARED), 60 + 10 * job.sleep * BEFORE_THE_END)
        except TimeoutError:
            for process in run.alive.values():
                os.kill(process.pid, signal.SIGUSR1)
            time.sleep(1.0)
            raise
        with suppress(TimeoutError):  # who came too late to take part waits for others
            run.until(lambda: all(run.has_ended(name) or not run.said(name, "age") for name in run.alive), 30.0)
        return found(run.job.folder, storm, [name for name in run.alive if run.said(name, "age")])


# ---- what is made of it ---------------------------------------------------------------------------------------------


def found(folder: Path, storm: Storm, last: Sequence[str]) -> Row:
    said = {kind: {file.stem: lines(file, kind) for file in folder.glob("*.jsonl")} for kind in ("age", "given", "end")}
    faults = [joined(row, said["age"]) for row in storm.faults]
    given = [row for rows in said["given"].values() for row in rows]
    ends = [said["end"][name] for name in last]
    return {
        "spared": said["age"][SPARED],
        "lobby": storm.lobby,
        "given": sorted(given, key=lambda row: float(row["at"])),
        "faults": faults,
        "fallen": storm.fallen,
        "ended": [row for rows in ends for row in rows],
        "unended": [name for name, rows in zip(last, ends, strict=True) if not rows],
        "kills": storm.kills,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=240)
    parser.add_argument("--workers", type=int, default=5)
    parser.add_argument("--pause", type=float, nargs=2, default=(2.0, 4.0), help="seconds between two faults")
    parser.add_argument("--sleep", type=float, default=0.03, help="seconds of a step")
    parser.add_argument("--dead-after", type=float, default=3.0)
    parser.add_argument("--asynchronous", action="store_true", help="nobody waits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="that stays, with each worker's lines and log")
    parser.add_argument("--output", type=Path, default=RESULTS / f"elastic-aging-{slug()}.json")
    told = parser.parse_args()
    with nullcontext(told.folder) if told.folder else tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), told.workers, -1, told.sleep, told.dead_after, asynchronous=told.asynchronous)
        row = aged(job, told.kills, told.pause, told.seed)
    settings = {name: value for name, value in vars(told).items() if name not in ("output", "folder")}
    words = [word for word in sys.argv[1:] if word not in ("--folder", str(told.folder))]
    command = shlex.join(["python", "benchmarks/elastic.py", "aging", *words])
    told.output.write_text(
        json.dumps({"command": command, "hardware": description(), "settings": settings, "row": row}) + "\n"
    )
    for name, (early, late) in compared(row).items():
        print(f"{name}: {early:.4g} in the second quarter, {late:.4g} in the last one")
    print("\n".join(amiss := faults_of(row)) or "nothing grows")
    return int(bool(amiss))
